"""Triton kernels behind `fused`: each reads its inputs once and writes its outputs once.

Imported only where a GPU is used; the formulas they must equal are the plain ones in `fused`.

Measured with them (docs/benchmarks.md, one H200): a call of π0 on 64 rows takes 1.22 times what its matrix products
alone would, one of OpenVLA-OFT 1.16 times; what is left is everything between the products, attention included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlinf.models.nn.launch import begin, early

Tensor = torch.Tensor
GATE_BLOCK = 1024
FEW_PAIRS = 4  # batch rows times key/value heads up to which `attend` deals out smaller blocks


@triton.jit
def _add_norm(
    x, y, gate, scale, shift, out_x, out,
    W, S, NUMEL, gate_stride, scale_stride, shift_stride, eps,
    PARTS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    ONE_PLUS: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    batch = row // S
    cols = tl.arange(0, BLOCK)
    inside = cols < W
    value = tl.load(x + row * W + cols, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        step = tl.load(y + row * W + cols, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            step += tl.load(y + part * NUMEL + row * W + cols, mask=inside, other=0.0).to(tl.float32)
        step = step.to(out_x.dtype.element_ty).to(tl.float32)
        if HAS_GATE:
            step = step * tl.load(gate + batch * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + step).to(out_x.dtype.element_ty)
        tl.store(out_x + row * W + cols, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(value, 0) / W
        value = tl.where(inside, value - mean, 0.0)
    factor = tl.load(scale + batch * scale_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if ONE_PLUS:
        factor = 1.0 + factor
    normal = value * tl.rsqrt(tl.sum(value * value, 0) / W + eps) * factor
    if HAS_SHIFT:
        normal = normal + tl.load(shift + batch * shift_stride + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * W + cols, normal.to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    one_plus: bool,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """See fused.add_norm; y may also be fp32 parts of a sum [P, B, S, W], which is rounded first."""
    x = x.contiguous()
    y = None if y is None else y.contiguous()
    width, seq = x.shape[-1], x.shape[-2]
    out, out_x = torch.empty_like(x), x if y is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_norm[(x.numel() // width,)](
        x, x if y is None else y, scale if gate is None else gate, scale, scale if shift is None else shift, out_x, out,
        width, seq, x.numel(), row_stride(gate), row_stride(scale), row_stride(shift), eps,
        PARTS=num_parts(y, x), HAS_GATE=gate is not None, HAS_SHIFT=shift is not None,
        ONE_PLUS=one_plus, CENTRED=centred, BLOCK=block, num_warps=4 if block <= 2048 else 8, **early(),
    )  # fmt: skip
    return out_x, out


def norm(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, one_plus: bool, centred: bool) -> Tensor:
    """The norm of add_norm alone."""
    return add_norm(x, None, None, scale, shift, eps, one_plus, centred)[1]


def num_parts(y: Tensor | None, x: Tensor) -> int:
    """How many tensors of x's shape y is the sum of; 0 without one."""
    return 0 if y is None else y.numel() // x.numel()


def row_stride(t: Tensor | None) -> int:
    """Elements from one batch row's [W] to the next; 0 when all rows share one."""
    return 0 if t is None or t.dim() == 1 or t.shape[0] == 1 else t.stride(0)


