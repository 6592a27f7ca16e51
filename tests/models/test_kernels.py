"""nn/kernels, nn/gradients, nn/few_rows: every kernel against the plain formula in fp32, with its gradients.

Without a GPU the same tests run in Triton's interpreter, where Triton is installed:
TRITON_INTERPRET=1 python -m pytest tests/models/test_kernels.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence

import pytest
import torch

from rlinf.models.nn import fused
from rlinf.models.nn.fused import Residual
from rlinf.models.nn.gemma import Gemma, KeyValue
from rlinf.models.nn.packed import pack

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
# Relative errors of a tensor; the interpreter cuts numbers to bf16 instead of rounding them.
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2 if INTERPRETED else 6e-3}
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # whose products the interpreter knows
B, S, E = 3, 7, 16
Tensor = torch.Tensor
Call = Callable[[dict[str, Tensor]], Sequence[Tensor]]


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches them on or off."""
    return lambda on: monkeypatch.setattr(fused, "_kernels_for", lambda x: on)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(DEVICE)


def distance(a: Tensor, b: Tensor) -> float:
    """Relative."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def chunked(given: dict[str, Tensor], name: str) -> Sequence[Tensor]:
    return given[name].chunk(3, -1)


def ada(given: dict[str, Tensor], name: str = "row") -> Sequence[Tensor]:
    scale, shift, gate = chunked(given, name)
    return fused.add_norm(given["x"], given["y"], gate, scale, shift, eps=1e-6, one_plus=True)


def rope(given: dict[str, Tensor]) -> Sequence[Tensor]:
    angle = randn(B, S, 1, E // 2, seed=9)
    k, v = given["kv"].chunk(2, -1)
    angles = (angle.cos().to(k.dtype), angle.sin().to(k.dtype))
    return fused.rope(given["q"], k, v, angles, head_dim=E)


CASES: dict[str, Call] = {
    "norm": lambda g: fused.add_norm(g["x"], None, None, g["w"], eps=1e-6, one_plus=True)[1:],
    "add_norm": lambda g: fused.add_norm(g["x"], g["y"], None, g["w"], eps=1e-6),
    "ada of each row": ada,
    "ada of all rows": lambda g: ada(g, "one"),
    "gate of each row": lambda g: fused.add_norm(
        g["x"], g["y"], chunked(g, "row")[0], g["w"], g["u"], eps=1e-6, one_plus=True
    ),
    "layer norm": lambda g: fused.add_norm(g["x"], None, None, g["w"], g["u"], eps=1e-6, centred=True)[1:],
    "layer norm of a gated sum": lambda g: fused.add_norm(
        g["x"], g["y"], g["u"], g["w"], g["w"], eps=1e-6, centred=True
    ),
    "norm alone is read": lambda g: fused.add_norm(g["x"], g["y"], None, g["w"], eps=1e-6)[1:],
    "gelu": lambda g: (fused.gelu_gate(*g["x"].chunk(2, -1)),),
    "silu": lambda g: (fused.silu_gate(*g["x"].chunk(2, -1)),),
    "rope": rope,
    "rope, keys and values alone": lambda g: rope(g)[1:],
    "rope, strided gradients": lambda g: [t.transpose(1, 2).contiguous() for t in rope(g)],
}


@pytest.mark.parametrize("width", [48, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_formula(case, dtype, width, use_kernels):
    shapes = {"x": (B, S, width), "y": (B, S, width), "w": (width,), "u": (width,)}
    shapes |= {"row": (B, 1, 3 * width), "one": (1, 1, 3 * width), "q": (B, S, 4 * E), "kv": (B, S, 4 * E)}
    given = {name: randn(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}

    def run(dtype: torch.dtype) -> list[Tensor | None]:
        inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in given.items()}
        outs = CASES[case](inputs)
        seeds = [randn(*out.shape, seed=20 + i).bfloat16().to(dtype) for i, out in enumerate(outs)]
        with torch.no_grad():
            again = CASES[case](inputs)
        return [*outs, *again, *torch.autograd.grad(outs, list(inputs.values()), seeds, allow_unused=True)]

    use_kernels(True)
    fast = run(dtype)
    use_kernels(False)
    for a, b in zip(fast, run(torch.float32), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, dtype)
            assert distance(a, b) < BOUND[dtype]


def test_gradients_of_many_rows_are_the_same_every_time(use_kernels):
    """Sums over rows are made in a fixed order by any number of programs."""
    use_kernels(True)
    x, w = randn(40 if INTERPRETED else 400, 30, 96), randn(96).requires_grad_()
    runs = []
    for _ in range(2):
        out = fused.add_norm(x, None, None, w, eps=1e-6)[1]
        runs.append(torch.autograd.grad(out, w, torch.ones_like(out))[0])
    assert torch.equal(*runs)
    value = x.double()
    want = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6)).sum((0, 1))
    assert float((runs[0].double() - want).abs().max()) < 1e-5 * want.numel() ** 0.5 * len(x) ** 0.5


def stream_of(rows: int, batch: int, width: int, parts: int, adaptive: bool) -> tuple[Residual, list[Tensor]]:
    """A residual in half precision whose y may come in parts, and the scale and shift of its norm."""
    shape = (batch, rows // batch, width)
    y = None if parts == 0 else randn(*shape, seed=2).to(HALF) if parts == 1 else randn(parts, *shape, seed=2)
    terms = randn(batch, 1, 3 * width).to(HALF).chunk(3, -1) if adaptive else [randn(width), None, None]
    gate = terms[2] if y is not None else None
    return Residual(randn(*shape, seed=1).to(HALF), y, gate), list(terms[:2])


def plain_norm(stream: Residual, scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    total = stream.total()
    return total, fused._norm(total, scale, shift, 1e-6, True, False)


FEW = pytest.mark.parametrize(
    ("rows", "batch", "parts", "adaptive"),
    [(6, 1, 2, False), (12, 2, 1, True), (5, 1, 0, True), (51, 1, 3, False), (40, 5, 2, True)],
)


@FEW
@torch.no_grad()
def test_norm_product_and_gate_of_few_rows(rows, batch, parts, adaptive, use_kernels):
    stream, (scale, shift) = stream_of(rows, batch, 192, parts, adaptive)
    weight = randn(256, 192).to(HALF) / 8
    use_kernels(True)
    x, got = fused.norm_gate_of_few(stream, scale, shift, weight, eps=1e-6, gelu=True)
    use_kernels(False)
    total, normed = plain_norm(stream, scale, shift)
    want = fused._gated(*(normed.float() @ weight.float().T).chunk(2, -1), True)
    assert distance(x, total) < BOUND[HALF]
    assert distance(got, want) < 2 * BOUND[HALF]


@FEW
@torch.no_grad()
def test_norm_projection_and_rotation_of_few_rows(rows, batch, parts, adaptive, use_kernels):
    stream, (scale, shift) = stream_of(rows, batch, 192, parts, adaptive)
    heads, groups, e, s = 4, 2, 64, rows // batch
    weight, angle = randn((heads + 2 * groups) * e, 192).to(HALF) / 8, randn(batch, s, 1, e // 2)
    angles = (angle.cos().to(HALF), angle.sin().to(HALF))
    k, v = (torch.zeros(batch, groups, s + 9, e, dtype=HALF, device=DEVICE) for _ in range(2))
    use_kernels(True)
    x, q = fused.norm_rope_of_few(stream, scale, shift, weight, angles, eps=1e-6, head_dim=e, room=(k, v, 9))
    use_kernels(False)
    total, normed = plain_norm(stream, scale, shift)
    projected = (normed.float() @ weight.float().T).split([heads * e, groups * e, groups * e], -1)
    want = fused.rope(*projected, (angles[0].float(), angles[1].float()), head_dim=e)
    assert distance(x, total) < BOUND[HALF]
    for got, part in zip((q, k[:, :, 9:], v[:, :, 9:]), want, strict=True):
        assert distance(got, part) < 2 * BOUND[HALF]
    assert not k[:, :, :9].any()
    assert not v[:, :, :9].any()


@pytest.mark.parametrize("rows", [6, 51])
@pytest.mark.parametrize("inner", [192, 1024])
def test_product_of_few_rows_in_parts(rows, inner, use_kernels):
    use_kernels(True)
    x, weight = randn(1, rows, inner).to(HALF), randn(128, inner).to(HALF)
    got = fused.product_of_few(x, weight)
    assert (got.dim() == 4) == (inner == 1024)
    got = got.sum(0) if got.dim() == 4 else got
    assert distance(got, x.float() @ weight.float().T) < BOUND[HALF]


@pytest.mark.parametrize("shape", [(1, 5, 32, 256), (1, 5, 1024, 32), (3, 5, 96, 40), (2, 3, 48, 20)])
@pytest.mark.parametrize("kind", ["plain", "silu", "onto"])
@torch.no_grad()
def test_linear_of_few_rows(kind, shape, use_kernels):
    """Strided on every side, as actions among tokens and one half of a weight are; half precision in or out."""
    b, s, inner, cols = shape
    x, weight, bias = randn(b, s + 1, inner)[:, 1:], randn(cols, 2 * inner)[:, :inner] / inner**0.5, randn(cols)
    onto, room = randn(b, s, cols, seed=3), torch.zeros(b, s + 1, cols, dtype=HALF, device=DEVICE)
    more = {"plain": {}, "silu": {"silu": True}, "onto": {"onto": onto, "factor": -0.2}}[kind]
    use_kernels(True)
    got = fused.linear_of_few(x, weight, bias, **more)
    from_half = fused.linear_of_few(x.to(HALF), weight, bias, **more)
    assert fused.linear_of_few(x, weight, bias, out=room[:, 1:], **more).data_ptr() == room[:, 1:].data_ptr()
    use_kernels(False)
    assert got.dtype == from_half.dtype == torch.float32
    assert distance(got, fused.linear_of_few(x, weight, bias, **more)) < BOUND[torch.float32]
    assert distance(from_half, fused.linear_of_few(x.to(HALF), weight, bias, **more)) < BOUND[torch.float32]
    assert distance(room[:, 1:], got) < BOUND[HALF]
    assert not room[:, 0].any()


@pytest.mark.parametrize("inner", [64, 36, 7])
def test_product_of_few_columns(inner, use_kernels):
    a, b = randn(20, 2 * inner)[:, :inner], randn(inner, 3)
    use_kernels(True)
    assert distance(fused.product_of_few_columns(a, b), a.double() @ b.double()) < BOUND[torch.float32]


@pytest.mark.parametrize("shape", [(2, 16, 588, 144), (1, 49, 48, 64)])
@torch.no_grad()
def test_linear_plus_positions(shape, use_kernels):
    m, t, inner, cols = shape
    given = (randn(m, t, inner), randn(cols, inner) / inner**0.5, randn(cols), randn(t, cols))
    use_kernels(True)
    got, rounded = fused.linear_plus(*given, torch.float32), fused.linear_plus(*given, HALF)
    use_kernels(False)
    want = fused.linear_plus(*(part.double() for part in given), torch.float64)
    assert rounded.dtype == HALF
    assert distance(got, want) < 2 * BOUND[torch.float32]
    assert distance(rounded, want) < BOUND[HALF]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("tokens", [6, 33])
@torch.no_grad()
def test_an_expert_of_few_rows_equals_the_plain_one(tokens, adaptive, use_kernels):
    """Whole blocks behind stored keys, with a mask: what acting for one robot runs."""
    net = Gemma(width=128, hidden=256, depth=2, heads=4, kv_heads=1, head_dim=64, adaptive=adaptive).to(DEVICE)
    for i, parameter in enumerate(net.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=i) / parameter.shape[-1] ** 0.5)
    net.to(HALF)
    pack(net)
    past = [tuple(randn(1, 1, 20, 64, seed=50 + 2 * i + j).to(HALF) for j in range(2)) for i in range(2)]
    x, positions = randn(1, tokens, 128).to(HALF), torch.arange(20, 20 + tokens, device=DEVICE)[None]
    visible = torch.ones(1, tokens, 20 + tokens, dtype=torch.bool, device=DEVICE)
    visible[:, 0, 21:] = False
    modulation = [randn(1, 1, 3 * 128, seed=i).to(HALF) / 2 for i in range(5)] if adaptive else None

    def run(on: bool) -> Tensor:
        use_kernels(on)
        kv = [KeyValue(k.to(net.dtype), v.to(net.dtype)).with_room(tokens) for k, v in past]
        given = None if modulation is None else [m.to(net.dtype) for m in modulation]
        bias = torch.zeros(visible.shape, device=DEVICE).masked_fill(~visible, -3e4).repeat_interleave(4, 1)[:, None]
        frame = net.frame(positions, None)._replace(bias=bias.to(net.dtype))
        out, _ = net(x, frame, past=kv, modulation=given)
        assert out is not None
        return out

    few = run(True)
    plain = run(False)
    net.float()
    exact = run(False)
    assert distance(few, exact) < 1.5 * distance(plain, exact)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_many_queries_that_see_the_same_keys(masked: bool, use_kernels: Callable[[bool], None]) -> None:
    use_kernels(True)
    q, k, v = (randn(B, 1, n, 256, seed=n).to(HALF) for n in (530, 90, 90))
    k, v = k[:, :, :75], v[:, :, :75]  # as in buffers with room
    bias = torch.where(randn(B, 1, 1, 75, seed=1) > 1, -3e4, 0.0).to(HALF) if masked else None
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=None if bias is None else bias.float()
    )
    assert fused._suits_whole(q, k, v)
    with torch.no_grad():
        got = fused.attend(q, k, v, bias)
    assert distance(got, want) < BOUND[HALF]
