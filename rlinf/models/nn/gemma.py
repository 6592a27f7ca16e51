"""Gemma decoder blocks for a prefix and an action expert that attends to the prefix's keys and values.

Both streams are a `Gemma`; the expert is called with `past`. Parameter names are the published ones.
Letters: B rows, S tokens of this call, P tokens of the past, W width, G key/value heads, E head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor
NORM_EPS = 1e-6
ROPE_BASE = 10_000.0
MASKED = -2.3819763e38  # finite, so that a fully masked row stays defined


class KeyValue(NamedTuple):
    """Keys (rotated) and values of one layer: [B, G, P, E]."""

    k: Tensor
    v: Tensor


class Rope(NamedTuple):
    """Cosines and sines of the rotary embedding: [B, S, 1, E / 2]."""

    cos: Tensor
    sin: Tensor


class Frame(NamedTuple):
    """What all layers of a call share: rotations, and the bias on attention scores (None: everything is visible)."""

    rope: Rope
    bias: Tensor | None


def rope(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rope:
    """Rotation angles for positions i64 [B, S]; computed in fp32."""
    half = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, :, None, None].float() * ROPE_BASE ** (-2.0 * half / head_dim)
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, r: Rope) -> Tensor:
    """Apply the half-split rotation to [B, S, heads, E]."""
    a, b = x.chunk(2, -1)
    return torch.cat((torch.addcmul(a * r.cos, b, r.sin, value=-1.0), torch.addcmul(b * r.cos, a, r.sin)), -1)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean visibility (True: may attend) as the bias added to attention scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, MASKED)


def _rms(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, scaled by 1 + weight; no gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (_rms(x) * (1.0 + self.weight.float())).to(x.dtype), None


class AdaRMSNorm(nn.Module):
    """Root-mean-square norm whose scale, shift and residual gate come from a condition [B, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert cond is not None
        scale, shift, gate = self.dense(cond.to(self.dense.weight.dtype))[:, None].chunk(3, -1)  # each [B, 1, W]
        out = torch.addcmul(shift.float(), _rms(x), 1.0 + scale.float())
        return out.to(x.dtype), gate.to(x.dtype)


class Attention(nn.Module):
    """Attention whose query heads share few key/value heads; weights only, the block drives it.

    The R = heads / G query heads of a group become extra query rows, so that keys and values are never copied per head.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def key_value(self, x: Tensor, r: Rope) -> KeyValue:
        """[B, S, W] -> keys (rotated) and values [B, G, S, E]."""
        k, v = (p(x).view(*x.shape[:2], self.kv_heads, self.head_dim) for p in (self.k_proj, self.v_proj))
        return KeyValue(rotate(k, r).transpose(1, 2), v.transpose(1, 2))

    def forward(self, x: Tensor, r: Rope, kv: KeyValue, bias: Tensor | None) -> Tensor:
        """Queries of x [B, S, W] on kv, heads merged: [B, S, W]; bias [B or 1, 1, S * R or 1, P + S]."""
        b, s, _ = x.shape
        q = rotate(self.q_proj(x).view(b, s, self.heads, self.head_dim), r)
        q = q.view(b, s, self.kv_heads, -1, self.head_dim).transpose(1, 2).reshape(b, self.kv_heads, -1, self.head_dim)
        out = F.scaled_dot_product_attention(q, kv.k, kv.v, attn_mask=bias)  # [B, G, S * R, E]
        out = out.view(b, self.kv_heads, s, -1, self.head_dim).transpose(1, 2)
        return self.o_proj(out.reshape(b, s, -1))


class Mlp(nn.Module):
    """Gated MLP with the tanh form of GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def _residual(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    return x + y if gate is None else x + y * gate


class Block(nn.Module):
    """One decoder layer; with `past`, its tokens attend to that layer's stored keys and values first."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, head_dim: int, adaptive: bool) -> None:
        super().__init__()
        norm = AdaRMSNorm if adaptive else RMSNorm
        self.self_attn = Attention(width, heads, kv_heads, head_dim)
        self.mlp = Mlp(width, hidden)
        self.input_layernorm = norm(width)
        self.post_attention_layernorm = norm(width)

    def forward(
        self, x: Tensor, r: Rope, bias: Tensor | None, past: KeyValue | None, cond: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        """[B, S, W] -> the same shape, and this call's own keys and values."""
        h, gate = self.input_layernorm(x, cond)
        own = self.self_attn.key_value(h, r)
        kv = own if past is None else KeyValue(torch.cat((past.k, own.k), 2), torch.cat((past.v, own.v), 2))
        x = _residual(x, self.self_attn(h, r, kv, bias), gate)
        h, gate = self.post_attention_layernorm(x, cond)
        return _residual(x, self.mlp(h), gate), own

    def key_value(self, x: Tensor, r: Rope, cond: Tensor | None) -> KeyValue:
        """Keys and values alone, for a last layer whose output nobody reads."""
        return self.self_attn.key_value(self.input_layernorm(x, cond)[0], r)


class Gemma(nn.Module):
    """A stack of blocks; embeddings are scaled by the caller."""

    def __init__(
        self,
        *,
        width: int,
        hidden: int,
        depth: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab_size: int = 0,
        adaptive: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.queries_per_group = head_dim, heads // kv_heads
        if vocab_size:
            self.embed_tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Block(width, hidden, heads, kv_heads, head_dim, adaptive) for _ in range(depth))
        self.norm: nn.Module = AdaRMSNorm(width) if adaptive else RMSNorm(width)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype the blocks compute in."""
        return next(self.layers.parameters()).dtype  # the first block's q_proj

    def frame(self, positions: Tensor, visible: Tensor | None) -> Frame:
        """What every layer shares: positions i64 [B, S], visible bool [B or 1, S or 1, P + S] (None: everything)."""
        bias = None
        if visible is not None:
            rows = visible if visible.shape[1] == 1 else visible.repeat_interleave(self.queries_per_group, 1)
            bias = additive(rows[:, None], self.dtype)
        return Frame(rope(positions, self.head_dim, self.dtype), bias)

    def forward(
        self,
        x: Tensor,
        frame: Frame,
        *,
        past: list[KeyValue] | None = None,
        cond: Tensor | None = None,
        output: bool = True,
    ) -> tuple[Tensor | None, list[KeyValue]]:
        """x [B, S, W] -> the normalised output [B, S, W], and each layer's own keys and values.

        Without `output` the last block stops at its keys and values.
        """
        x = x.to(self.dtype)
        own: list[KeyValue] = []
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            if i == last and not output:
                own.append(layer.key_value(x, frame.rope, cond))
                return None, own
            x, kv = layer(x, frame.rope, frame.bias, None if past is None else past[i], cond)
            own.append(kv)
        return self.norm(x, cond)[0], own