@triton.jit
def _gated(
    gate, up, out, H, gate_stride, up_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    g = tl.load(gate + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # tanh(z) = 2 sigmoid(2 z) - 1
        active = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    else:
        active = g * tl.sigmoid(g)
    tl.store(out + row * H + cols, (active * u).to(out.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """See fused.gelu_gate and fused.silu_gate; the two may be halves of one tensor."""
    hidden = gate.shape[-1]
    rows = gate.numel() // hidden
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = (rows, triton.cdiv(hidden, GATE_BLOCK))
    _gated[grid](gate, up, out, hidden, gate.stride(-2), up.stride(-2), GELU=gelu, BLOCK=GATE_BLOCK, **early())
    return out


@triton.jit
def _rope(
    q, k, v, cos, sin, out_q, out_k, out_v,
    S, R, E, q_stride, k_stride, v_stride, angle_stride, out_tokens, out_first,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEADS_UP: tl.constexpr, GROUPS_UP: tl.constexpr, HALF_UP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // S, row % S
    half = E // 2
    cols = tl.arange(0, HALF_UP)
    inside = cols < half
    c = tl.load(cos + batch * angle_stride + token * half + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + batch * angle_stride + token * half + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    head = tl.arange(0, HEADS_UP)
    kept = (head < HEADS)[:, None] & inside[None, :]
    src = q + row * q_stride + head[:, None] * E + cols[None, :]
    a = tl.load(src, mask=kept, other=0.0).to(tl.float32)
    b = tl.load(src + half, mask=kept, other=0.0).to(tl.float32)
    dst = out_q + ((batch * GROUPS + head // R) * S * R + token * R + head % R)[:, None] * E + cols[None, :]
    tl.store(dst, (a * c - b * s).to(out_q.dtype.element_ty), mask=kept)
    tl.store(dst + half, (b * c + a * s).to(out_q.dtype.element_ty), mask=kept)
    group = tl.arange(0, GROUPS_UP)
    kept = (group < GROUPS)[:, None] & inside[None, :]
    src = k + row * k_stride + group[:, None] * E + cols[None, :]
    a = tl.load(src, mask=kept, other=0.0).to(tl.float32)
    b = tl.load(src + half, mask=kept, other=0.0).to(tl.float32)
    place = ((batch * GROUPS + group) * out_tokens + out_first + token)[:, None] * E + cols[None, :]
    tl.store(out_k + place, (a * c - b * s).to(out_k.dtype.element_ty), mask=kept)
    tl.store(out_k + place + half, (b * c + a * s).to(out_k.dtype.element_ty), mask=kept)
    src = v + row * v_stride + group[:, None] * E + cols[None, :]
    tl.store(out_v + place, tl.load(src, mask=kept), mask=kept)
    tl.store(out_v + place + half, tl.load(src + half, mask=kept), mask=kept)


def rope(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, head_dim: int, out_k: Tensor, out_v: Tensor, first: int
) -> Tensor:
    """See fused.rope: keys and values go to out_k, out_v [B, G, P, E] from token `first` on; returns the queries."""
    b, s = q.shape[:2]
    heads, groups = q.shape[2] // head_dim, k.shape[2] // head_dim
    ratio, up = heads // groups, triton.next_power_of_2
    out_q = torch.empty(b, groups, s * ratio, head_dim, dtype=q.dtype, device=q.device)
    _rope[(b * s,)](
        q, k, v, cos, sin, out_q, out_k, out_v,
        s, ratio, head_dim, q.stride(1), k.stride(1), v.stride(1),
        0 if cos.shape[0] == 1 else cos.stride(0), out_k.shape[2], first,
        HEADS=heads, GROUPS=groups, HEADS_UP=up(heads), GROUPS_UP=up(groups), HALF_UP=up(head_dim // 2),
        num_warps=4, **early(),
    )  # fmt: skip
    return out_q


@triton.jit
def _attend_part(
    q, k, v, bias, mixed, largest, total, ROWS, KEYS, scale,
    k_batch, k_group, v_batch, v_group, bias_batch, bias_row, G, lead_rows, lead_keys,
    E: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    pair = tl.program_id(0).to(tl.int64)  # batch row and group
    batch, group = pair // G, pair % G
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(2)
    cols = tl.arange(0, E)
    key = part * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    asked, there = rows < ROWS, key < KEYS
    place = key[:, None] * E + cols[None, :]
    query = tl.load(q + (pair * ROWS + rows[:, None]) * E + cols[None, :], mask=asked[:, None], other=0.0)
    keys = tl.load(k + batch * k_batch + group * k_group + place, mask=there[:, None], other=0.0)
    values = tl.load(v + batch * v_batch + group * v_group + place, mask=there[:, None], other=0.0)
    score = tl.dot(query, tl.trans(keys)) * scale
    if HAS_BIAS:
        where = bias + batch * bias_batch + rows[:, None] * bias_row + key[None, :]
        score += tl.load(where, mask=asked[:, None] & there[None, :], other=0.0).to(tl.float32)
    if HAS_LEAD:
        score = tl.where((rows < lead_rows)[:, None] & (key >= lead_keys)[None, :], -3.0e38, score)
    score = tl.where(there[None, :], score, -float("inf"))
    most = tl.max(score, 1)
    weight = tl.exp(score - most[:, None])
    row = (pair * tl.num_programs(2) + part) * ROWS + rows
    tl.store(mixed + row[:, None] * E + cols[None, :], tl.dot(weight.to(values.dtype), values), mask=asked[:, None])
    tl.store(largest + row, most, mask=asked)
    tl.store(total + row, tl.sum(weight, 1), mask=asked)


@triton.jit
def _attend_join(
    mixed, largest, total, out, ROWS, PARTS, E: tl.constexpr, PARTS_UP: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, cols = tl.arange(0, PARTS_UP), tl.arange(0, E)
    there = part < PARTS
    place = (pair * PARTS + part) * ROWS + row
    most = tl.load(largest + place, mask=there, other=-float("inf"))
    share = tl.exp(most - tl.max(most, 0))
    norm = tl.sum(share * tl.load(total + place, mask=there, other=0.0), 0)
    parts = tl.load(mixed + place[:, None] * E + cols[None, :], mask=there[:, None], other=0.0)
    joined = tl.sum(parts * share[:, None], 0) / norm
    tl.store(out + (pair * ROWS + row) * E + cols, joined.to(out.dtype.element_ty))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lead: tuple[int, int] | None = None) -> Tensor:
    """Attention of few query rows [B, G, rows, E] on keys and values [B, G, P, E]; bias [B or 1, 1, rows or 1, P].

    With `lead` = (rows, keys), that many first rows see only that many first keys. The keys are dealt out in blocks to
    as many programs, so that even one batch row keeps the GPU busy.
    """
    b, groups, rows, width = q.shape
    pairs = b * groups
    if pairs <= FEW_PAIRS:  # one robot: small blocks, for there are processors enough
        block_rows, block_keys = (16, 32) if rows <= 64 else (32, 64)
    else:
        block_rows, block_keys = 16 if rows <= 16 else 64, 64
    parts = triton.cdiv(k.shape[2], block_keys)
    mixed = torch.empty(pairs, parts, rows, width, dtype=torch.float32, device=q.device)
    largest, total = torch.empty(2, pairs, parts, rows, dtype=torch.float32, device=q.device)
    _attend_part[(pairs, triton.cdiv(rows, block_rows), parts)](
        q, k, v, q if bias is None else bias, mixed, largest, total, rows, k.shape[2], width**-0.5,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
        0 if bias is None or bias.shape[2] == 1 else bias.stride(2),
        groups, *(lead or (0, 0)), E=width, HAS_BIAS=bias is not None, HAS_LEAD=lead is not None,
        BLOCK_ROWS=block_rows, BLOCK_KEYS=block_keys, num_warps=4, **early(),
    )  # fmt: skip
    out = torch.empty_like(q)
    _attend_join[(pairs, rows)](
        mixed, largest, total, out, rows, parts, E=width, PARTS_UP=triton.next_power_of_2(parts), num_warps=4,
        **early(),
    )  # fmt: skip
    return out


@triton.jit
def _attend_whole(
    q, k, v, bias, out, ROWS, KEYS, scale, bias_batch, k_batch, v_batch,
    E: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, E)
    place = (batch * ROWS + rows[:, None]) * E + cols[None, :]
    asked = (rows < ROWS)[:, None]
    query = tl.load(q + place, mask=asked, other=0.0)
    most = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, E], tl.float32)
    for start in range(0, KEYS, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        there = key < KEYS
        source = key[:, None] * E + cols[None, :]
        keys = tl.load(k + batch * k_batch + source, mask=there[:, None], other=0.0)
        values = tl.load(v + batch * v_batch + source, mask=there[:, None], other=0.0)
        score = tl.dot(query, tl.trans(keys)) * scale
        if HAS_BIAS:
            score += tl.load(bias + batch * bias_batch + key, mask=there, other=0.0).to(tl.float32)[None, :]
        score = tl.where(there[None, :], score, -float("inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        kept = tl.exp(most - highest)
        weight = tl.exp(score - highest[:, None])
        total = total * kept + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(values.dtype), values, mixed * kept[:, None])
        most = highest
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=asked)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of many queries [B, 1, rows, E] on keys and values [B, 1, P, E]; bias [B or 1, 1, 1, P].

    A program meets all keys, so that nothing has to be joined, or cleared beforehand.
    """
    b, _, rows, width = q.shape
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    _attend_whole[(triton.cdiv(rows, 64), b)](
        q, k, v, q if bias is None else bias, out, rows, k.shape[2], width**-0.5,
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0), k.stride(0), v.stride(0),
        E=width, HAS_BIAS=bias is not None, BLOCK_ROWS=64, BLOCK_KEYS=64, num_warps=4, num_stages=2, **early(),
    )  # fmt: skip
    return out


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See fused.linear_gelu: the library's product with bias and tanh-GELU applied before it is written."""
    # A private name of torch: no public one reaches cuBLAS's fused epilogue.
    out = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], -1)


@triton.jit
def _linear_plus(
    x, weight, bias, added, out, M, N, PERIOD, K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    asked, wanted = (rows < M)[:, None], cols < N
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, INNER):
        steps = start + tl.arange(0, INNER)
        inside = (steps < K)[None, :]
        one = tl.load(x + rows[:, None] * K + steps[None, :], mask=asked & inside, other=0.0)
        two = tl.load(weight + cols[:, None] * K + steps[None, :], mask=wanted[:, None] & inside, other=0.0)
        total = tl.dot(one, tl.trans(two), total, input_precision="tf32x3")
    total += tl.load(bias + cols, mask=wanted, other=0.0)[None, :]
    kept = asked & wanted[None, :]
    total += tl.load(added + (rows % PERIOD)[:, None] * N + cols[None, :], mask=kept, other=0.0)
    tl.store(out + rows[:, None] * N + cols[None, :], total.to(out.dtype.element_ty), mask=kept)


def linear_plus(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor, dtype: torch.dtype) -> Tensor:
    """See fused.linear_plus; products of numbers cut in two halves, whose errors are those of fp32."""
    inner, (cols, period) = x.shape[-1], (len(weight), len(added))
    rows = x.numel() // inner
    out = torch.empty(*x.shape[:-1], cols, dtype=dtype, device=x.device)
    _linear_plus[(triton.cdiv(rows, 32), triton.cdiv(cols, 64))](
        x.contiguous(), weight.contiguous(), bias, added, out, rows, cols, period, K=inner,
        ROWS=32, COLS=64, INNER=32, num_warps=4, num_stages=4, **early(),
    )  # fmt: skip
    return out
