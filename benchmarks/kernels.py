"""Each Triton kernel on one GPU beside what it replaces: relative error and time, with several ways to cut it.

    python benchmarks/kernels.py [--sections few,ends,blocks,training] [--rows 6,51]

`few` measures the products of π0's expert for one robot (rows: its tokens), over the weights of as many layers as the
network has, so that none of them waits in a cache; `ends` the fp32 layers before and behind its blocks, and the one of
the pictures' patches; `blocks` the layers as a whole; `training` forward and backward pass of what lies between
products, in the shapes of size small. Times are those of recorded calls. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from rlinf.models.nn import fused
from rlinf.models.nn.gemma import Gemma, KeyValue
from rlinf.models.nn.packed import pack

Tensor = torch.Tensor
DEPTH, WIDTH, HIDDEN, HEADS, HEAD_DIM, PAST = 18, 1024, 4096, 8, 256, 272  # π0's expert behind one camera
SECTIONS = ("few", "ends", "blocks", "training")
COLUMNS_IN, ACTIONS, STEPS, PATCHES, PIXELS, VISION = 32, 5, 5, 256, 588, 1152  # padded action columns; SigLIP's sizes
COLUMNS = "| kernel | shape | how it is cut | µs | µs before | error | error before |"


class Table:
    """Prints a row as soon as it is measured."""

    def __init__(self) -> None:
        print(COLUMNS)
        print("|---" * 7 + "|")

    def add(self, name: str, shape: str, how: str, fast: float, plain: float, errors: Sequence[float]) -> None:
        """Times in seconds, relative errors of the kernel and of what it replaces."""
        found = " | ".join(f"{error:.1e}" for error in errors)
        print(f"| {name} | {shape} | {how} | {1e6 * fast:.1f} | {1e6 * plain:.1f} | {found} |", flush=True)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers on the device."""
    generator = torch.Generator("cuda").manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device="cuda")


