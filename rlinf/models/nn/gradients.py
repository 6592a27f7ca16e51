"""Backward kernels of `fused`'s operations: the gradient of each is one kernel, and one more that adds up its parts.

Imported only where a GPU is used. They compute in fp32 from what the forward kernels read or wrote, keep no activation
that is not kept anyway, and round once. Gradients of scales, shifts and gates are sums over rows: every program adds up
its own, and a second kernel the programs' parts in a fixed order, so that equal inputs give equal gradients.

Letters: B rows, S tokens, W width, G key/value heads, R query heads per group, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rlinf.models.nn import kernels

Tensor = torch.Tensor
_TILE = 2048  # numbers of a program's step through its rows
_PROGRAMS = 512  # that share the rows of a norm: a few for each of a GPU's processors


class Norm(torch.autograd.Function):
    """`kernels.norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor | None, *settings: Any) -> Tensor:
        out = kernels.norm(x, scale, shift, *settings)
        ctx.save_for_backward(x, scale, shift)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale, shift = ctx.saved_tensors
        wanted = (False, *ctx.needs_input_grad[1:3])
        to_x, _, (_, *rest) = norm_gradients(None, grad, x, None, None, scale, shift, *ctx.settings, wanted=wanted)
        return to_x, *rest, *(None for _ in ctx.settings)


class AddNorm(torch.autograd.Function):
    """`kernels.add_norm` with a y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        total, out = kernels.add_norm(x, y, gate, scale, shift, *settings)
        ctx.save_for_backward(total, None if gate is None else y, gate, scale, shift)  # x and y alone are not needed
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_total: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        total, y, gate, scale, shift = ctx.saved_tensors
        grad = torch.zeros_like(total) if grad is None else grad
        to_x, to_y, rest = norm_gradients(
            to_total, grad, total, y, gate, scale, shift, *ctx.settings, wanted=ctx.needs_input_grad[2:5]
        )
        return to_x, to_y, *rest, *(None for _ in ctx.settings)


@triton.jit
def _norm_gradients(
    to_total, grad, total, y, gate, scale, to_x, to_y, parts,
    W, LENGTH, S, CHUNK, gate_stride, scale_stride, part_stride, eps,
    HAS_TOTAL: tl.constexpr, HAS_GATE: tl.constexpr, ONE_PLUS: tl.constexpr, CENTRED: tl.constexpr,
    GATE: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < W
    sum_gate = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_scale = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_shift = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(part * CHUNK, part * CHUNK + CHUNK, ROWS):
        rows = first + tl.arange(0, ROWS)
        kept = ((rows < LENGTH) & (rows < part * CHUNK + CHUNK))[:, None] & inside[None, :]
        row = group * LENGTH + rows
        batch = row // S
        place = row[:, None] * W + cols[None, :]
        value = tl.load(total + place, mask=kept, other=0.0).to(tl.float32)
        g = tl.load(grad + place, mask=kept, other=0.0).to(tl.float32)
        factor = tl.load(scale + batch[:, None] * scale_stride + cols[None, :], mask=kept, other=0.0).to(tl.float32)
        if ONE_PLUS:
            factor = 1.0 + factor
        if CENTRED:
            value = tl.where(kept, value - (tl.sum(value, 1) / W)[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / W + eps)[:, None]
        normal = value * inverse
        through = g * factor
        inner = through - normal * (tl.sum(through * normal, 1) / W)[:, None]
        if CENTRED:
            inner = inner - (tl.sum(through, 1) / W)[:, None]
        out = inner * inverse
        if HAS_TOTAL:
            out += tl.load(to_total + place, mask=kept, other=0.0).to(tl.float32)
        rounded = out.to(to_x.dtype.element_ty)
        tl.store(to_x + place, rounded, mask=kept)
        if HAS_GATE:
            out = rounded.to(tl.float32)
            by = tl.load(gate + batch[:, None] * gate_stride + cols[None, :], mask=kept, other=0.0).to(tl.float32)
            tl.store(to_y + place, (out * by).to(to_y.dtype.element_ty), mask=kept)
            if GATE:
                sum_gate += out * tl.load(y + place, mask=kept, other=0.0).to(tl.float32)
        if SCALE:
            sum_scale += g * normal
        if SHIFT:
            sum_shift += g
    mine = parts + (group * tl.num_programs(1) + part) * W + cols
    if GATE:
        tl.store(mine, tl.sum(sum_gate, 0), mask=inside)
        mine += part_stride
    if SCALE:
        tl.store(mine, tl.sum(sum_scale, 0), mask=inside)
        mine += part_stride
    if SHIFT:
        tl.store(mine, tl.sum(sum_shift, 0), mask=inside)


@triton.jit
def _sum_parts(parts, out, PARTS, W, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < W
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, PARTS, ROWS):
        part = first + tl.arange(0, ROWS)
        kept = (part < PARTS)[:, None] & inside[None, :]
        total += tl.load(parts + (item * PARTS + part)[:, None] * W + cols[None, :], mask=kept, other=0.0)
    tl.store(out + item * W + cols, tl.sum(total, 0).to(out.dtype.element_ty), mask=inside)


def norm_gradients(
    to_total: Tensor | None,
    grad: Tensor,
    total: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    one_plus: bool,
    centred: bool,
    *,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Gradients of x, of y, and of gate, scale and shift where `wanted`, from those of the sum and of its norm."""
    width, seq = total.shape[-1], total.shape[-2]
    rows = total.numel() // width
    total, grad = total.contiguous(), grad.contiguous()
    to_total = None if to_total is None else to_total.contiguous()
    y = None if y is None else y.contiguous()
    asked = [p if want else None for p, want in zip((gate, scale, shift), wanted, strict=True)]
    groups = rows // seq if any(p is not None and kernels.row_stride(p) for p in asked) else 1
    length, block = rows // groups, triton.next_power_of_2(width)
    tile = max(1, _TILE // block)
    programs = max(1, min(triton.cdiv(length, tile), _PROGRAMS // groups))
    chunk = triton.cdiv(length, programs)
    to_x = torch.empty_like(total)
    to_y = to_x if gate is None else torch.empty_like(total)
    found = [p for p in asked if p is not None]
    parts = torch.empty(len(found), groups, programs, width, dtype=torch.float32, device=total.device)
    _norm_gradients[(groups, programs)](
        total if to_total is None else to_total, grad, total, total if y is None else y,
        scale if gate is None else gate, scale, to_x, to_y, parts,
        width, length, seq, chunk, kernels.row_stride(gate), kernels.row_stride(scale), groups * programs * width, eps,
        HAS_TOTAL=to_total is not None, HAS_GATE=gate is not None, ONE_PLUS=one_plus, CENTRED=centred,
        GATE=asked[0] is not None, SCALE=asked[1] is not None, SHIFT=asked[2] is not None,
        ROWS=tile, BLOCK=block, num_warps=4 if tile * block <= 2048 else 8,
    )  # fmt: skip
    sums = iter(_sums(parts, found))
    return to_x, to_y, tuple(None if p is None else next(sums) for p in asked)


def _sums(parts: Tensor, found: list[Tensor]) -> list[Tensor]:
    """Parts [n, groups, programs, W] added up to the shapes and dtypes of as many parameters."""
    n, groups, programs, width = parts.shape
    if not n:
        return []
    dtype = found[0].dtype
    last = all(p.dtype == dtype and (groups == 1 or kernels.row_stride(p)) for p in found)  # nothing is added after it
    out = torch.empty(n, groups, width, dtype=dtype if last else torch.float32, device=parts.device)
    tile = min(64, triton.next_power_of_2(programs))
    _sum_parts[(n * groups, triton.cdiv(width, 32))](parts, out, programs, width, ROWS=tile, BLOCK=32, num_warps=4)
    sums = []
    for p, part in zip(found, out, strict=True):
        whole = part if kernels.row_stride(p) else part.sum(0, keepdim=True) if groups > 1 else part
        sums.append(whole.to(p.dtype).view(p.shape))
    return sums


class Gated(torch.autograd.Function):
    """`kernels.gated`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return kernels.gated(gate, up, gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        return *gated_gradients(grad, gate, up, ctx.gelu), None


@triton.jit
def _gated_gradients(
    grad, gate, up, to_gate, to_up, H, gate_stride, up_stride, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    d = tl.load(grad + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # g sigmoid(z(g)), as in kernels._gated
        share = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        change = share + g * share * (1.0 - share) * slope
    else:
        share = tl.sigmoid(g)
        change = share + g * share * (1.0 - share)
    tl.store(to_gate + row * H + cols, (d * u * change).to(to_gate.dtype.element_ty), mask=inside)
    tl.store(to_up + row * H + cols, (d * g * share).to(to_up.dtype.element_ty), mask=inside)


def gated_gradients(grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up [..., H], which may be halves of one tensor."""
    grad, hidden = grad.contiguous(), gate.shape[-1]
    to_gate, to_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    grid = (gate.numel() // hidden, triton.cdiv(hidden, kernels.GATE_BLOCK))
    _gated_gradients[grid](
        grad, gate, up, to_gate, to_up, hidden, gate.stride(-2), up.stride(-2), GELU=gelu, BLOCK=kernels.GATE_BLOCK
    )
    return to_gate, to_up


class Rope(torch.autograd.Function):
    """`kernels.rope` into tensors of its own."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.groups, ctx.shape = k.shape[-1] // head_dim, q.shape
        ctx.set_materialize_grads(False)
        shape = (q.shape[0], ctx.groups, q.shape[1], head_dim)
        out_k, out_v = q.new_empty(shape), q.new_empty(shape)
        return kernels.rope(q, k, v, cos, sin, head_dim, out_k, out_v, 0), out_k, out_v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        b, s, width = ctx.shape
        cos, sin = ctx.saved_tensors
        ratio = width // (ctx.groups * 2 * cos.shape[-1])
        found = []
        for grad, per_group, turned in zip(grads, (ratio, 1, 1), (True, True, False), strict=True):
            found.append(None if grad is None else _rope_gradient(grad, cos, sin, (b, s), per_group, turned))
        return *found, None, None, None


@triton.jit
def _rope_gradients(
    grad, cos, sin, out, S, R, E, batch_stride, group_stride, row_stride, angle_stride,
    TURNED: tl.constexpr, HEADS: tl.constexpr, HEADS_UP: tl.constexpr, HALF_UP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // S, row % S
    half = E // 2
    cols, head = tl.arange(0, HALF_UP), tl.arange(0, HEADS_UP)
    inside = cols < half
    kept = (head < HEADS)[:, None] & inside[None, :]
    src = grad + batch * batch_stride + ((head // R) * group_stride + (token * R + head % R) * row_stride)[:, None]
    a = tl.load(src + cols[None, :], mask=kept, other=0.0).to(tl.float32)
    b = tl.load(src + half + cols[None, :], mask=kept, other=0.0).to(tl.float32)
    if TURNED:  # the rotation by the opposite angle
        c = tl.load(cos + batch * angle_stride + token * half + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + batch * angle_stride + token * half + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        first, second = a * c + b * s, b * c - a * s
    else:
        first, second = a, b
    dst = out + (row * HEADS + head)[:, None] * E + cols[None, :]
    tl.store(dst, first.to(out.dtype.element_ty), mask=kept)
    tl.store(dst + half, second.to(out.dtype.element_ty), mask=kept)


def _rope_gradient(
    grad: Tensor, cos: Tensor, sin: Tensor, rows: tuple[int, int], per_group: int, turned: bool
) -> Tensor:
    """From the gradient [B, G, S * R, E] of queries, keys or values to that of their projection [B, S, G * R * E]."""
    (b, s), groups, head_dim = rows, grad.shape[1], grad.shape[3]
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    heads, up = groups * per_group, triton.next_power_of_2
    out = torch.empty(b, s, heads * head_dim, dtype=grad.dtype, device=grad.device)
    _rope_gradients[(b * s,)](
        grad, cos, sin, out, s, per_group, head_dim, grad.stride(0), grad.stride(1), grad.stride(2),
        0 if cos.shape[0] == 1 else cos.stride(0),
        TURNED=turned, HEADS=heads, HEADS_UP=up(heads), HALF_UP=up(head_dim // 2), num_warps=4,
    )  # fmt: skip
    return out


FUNCTIONS = {"norm": Norm, "add_norm": AddNorm, "gated": Gated, "rope": Rope}  # by the name in `kernels`
