"""Chains of elementwise work between matrix products: plain torch formulas, each one kernel on a GPU.

The kernels (see `kernels`, and `gradients` for their backward passes) compute in fp32 and round once.
Measured with them (docs/benchmarks.md, one H200): updates of π0 run at 2871 samples/s; for calls see `kernels`.

Letters: B rows, S tokens, W width, G key/value heads, R query heads per group, E head width.
"""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._triton import has_triton  # no public name tells whether Triton can be used here

Tensor = torch.Tensor
FEW_ROWS = 128  # queries per head for which `attend` has its own kernel at any batch size
SOME_ROWS = 512  # queries per head for which it is used while its blocks are few
SOME_TOKENS = 1024  # of all pictures together: up to here `linear_plus` has its own kernel
LINEAR_ROWS = 16  # up to here `linear_of_few` has its own kernel, which meets the rows one after the other
LINEAR_WIDTH = 2048  # inner columns that it holds at once
INNER_PARTS = 8  # that `product_of_few_columns` deals out
PRODUCT_ROWS = 64  # of all batch rows together: up to here a product takes as long as reading its weights
SOME_BLOCKS = 128  # blocks of 64 queries that all fit on a GPU at once
FEW_BLOCKS = 64  # blocks of 64 queries, over all rows and heads, that would leave half of a GPU's processors idle


class Residual(NamedTuple):
    """A stream whose latest contribution waits to be added by the next norm: x + gate * y."""

    x: Tensor  # [B, S, W]
    y: Tensor | None = None  # [B, S, W], or fp32 parts of it [P, B, S, W], as `product_of_few` gives
    gate: Tensor | None = None  # [W], or [B or 1, 1, W]

    def total(self) -> Tensor:
        """The sum itself, [B, S, W]."""
        return self.x if self.y is None else _add(self.x, self.y, self.gate)


@lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Whether kernels can be built here: a GPU, Triton and the C compiler its launcher needs."""
    return torch.cuda.is_available() and has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


def add_norm(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    eps: float,
    one_plus: bool = False,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """The residual x + gate * y, and its norm in fp32 times scale (or 1 + scale) plus shift; x, y [B, S, W].

    gate, scale and shift are [W], or [B or 1, 1, W]. `centred` makes it a layer norm instead of a root-mean-square one.
    """
    if y is None:
        return x, _run("norm", _norm, x, scale, shift, eps, one_plus, centred)
    return _run("add_norm", _add_norm, x, y, gate, scale, shift, eps, one_plus, centred)


def add_layer_norm(stream: Residual, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The stream added up, and its layer norm; both [B, S, W]."""
    return add_norm(*stream, norm.weight, norm.bias, eps=norm.eps, centred=True)


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Gated MLP with the tanh form of GELU."""
    return _run("gated", _gated, gate, up, True)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Gated MLP with SiLU."""
    return _run("gated", _gated, gate, up, False)


def rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: tuple[Tensor, Tensor],
    *,
    head_dim: int,
    room: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections [B, S, heads * E] to queries [B, G, S * R, E], keys and values [B, G, S, E], rotated (half-split).

    angles are the cosines and sines [B or 1, S, 1, E / 2]. `room` = (keys, values, first) writes from token `first`
    on into buffers [B, G, P, E] and returns these whole; only without gradients.
    """
    cos, sin = angles
    if _kernels_for(q) and _wants_gradient(q, k, v):
        assert room is None
        return _with_gradient("rope")(q, k, v, cos, sin, head_dim)
    if _kernels_for(q):
        if room is None:
            shape = (q.shape[0], k.shape[2] // head_dim, q.shape[1], head_dim)
            room = (q.new_empty(shape), q.new_empty(shape), 0)
        return _kernel("rope")(q, k, v, cos, sin, head_dim, *room), room[0], room[1]
    q, k, v = _rope(q, k, v, cos, sin, head_dim)
    if room is None:
        return q, k, v
    first, last = room[2], room[2] + k.shape[2]
    room[0][:, :, first:last], room[1][:, :, first:last] = k, v
    return q, room[0], room[1]


class Lead(NamedTuple):
    """First queries that see fewer keys than the others: what a bias for all queries says, told shorter."""

    rows: int  # queries per head that see
    keys: int  # these first keys alone
    bias: Tensor | None  # [B or 1, 1, 1, P] for all queries


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lead: Lead | None = None) -> Tensor:
    """softmax(q k' / sqrt(E) + bias) v for queries [B, G, rows, E], keys and values [B, G, P, E] (rows may be strided).

    bias is [B or 1, 1, rows or 1, P]; `lead` says the same where the bias is of that kind. The library's kernels deal
    out queries alone, so that a handful of them, as in decoding or in a call for one robot, leaves most of a GPU idle;
    ours deals out the keys too.
    """
    b, groups, rows, width = q.shape
    few = rows <= FEW_ROWS or (rows <= SOME_ROWS and b * groups * -(-rows // 64) <= FEW_BLOCKS)
    suits = q.dtype in (torch.bfloat16, torch.float16) and width in (64, 128, 256)
    if few and suits and _kernels_for(q) and not _wants_gradient(q, k, v):
        if lead is not None:  # a bias for every query would be read as often as the keys
            return _kernel("attend")(q, k, v, lead.bias, (lead.rows, lead.keys))
        return _kernel("attend")(q, k, v, bias)
    if groups == 1 and lead is None and (bias is None or bias.shape[2] == 1) and _suits_whole(q, k, v):
        return _kernel("attend_whole")(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _suits_whole(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether our kernel takes the library's place, which has memory cleared first: a third of its time here."""
    return (
        q.shape[0] * -(-q.shape[2] // 64) <= SOME_BLOCKS
        and q.shape[3] == 256
        and q.dtype in (torch.bfloat16, torch.float16)
        and _kernels_for(q)
        and not _wants_gradient(q, k, v)
    )


def linear_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """tanh-GELU of a Linear layer with bias."""
    plain = type(layer) is nn.Linear and x.dtype == torch.bfloat16 and not torch.is_grad_enabled()
    if plain and _kernels_for(x):
        return _kernel("linear_gelu")(x, layer.weight, layer.bias)
    return F.gelu(layer(x), approximate="tanh")


def linear_plus(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., T, K] times weight [W, K] plus bias [W] plus added [T, W], all fp32, rounded to `dtype`: [..., T, W]."""
    few = x.numel() <= SOME_TOKENS * x.shape[-1] and x.dtype == weight.dtype == added.dtype == torch.float32
    if few and _kernels_for(x) and not torch.is_grad_enabled():
        return _kernel("linear_plus")(x, weight, bias, added, dtype)
    return (F.linear(x, weight, bias) + added).to(dtype)


def has_few_rows(x: Tensor, weights: Sequence[Tensor], head_dim: int) -> bool:
    """Whether a block's products of x [B, S, W] with `weights` are left to the kernels of `few_rows`: see these."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() <= PRODUCT_ROWS * x.shape[-1]
        and x.shape[-1] <= 2048
        and head_dim % 64 == 0
        and all(w.dtype == x.dtype and w.shape[0] % 64 == 0 and w.shape[1] % 64 == 0 for w in weights)
        and _kernels_for(x)
        and not torch.is_grad_enabled()
    )


def norm_rope_of_few(
    stream: Residual,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    angles: tuple[Tensor, Tensor],
    *,
    eps: float,
    head_dim: int,
    room: tuple[Tensor, Tensor, int],
) -> tuple[Tensor, Tensor]:
    """add_norm (one_plus), the joined projection [(heads + 2 G) * E, W] and rope: the sum, and the queries."""
    few_rows = importlib.import_module("rlinf.models.nn.few_rows")
    given = few_rows.Stream(*stream, scale, shift, eps, one_plus=True)
    return few_rows.norm_rope(given, weight, angles, head_dim, room)


def norm_gate_of_few(
    stream: Residual, scale: Tensor, shift: Tensor | None, weight: Tensor, *, eps: float, gelu: bool
) -> tuple[Tensor, Tensor]:
    """add_norm (one_plus), the joined projection [2 H, W] and the gate of an MLP: the sum, and the gated [B, S, H]."""
    few_rows = importlib.import_module("rlinf.models.nn.few_rows")
    return few_rows.norm_gate(few_rows.Stream(*stream, scale, shift, eps, one_plus=True), weight, gelu)


def product_of_few(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, S, K] times weight [W, K], for the y of a Residual alone: it may come in parts."""
    return importlib.import_module("rlinf.models.nn.few_rows").product(x, weight)


def product_of_few_columns(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N], fp32. A library deals out M and N alone, which few columns leave few processors."""
    if not _kernels_for(a):
        return a @ b
    parts = math.gcd(a.shape[1], INNER_PARTS)
    return torch.bmm(a.unflatten(1, (parts, -1)).transpose(0, 1), b.unflatten(0, (parts, -1))).sum(0)


def linear_of_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    silu: bool = False,
    onto: Tensor | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """x [B, S, K] times weight [W, K] plus bias [W], through SiLU where asked, or onto + factor times it: [B, S, W].

    Computed in the weight's dtype, and written to `out` where given, in whose dtype it is rounded. Its own kernel is
    for fp32 weights without a gradient, which a library's product of a handful of rows reads at a fifth of the speed.
    """
    few = x.shape[0] * x.shape[1] <= LINEAR_ROWS and x.shape[2] <= LINEAR_WIDTH and weight.dtype == torch.float32
    strided = all(t is None or t.stride(-1) == 1 for t in (x, weight, onto, out))
    if few and strided and _kernels_for(x) and not torch.is_grad_enabled():
        out = x.new_empty(*x.shape[:2], len(weight), dtype=weight.dtype) if out is None else out
        importlib.import_module("rlinf.models.nn.few_rows").linear(x, weight, bias, silu, onto, factor, out)
        return out
    y = F.linear(x.to(weight.dtype), weight, bias)
    y = F.silu(y) if silu else y
    y = y if onto is None else torch.add(onto, y, alpha=factor)
    return y if out is None else out.copy_(y)


def _norm(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, one_plus: bool, centred: bool) -> Tensor:
    value = x.float()
    if centred:
        value = value - value.mean(-1, keepdim=True)
    factor = 1.0 + scale.float() if one_plus else scale.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * factor if shift is None else torch.addcmul(shift.float(), value, factor)).to(x.dtype)