def seconds(calls: Sequence[Callable[[], Any]], repeats: int = 15) -> float:
    """Median seconds of one of the calls, recorded one after the other."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            calls[0]()
        calls[-1]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[repeats // 2] / len(calls)


def distance(found: Any, exact: Any) -> float:
    """The largest relative error of a tensor among several."""
    pairs = zip(found, exact, strict=True) if isinstance(found, list | tuple) else [(found, exact)]
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def in_layers(call: Callable[[Tensor], Any], weights: Sequence[Tensor]) -> list[Callable[[], Any]]:
    """The same call with the weights of every layer."""
    return [lambda weight=weight: call(weight) for weight in weights]


@torch.no_grad()
def measure_few_rows(rows: int, table: Table) -> None:
    """The products of a layer, with what lies around them."""
    from rlinf.models.nn import few_rows
    from rlinf.models.nn.few_rows import Stream, Tile

    few = rows <= few_rows.FEWEST
    paired = [Tile(32), Tile(16), Tile(32, inner=64, stages=5), Tile(16, inner=256, stages=3)]
    deep = ((128, 5), (256, 3))  # inner columns, and how many steps of them are on their way
    paired += [Tile(cols, inner, warps=w, stages=s) for cols in (16, 32) for w in (1, 2) for inner, s in deep]
    wide = [Tile(32), Tile(16), Tile(32, inner=64, stages=5), Tile(32, warps=8)]
    split = [Tile(16, 256, split=4, stages=3), Tile(16, 256, split=8, stages=2), Tile(16, 128, split=4)]
    split += [Tile(16, inner, split=n, warps=w, stages=3) for n in (4, 8) for w in (1, 2) for inner in (128, 256)]
    halves = [Tile(32, split=4), Tile(16, split=2), Tile(32, split=8), Tile(32, 64, split=4, stages=5)]
    weights = {
        name: [(randn(*shape, seed=i) / shape[1] ** 0.5).bfloat16() for i in range(DEPTH)]
        for name, shape in {
            "qkv": ((HEADS + 2) * HEAD_DIM, WIDTH),
            "o": (WIDTH, HEADS * HEAD_DIM),
            "gate_up": (2 * HIDDEN, WIDTH),
            "down": (WIDTH, HIDDEN),
        }.items()
    }
    x, y, scale = randn(1, rows, WIDTH).bfloat16(), randn(1, rows, WIDTH, seed=1).bfloat16(), randn(WIDTH) / 4
    stream, parts = Stream(x, y, None, scale, None, 1e-6, True), torch.stack((y, y)).float() / 2
    in_parts = stream._replace(y=parts)
    angle = randn(1, rows, 1, HEAD_DIM // 2)
    angles = (angle.cos().bfloat16(), angle.sin().bfloat16())
    room = tuple(torch.zeros(1, 1, PAST + rows, HEAD_DIM, device="cuda", dtype=x.dtype) for _ in range(2))
    sizes = [HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM]

    def normed() -> Tensor:
        return fused.add_norm(x, y, None, scale, eps=1e-6, one_plus=True)[1]

    def project(weight: Tensor) -> Tensor:
        q, k, v = F.linear(normed(), weight).split(sizes, -1)
        return fused.rope(q, k, v, angles, head_dim=HEAD_DIM, room=(*room, PAST))[0]

    def gate(weight: Tensor) -> Tensor:
        return fused.gelu_gate(*F.linear(normed(), weight).chunk(2, -1))

    exact_norm = fused._add_norm(x, y, None, scale, None, 1e-6, True, False)[1].float()
    projected = F.linear(exact_norm, weights["qkv"][0].float()).split(sizes, -1)
    exact = fused._rope(*projected, *(a.float() for a in angles), HEAD_DIM)[0]
    plain = seconds(in_layers(project, weights["qkv"]))
    for tile in paired if few else wide:
        if tile.cols > HEAD_DIM // 2:
            continue

        def fast_project(weight: Tensor, tile: Tile = tile) -> Tensor:
            return few_rows.norm_rope(in_parts, weight, angles, HEAD_DIM, (*room, PAST), tile)[1]

        errors = [distance(call(weights["qkv"][0]), exact) for call in (fast_project, project)]
        fast = seconds(in_layers(fast_project, weights["qkv"]))
        table.add("norm, qkv, rope", f"{rows}x{WIDTH}", _cut(tile), fast, plain, errors)
    exact = fused._gated(*F.linear(exact_norm, weights["gate_up"][0].float()).chunk(2, -1), True)
    plain = seconds(in_layers(gate, weights["gate_up"]))
    for tile in paired if few else wide:

        def fast_gate(weight: Tensor, tile: Tile = tile) -> Tensor:
            return few_rows.norm_gate(in_parts, weight, True, tile)[1]

        errors = [distance(call(weights["gate_up"][0]), exact) for call in (fast_gate, gate)]
        fast = seconds(in_layers(fast_gate, weights["gate_up"]))
        table.add("norm, gate and up, GELU", f"{rows}x{WIDTH}", _cut(tile), fast, plain, errors)
    for name in ("o", "down"):
        given = randn(1, rows, weights[name][0].shape[1]).bfloat16()
        exact = F.linear(given.float(), weights[name][0].float())
        plain = seconds(in_layers(lambda weight, given=given: F.linear(given, weight), weights[name]))
        for tile in split if few else halves:

            def fast_product(weight: Tensor, tile: Tile = tile, given: Tensor = given) -> Tensor:
                return few_rows.product(given, weight, tile)

            found = fast_product(weights[name][0])
            errors = [distance(found.float().view(-1, *exact.shape).sum(0).bfloat16(), exact)]
            errors.append(distance(F.linear(given, weights[name][0]), exact))
            fast = seconds(in_layers(fast_product, weights[name]))
            table.add(f"{name}, in parts", f"{rows}x{given.shape[-1]}", _cut(tile), fast, plain, errors)


def _cut(tile: Any) -> str:
    return f"{tile.cols} columns, {tile.inner} inner, split {tile.split}, {tile.warps} warps, {tile.stages} stages"


@torch.no_grad()
def measure_blocks(rows: int, table: Table) -> None:
    """The expert's layers as they act, per layer: with the library's products, and with ours in several settings."""

    net = Gemma(width=WIDTH, hidden=HIDDEN, depth=DEPTH, heads=HEADS, kv_heads=1, head_dim=HEAD_DIM).cuda()
    for i, parameter in enumerate(net.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=i) / parameter.shape[-1] ** 0.5)
    x, at = randn(1, rows, WIDTH), torch.arange(PAST, PAST + rows, device="cuda")[None]
    past = [[randn(1, 1, PAST, HEAD_DIM, seed=2 * i + j).bfloat16() for j in range(2)] for i in range(DEPTH)]
    net.bfloat16()

    def prepared() -> Callable[[], Tensor]:
        kv = [KeyValue(*(t.to(net.dtype) for t in pair)).with_room(rows) for pair in past]
        frame = net.frame(at, None)

        def call() -> Tensor:
            out, _ = net(x, frame, past=kv)
            assert out is not None
            return out

        return call

    net.float()
    exact = prepared()()
    net.bfloat16()
    pack(net)
    call, many = prepared(), fused.PRODUCT_ROWS
    fused.PRODUCT_ROWS = 0
    plain, plain_error = seconds([call]) / DEPTH, distance(call(), exact)
    fused.PRODUCT_ROWS = many
    fast, error = seconds([call]) / DEPTH, distance(call(), exact)
    table.add("a layer of the expert", f"{rows}x{WIDTH}", "as chosen", fast, plain, (error, plain_error))


def measure_training(table: Table) -> None:
    """Forward and backward pass between the products, in bf16, with kernels and by the plain formulas."""
    shapes = {"80 tokens": (512, 80, 384, 1024, 6), "6 tokens": (512, 6, 256, 768, 6)}
    for title, (b, s, width, hidden, heads) in shapes.items():
        given = {
            "x": randn(b, s, width),
            "y": randn(b, s, width, seed=1),
            "w": randn(width),
            "u": randn(width, seed=1),
            "row": randn(b, 1, 3 * width),
            "gate": randn(b, s, hidden),
            "up": randn(b, s, hidden, seed=1),
            "q": randn(b, s, heads * 64),
            "k": randn(b, s, 64),
            "v": randn(b, s, 64, seed=1),
        }
        given = {name: tensor.bfloat16() for name, tensor in given.items()}
        angle = randn(b, s, 1, 32)

        def rope(g: dict[str, Tensor], angle: Tensor = angle) -> Any:
            cos, sin = (a.to(g["q"].dtype) for a in (angle.cos(), angle.sin()))
            return fused.rope(g["q"], g["k"], g["v"], (cos, sin), head_dim=64)

        def adaptive(g: dict[str, Tensor]) -> Any:
            scale, shift, gate = g["row"].chunk(3, -1)
            return fused.add_norm(g["x"], g["y"], gate, scale, shift, eps=1e-6, one_plus=True)

        cases: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
            "RMS norm of a sum": (lambda g: fused.add_norm(g["x"], g["y"], None, g["w"], eps=1e-6), "x y w"),
            "layer norm of a sum": (
                lambda g: fused.add_norm(g["x"], g["y"], None, g["w"], g["u"], eps=1e-6, centred=True),
                "x y w u",
            ),
            "adaptive norm": (adaptive, "x y row"),
            "gated MLP": (lambda g: (fused.gelu_gate(g["gate"], g["up"]),), "gate up"),
            "rope": (rope, "q k v"),
        }
        for name, (call, names) in cases.items():
            measured = {}
            for kind in ("exact", "plain", "fast"):
                dtype = torch.float32 if kind == "exact" else torch.bfloat16
                leaves = {n: given[n].to(dtype).requires_grad_() for n in names.split()}
                kernels_for = fused._kernels_for
                if kind != "fast":
                    fused._kernels_for = lambda x: False
                try:
                    seeds = [randn(*out.shape, seed=i).to(dtype) for i, out in enumerate(call(leaves))]

                    def both(call: Any = call, leaves: Any = leaves, seeds: Any = seeds) -> list[Tensor]:
                        outs = call(leaves)
                        return [*outs, *torch.autograd.grad(outs, list(leaves.values()), seeds)]

                    measured[kind] = ([t.detach() for t in both()], 0.0 if kind == "exact" else seconds([both]))
                finally:
                    fused._kernels_for = kernels_for
            exact = measured["exact"][0]
            errors = [distance(measured[kind][0], exact) for kind in ("fast", "plain")]
            shape = f"{b}x{title}"
            table.add(name, shape, "forward and backward", measured["fast"][1], measured["plain"][1], errors)


@torch.no_grad()
def measure_ends(table: Table) -> None:
    """What stands around the expert's blocks in a call for one robot, all in fp32."""
    noisy, hidden, times = randn(1, ACTIONS, COLUMNS_IN), randn(1, ACTIONS, WIDTH), randn(1, STEPS, 2 * WIDTH)
    patches, positions, into = randn(1, PATCHES, PIXELS), randn(PATCHES, VISION), randn(WIDTH, COLUMNS_IN)
    tokens = torch.zeros(1, ACTIONS + 1, WIDTH, device="cuda", dtype=torch.bfloat16)[:, 1:]
    bias, features = randn(VISION), hidden.bfloat16()
    cases: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
        "noisy actions and time, SiLU": (
            lambda w: fused.linear_of_few(noisy, w, bias[:WIDTH], silu=True),
            (WIDTH, COLUMNS_IN),
        ),
        "tokens": (lambda w: fused.linear_of_few(hidden, w, bias[:WIDTH], out=tokens).clone(), (WIDTH, WIDTH)),
        "velocity and step": (
            lambda w: fused.linear_of_few(features, w, bias[:COLUMNS_IN], onto=noisy, factor=-1 / STEPS),
            (COLUMNS_IN, WIDTH),
        ),
        "times, once a call": (lambda w: fused.linear_of_few(times, w, bias[:WIDTH]), (WIDTH, 2 * WIDTH)),
        "two layers as one, once a call": (
            lambda w: fused.product_of_few_columns(w[:, :WIDTH], into),
            (WIDTH, 2 * WIDTH),
        ),
        "patches, once a call": (
            lambda w: fused.linear_plus(patches, w, bias, positions, torch.bfloat16),
            (VISION, PIXELS),
        ),
    }
    kernels_for = fused._kernels_for
    for name, (call, shape) in cases.items():
        weights = [randn(*shape, seed=i) / shape[1] ** 0.5 for i in range(DEPTH)]
        measured = {}
        for kind in ("plain", "fast"):
            fused._kernels_for = kernels_for if kind == "fast" else lambda x: False
            try:
                measured[kind] = (call(weights[0]), seconds(in_layers(call, weights)))
            finally:
                fused._kernels_for = kernels_for
        error = distance(measured["fast"][0], measured["plain"][0])
        table.add(
            name,
            "x".join(map(str, shape)),
            "error: of the difference",
            measured["fast"][1],
            measured["plain"][1],
            [error],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of " + ", ".join(SECTIONS))
    parser.add_argument("--rows", default="6,51", help="tokens of one robot's call")
    options = parser.parse_args()
    sections = options.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--sections: {', '.join(sorted(unknown))} is none of {', '.join(SECTIONS)}")
    if not fused.has_kernels():
        parser.error("this benchmark needs a GPU, Triton and a C compiler")
    start, table = time.perf_counter(), Table()
    for rows in map(int, options.rows.split(",")):
        if "few" in sections:
            measure_few_rows(rows, table)
        if "blocks" in sections:
            measure_blocks(rows, table)
    if "ends" in sections:
        measure_ends(table)
    if "training" in sections:
        measure_training(table)
    print(f"\n{torch.cuda.get_device_name()}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
