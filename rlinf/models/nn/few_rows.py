"""Products of few rows with large weights, as in a call for one robot: kernels whose time is reading the weights once.

A library's product of a handful of rows reads the weights slowly, and every norm, gate, rotation and sum between two
products costs a launch. Here the columns are dealt out to all processors, the inner columns too where a product has few
columns (`product`: the next norm adds up the parts), and gates and rotations are applied by the products that they
follow. Norms keep a launch of their own: computed by every program anew they cost three times as much. Numbers are
rounded where the kernels that they replace round: the stream, the normed input, every product and the gated MLP.

Measured with them (benchmarks/kernels.py, one H200): a layer of π0's expert with 51 tokens takes 40 µs instead of 48.

Letters: B rows, S tokens, M = B * S, W width, H hidden width, G key/value heads, R query heads per group, E head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rlinf.models.nn import kernels
from rlinf.models.nn.launch import begin, bring, early, lines

Tensor = torch.Tensor
FEWEST = 16  # rows of a processor's smallest product
LINEAR_TILE = 4096  # weights that a program of `linear` holds
LINEAR_PROGRAMS = 128  # of `linear`, where there are as many columns: every processor gets one


class Tile(NamedTuple):
    """How a kernel is cut; benchmarks/kernels.py compares choices."""

    cols: int  # columns of a program; of each of the two in a paired product
    inner: int = 128  # inner columns of a step
    split: int = 1  # programs that share the inner columns
    warps: int = 4
    stages: int = 4  # steps whose weights are on their way at once


TILES = {  # by kernel, and by whether the rows are at most FEWEST
    ("gate", True): Tile(32),
    ("gate", False): Tile(32, inner=64, stages=5),
    ("rope", True): Tile(32),
    ("rope", False): Tile(16),
    ("product", True): Tile(16, inner=256, split=4, warps=2, stages=3),
    ("product", False): Tile(32, split=4),
}


class Stream(NamedTuple):
    """The input of a product: the norm of x + gate * y, as the arguments of kernels.add_norm."""

    x: Tensor  # [B, S, W]
    y: Tensor | None  # [B, S, W], or fp32 parts of a sum [P, B, S, W]
    gate: Tensor | None
    scale: Tensor
    shift: Tensor | None
    eps: float
    one_plus: bool


@triton.jit
def _paired(
    x, weight, cos, sin, out, out_k, out_v, M, S, K, H, E, R, angle_stride, out_tokens, out_first,
    ROPE: tl.constexpr, GELU: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    there = rows < M
    if ROPE:  # a column of a head's first half, and its partner
        half = E // 2
        head, cols = block // (half // COLS), (block % (half // COLS)) * COLS + cols
        first, other = head * E + cols, half
    else:  # a column of the gate, and the one of what it gates
        cols = block * COLS + cols
        first, other = cols, H
    own = weight + first.to(tl.int64) * K
    if EARLY:
        bring(own, K, LINES)
        bring(own + other * K, K, LINES)
    begin(EARLY)
    steps = tl.arange(0, INNER)
    source = own[:, None] + steps[None, :]
    batch = rows // S
    a = tl.zeros([ROWS, COLS], tl.float32)
    b = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, INNER):
        one = tl.load(source + start)
        two = tl.load(source + other * K + start)
        normed = tl.load(x + rows[:, None] * K + (start + steps)[None, :], mask=there[:, None], other=0.0)
        a = tl.dot(normed, tl.trans(one), a)
        b = tl.dot(normed, tl.trans(two), b)
    a = a.to(out.dtype.element_ty).to(tl.float32)
    b = b.to(out.dtype.element_ty).to(tl.float32)
    asked = there[:, None]
    if ROPE:
        token = rows % S
        angle = (batch * angle_stride + token * half)[:, None] + cols[None, :]
        c = tl.load(cos + angle, mask=asked, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=asked, other=0.0).to(tl.float32)
        low, high = a * c - b * s, b * c + a * s
        if head < HEADS:
            place = out + ((batch * GROUPS + head // R) * S * R + token * R + head % R)[:, None] * E + cols[None, :]
            tl.store(place, low.to(out.dtype.element_ty), mask=asked)
            tl.store(place + half, high.to(out.dtype.element_ty), mask=asked)
        else:
            group = (head - HEADS) % GROUPS
            to = ((batch * GROUPS + group).to(tl.int64) * out_tokens + out_first + token)[:, None] * E + cols[None, :]
            if head < HEADS + GROUPS:
                tl.store(out_k + to, low.to(out_k.dtype.element_ty), mask=asked)
                tl.store(out_k + to + half, high.to(out_k.dtype.element_ty), mask=asked)
            else:  # values are not rotated
                tl.store(out_v + to, a.to(out_v.dtype.element_ty), mask=asked)
                tl.store(out_v + to + half, b.to(out_v.dtype.element_ty), mask=asked)
    else:
        if GELU:  # as kernels._gated
            active = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
        else:
            active = a * tl.sigmoid(a)
        tl.store(out + rows[:, None] * H + cols[None, :], (active * b).to(out.dtype.element_ty), mask=asked)


@triton.jit
def _product(
    x, weight, out, M, N, K, PART,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    own = weight + cols.to(tl.int64) * K + part * PART
    if EARLY:
        bring(own, PART, LINES)
    begin(EARLY)
    rows = tl.arange(0, ROWS)
    steps = tl.arange(0, INNER)
    there = (rows < M)[:, None]
    total = tl.zeros([ROWS, COLS], tl.float32)
    source = own[:, None] + steps[None, :]
    given = x + rows[:, None] * K + part * PART + steps[None, :]
    for start in range(0, PART, INNER):
        one = tl.load(given + start, mask=there, other=0.0)
        two = tl.load(source + start)
        total = tl.dot(one, tl.trans(two), total)
    place = (part * M + rows)[:, None] * N + cols[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


def product(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """x [B, S, K] times weight [W, K]: fp32 parts [P, B, S, W] of a sum, or the sum [B, S, W] itself, rounded."""
    b, s, inner = x.shape
    rows, cols = b * s, weight.shape[0]
    tile = tile or TILES["product", rows <= FEWEST]
    if inner % (tile.split * tile.inner):
        tile = tile._replace(split=1, inner=largest_step(inner, tile.inner))
    split, part = tile.split, inner // tile.split
    out = torch.empty((split, b, s, cols), dtype=x.dtype if split == 1 else torch.float32, device=x.device)
    _product[(cols // tile.cols, split)](
        x.contiguous(), weight, out, rows, cols, inner, part,
        ROWS=_rows(rows), COLS=tile.cols, INNER=tile.inner, LINES=lines(part),
        num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return out[0] if split == 1 else out


def norm_gate(stream: Stream, weight: Tensor, gelu: bool, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """The stream added up [B, S, W], and the gated MLP [B, S, H] of its norm, weight [2 H, W]: gate, then up."""
    b, s, _ = stream.x.shape
    hidden = weight.shape[0] // 2
    tile = tile or TILES["gate", b * s <= FEWEST]
    out = torch.empty(b, s, hidden, dtype=stream.x.dtype, device=stream.x.device)
    x = _run(stream, weight, tile, hidden // tile.cols, out, None, hidden=hidden, gelu=gelu)
    return x, out


def norm_rope(
    stream: Stream,
    weight: Tensor,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    room: tuple[Tensor, Tensor, int],
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream added up, and rotated queries [B, G, S * R, E] of its norm; keys and values go to `room`.

    weight [(heads + 2 G) * E, W] holds queries, keys and values; for `room` and angles see fused.rope.
    """
    b, s, _ = stream.x.shape
    groups, heads = room[0].shape[1], weight.shape[0] // head_dim
    queries = heads - 2 * groups
    tile = tile or TILES["rope", b * s <= FEWEST]
    out = torch.empty(b, groups, s * queries // groups, head_dim, dtype=stream.x.dtype, device=stream.x.device)
    blocks = heads * (head_dim // 2 // tile.cols)
    return _run(stream, weight, tile, blocks, out, (angles, head_dim, queries, groups, room)), out


Rotation = tuple[tuple[Tensor, Tensor], int, int, int, tuple[Tensor, Tensor, int]]


def _run(
    stream: Stream,
    weight: Tensor,
    tile: Tile,
    blocks: int,
    out: Tensor,
    rotation: Rotation | None,
    *,
    hidden: int = 0,
    gelu: bool = True,
) -> Tensor:
    """Launch the norm and `_paired` behind it; returns the stream added up."""
    x, y, gate, scale, shift, eps, one_plus = stream
    b, s, width = x.shape
    total, normed = kernels.add_norm(x, y, gate, scale, shift, eps, one_plus, False)
    angles, head_dim, heads, groups, room = rotation or ((scale, scale), 0, 1, 1, (out, out, 0))
    _paired[(blocks,)](
        normed, weight, *angles, out, room[0], room[1],
        b * s, s, width, hidden, head_dim, heads // groups,
        0 if angles[0].shape[0] == 1 else angles[0].stride(0), room[0].shape[2], room[2],
        ROPE=rotation is not None, GELU=gelu, HEADS=heads, GROUPS=groups,
        ROWS=_rows(b * s), COLS=tile.cols, INNER=largest_step(width, tile.inner),
        LINES=lines(width), num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return total


@triton.jit
def _linear(
    x, weight, bias, onto, out, factor, N, K, S, weight_row, x_batch, x_row, onto_batch, onto_row, out_batch, out_row,
    ROWS: tl.constexpr, SILU: tl.constexpr, HAS_ONTO: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    steps = tl.arange(0, INNER)[None, :]
    asked, inside = cols < N, steps < K
    own = tl.load(weight + cols[:, None] * weight_row + steps, mask=asked[:, None] & inside, other=0.0)
    shift = tl.load(bias + cols, mask=asked, other=0.0)
    for row in tl.static_range(ROWS):
        batch, token = row // S, row % S
        given = tl.load(x + batch * x_batch + token * x_row + steps, mask=inside, other=0.0).to(tl.float32)
        value = tl.sum(own * given, 1) + shift
        if SILU:
            value = value * tl.sigmoid(value)
        if HAS_ONTO:
            value = tl.load(onto + batch * onto_batch + token * onto_row + cols, mask=asked, other=0.0) + factor * value
        tl.store(out + batch * out_batch + token * out_row + cols, value.to(out.dtype.element_ty), mask=asked)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor, silu: bool, onto: Tensor | None, factor: float, out: Tensor
) -> None:
    """See fused.linear_of_few. Every program reads all of its columns' weights at once, and meets the rows in turn."""
    b, s, inner = x.shape
    cols, step = weight.shape[0], triton.next_power_of_2(inner)
    base = out if onto is None else onto
    tile = max(1, min(LINEAR_TILE // step, largest_step(cols, cols // LINEAR_PROGRAMS)))
    _linear[(triton.cdiv(cols, tile),)](
        x, weight, bias, base, out, factor, cols, inner, s,
        weight.stride(0), x.stride(0), x.stride(1), base.stride(0), base.stride(1), out.stride(0), out.stride(1),
        ROWS=b * s, SILU=silu, HAS_ONTO=onto is not None, COLS=tile, INNER=step, num_warps=4, **early(),
    )  # fmt: skip


def largest_step(inner: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides `inner`; less than 16 where no kernel can be used."""
    return min(1 << (max(1, wanted).bit_length() - 1), inner & -inner)


def _rows(rows: int) -> int:
    return max(FEWEST, triton.next_power_of_2(rows))