def _add(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    y = y.sum(0).to(x.dtype) if y.dim() > x.dim() else y
    return x + (y if gate is None else y * gate.to(y.dtype))


def _add_norm(
    x: Tensor, y: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    x = _add(x, y, gate)
    return x, _norm(x, scale, shift, *settings)


def _gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def _rope(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    b, s, _ = q.shape
    q, k, v = (y.reshape(b, s, -1, head_dim) for y in (q, k, v))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    groups = k.shape[2]
    q = q.view(b, s, groups, -1, head_dim).transpose(1, 2).reshape(b, groups, -1, head_dim)
    return q, k.transpose(1, 2), v.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half-split rotation of [B, S, heads, E]."""
    a, b = x.chunk(2, -1)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1.0), torch.addcmul(b * cos, a, sin)), -1)


def _kernels_for(x: Tensor) -> bool:
    return x.is_cuda and has_kernels()


def _wants_gradient(*values: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def _kernel(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("rlinf.models.nn.kernels"), name)


def _with_gradient(name: str) -> Callable[..., Any]:
    return importlib.import_module("rlinf.models.nn.gradients").FUNCTIONS[name].apply


def _run(name: str, formula: Callable[..., Any], x: Tensor, *more: Any) -> Any:
    if not _kernels_for(x):
        return formula(x, *more)
    if _wants_gradient(x, *more):
        return _with_gradient(name)(x, *more)
    return _kernel(name)(x, *more)
