"""Gemma decoder blocks for a prefix and an action expert that attends to the prefix's keys and values.

Both streams are a `Gemma`; the expert is called with `past`. Parameter names are the published ones.
Letters: B rows, S tokens of this call, P tokens of the past, W width, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from rlinf.models.nn import fused
from rlinf.models.nn.fused import Lead, Residual
from rlinf.models.nn.mlp import GatedMlp
from rlinf.models.nn.packed import Packed
from rlinf.models.nn.recompute import BlockStack, Unit

Tensor = torch.Tensor
NORM_EPS = 1e-6
ROPE_BASE = 10_000.0
MASKED = -2.3819763e38  # finite, so that a fully masked row stays defined


class KeyValue(NamedTuple):
    """Keys (rotated) and values of one layer: [B, G, P, E]."""

    k: Tensor
    v: Tensor
    buffers: tuple[Tensor, Tensor] | None = None  # [B, G, P + S, E] that begin with k and v: calls write behind them

    def then(self, own: KeyValue) -> KeyValue:
        """A copy of these tokens followed by those of `own`."""
        return KeyValue(torch.cat((self.k, own.k), 2), torch.cat((self.v, own.v), 2))

    def with_room(self, tokens: int) -> KeyValue:
        """A copy in buffers with room for `tokens` more; gradients do not pass."""
        if self.buffers is not None:
            return self
        k, v = (F.pad(x, (0, 0, 0, tokens)) for x in (self.k, self.v))
        length = self.k.shape[2]
        return KeyValue(k[:, :, :length], v[:, :, :length], (k, v))


class Rope(NamedTuple):
    """Cosines and sines of the rotary embedding: [B, S, 1, E / 2]."""

    cos: Tensor
    sin: Tensor


class Frame(NamedTuple):
    """What all layers of a call share: rotations, and the bias on attention scores (None: everything is visible)."""

    rope: Rope
    bias: Tensor | None
    lead: Lead | None = None  # says the same as the bias, where only the first tokens see less than the others
    room: int = 0  # keys and values go to buffers with room for this many more tokens; not for gradients


def rope(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rope:
    """Rotation angles for positions i64 [B, S]; computed in fp32."""
    half = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, :, None, None].float() * ROPE_BASE ** (-2.0 * half / head_dim)
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean visibility (True: may attend) as the bias added to attention scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, MASKED)


class Terms(NamedTuple):
    """What a norm multiplies by (besides 1) and adds, and the gate of what is made of it: [W] or [B or 1, 1, W]."""

    scale: Tensor
    shift: Tensor | None = None
    gate: Tensor | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, scaled by 1 + weight; no gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def terms(self, modulation: Tensor | None) -> Terms:
        """Its weight alone."""
        return Terms(self.weight)

    def forward(self, stream: Residual, modulation: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The stream added up, its norm, and the gate (none) of what is computed from it."""
        return *fused.add_norm(*stream, self.weight, eps=NORM_EPS, one_plus=True), None


class AdaRMSNorm(nn.Module):
    """Root-mean-square norm whose scale, shift and residual gate are given, as `modulate` makes them of a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def modulate(self, cond: Tensor) -> Tensor:
        """Conditions [N, W] -> scale, shift and gate side by side: [N, 1, 3 W]."""
        return self.dense(cond.to(self.dense.weight.dtype))[:, None]

    def terms(self, modulation: Tensor | None) -> Terms:
        """Scale, shift and gate."""
        assert modulation is not None
        return Terms(*modulation.chunk(3, -1))

    def forward(self, stream: Residual, modulation: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The stream added up, its norm, and the gate of what is computed from it."""
        scale, shift, gate = self.terms(modulation)
        return *fused.add_norm(*stream, scale, shift, eps=NORM_EPS, one_plus=True), gate


class Attention(Packed):
    """Attention whose query heads share few key/value heads; weights only, the block drives it.

    The R = heads / G query heads of a group become extra query rows, so that keys and values are never copied per head.
    """

    groups = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def query_key_value(self, x: Tensor, frame: Frame, past: KeyValue | None) -> tuple[Tensor, KeyValue, KeyValue]:
        """[B, S, W] -> queries [B, G, S * R, E], all keys and values to attend to, and those of x alone."""
        q, k, v = self.project(self.groups[0], x)
        if past is not None and past.buffers is not None and not torch.is_grad_enabled():
            first = past.k.shape[2]
            q, k, v = fused.rope(q, k, v, frame.rope, head_dim=self.head_dim, room=(*past.buffers, first))
            return q, KeyValue(k, v), KeyValue(k[:, :, first:], v[:, :, first:])
        q, own = self._rotated(q, k, v, frame)
        return q, own if past is None else past.then(own), own

    def key_value(self, x: Tensor, frame: Frame) -> KeyValue:
        """[B, S, W] -> keys and values [B, G, S, E], where no query is asked."""
        joined = None if torch.is_grad_enabled() else self.joined(self.groups[0])
        if joined is None:
            k, v = self.k_proj(x), self.v_proj(x)
        else:
            k, v = F.linear(x, joined.weight[self.heads * self.head_dim :]).chunk(2, -1)
        return self._rotated(k, k, v, frame)[1]

    def _rotated(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, KeyValue]:
        if not frame.room:
            q, k, v = fused.rope(q, k, v, frame.rope, head_dim=self.head_dim)
            return q, KeyValue(k, v)
        b, s, _ = q.shape
        shape = (b, self.kv_heads, s + frame.room, self.head_dim)
        room = (q.new_empty(shape), q.new_empty(shape), 0)
        q, k, v = fused.rope(q, k, v, frame.rope, head_dim=self.head_dim, room=room)
        return q, KeyValue(k[:, :, :s], v[:, :, :s], (k, v))

    def attend(self, q: Tensor, kv: KeyValue, frame: Frame) -> Tensor:
        """Queries [B, G, S * R, E] on kv, heads in a row: [B, S, heads * E]; bias [B or 1, 1, S * R or 1, P + S]."""
        b, s = q.shape[0], q.shape[2] * self.kv_heads // self.heads
        out = fused.attend(q, kv.k, kv.v, frame.bias, frame.lead)  # [B, G, S * R, E]
        return out.view(b, self.kv_heads, s, -1, self.head_dim).transpose(1, 2).reshape(b, s, -1)

    def forward(self, q: Tensor, kv: KeyValue, frame: Frame) -> Tensor:
        """What `attend` gives, heads merged: [B, S, W]."""
        return self.o_proj(self.attend(q, kv, frame))


class Block(nn.Module):
    """One decoder layer; with `past`, its tokens attend to that layer's stored keys and values first."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, head_dim: int, adaptive: bool) -> None:
        super().__init__()
        norm = AdaRMSNorm if adaptive else RMSNorm
        self.self_attn = Attention(width, heads, kv_heads, head_dim)
        self.mlp = GatedMlp(width, hidden, gelu=True)
        self.input_layernorm = norm(width)  # the two norms in the order they are met: see Gemma.modulate
        self.post_attention_layernorm = norm(width)

    def forward(
        self, stream: Residual, frame: Frame, past: KeyValue | None, modulation: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Residual, KeyValue]:
        """The stream after this layer, and this call's own keys and values."""
        if past is not None and past.buffers is not None and (weights := self._few_rows_weights(stream.x)) is not None:
            return self._forward_few_rows(stream, frame, past, modulation, weights)
        x, h, gate = self.input_layernorm(stream, modulation[0])
        q, kv, own = self.self_attn.query_key_value(h, frame, past)
        attended = Residual(x, self.self_attn(q, kv, frame), gate)
        x, h, gate = self.post_attention_layernorm(attended, modulation[1])
        return Residual(x, self.mlp(h), gate), own

    def _few_rows_weights(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Joined q, k and v; o; joined gate and up; down; where products with x are left to kernels of their own."""
        if torch.is_grad_enabled():
            return None
        attn, mlp = self.self_attn, self.mlp
        qkv, gate_up = attn.joined(attn.groups[0]), mlp.joined(mlp.groups[0])
        if qkv is None or gate_up is None or not type(attn.o_proj) is type(mlp.down_proj) is nn.Linear:
            return None
        weights = (qkv.weight, attn.o_proj.weight, gate_up.weight, mlp.down_proj.weight)
        return weights if fused.has_few_rows(x, weights, attn.head_dim) else None

    def _forward_few_rows(
        self,
        stream: Residual,
        frame: Frame,
        past: KeyValue,
        modulation: tuple[Tensor | None, Tensor | None],
        weights: tuple[Tensor, ...],
    ) -> tuple[Residual, KeyValue]:
        """`forward` in as few kernels as it takes: acting with one robot is bound by launches and reading weights."""
        assert past.buffers is not None
        attn, first, (qkv, out, gate_up, down) = self.self_attn, past.k.shape[2], weights
        k, v = past.buffers
        scale, shift, gate = self.input_layernorm.terms(modulation[0])
        x, q = fused.norm_rope_of_few(
            stream, scale, shift, qkv, frame.rope, eps=NORM_EPS, head_dim=attn.head_dim, room=(k, v, first)
        )
        y = fused.product_of_few(attn.attend(q, KeyValue(k, v), frame), out)
        attended = Residual(x, y, gate)
        scale, shift, gate = self.post_attention_layernorm.terms(modulation[1])
        x, h = fused.norm_gate_of_few(attended, scale, shift, gate_up, eps=NORM_EPS, gelu=True)
        return Residual(x, fused.product_of_few(h, down), gate), KeyValue(k[:, :, first:], v[:, :, first:])

    def key_value(self, stream: Residual, frame: Frame) -> KeyValue:
        """Keys and values alone, for a last layer whose output is not read (never one with adaptive norms)."""
        return self.self_attn.key_value(self.input_layernorm(stream, None)[1], frame)


class Gemma(BlockStack):
    """A stack of blocks; embeddings are scaled by the caller."""

    _kept_dtype: torch.dtype | None = None

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
        return self._kept_dtype or next(self.layers.parameters()).dtype  # the first block's q_proj

    def keep_dtype(self) -> None:
        """The blocks go on computing in what they compute in now."""
        self._kept_dtype = self.dtype

    def units(self) -> list[Unit]:
        """Blocks, and apart from them what `modulate` runs beforehand."""
        adaptive: list[nn.Module] = [m.dense for m in self.modules() if isinstance(m, AdaRMSNorm)]
        blocks = [Unit([block], ("key_value",)) for block in self.layers]
        return [Unit(adaptive), *blocks] if adaptive else blocks

    def frame(self, positions: Tensor, visible: Tensor | None, room: int = 0) -> Frame:
        """What every layer shares: positions i64 [B, S], visible bool [B or 1, S or 1, P + S] (None: everything)."""
        bias = None
        if visible is not None:
            rows = visible if visible.shape[1] == 1 else visible.repeat_interleave(self.queries_per_group, 1)
            bias = additive(rows[:, None], self.dtype)
        return Frame(rope(positions, self.head_dim, self.dtype), bias, room=room)

    def lead(self, tokens: int, keys: int, valid: Tensor | None) -> Lead:
        """The first `tokens` see the first `keys` alone; all see those of bool [B, P + S] (None: every key)."""
        bias = None if valid is None else additive(valid[:, None, None], self.dtype)
        return Lead(tokens * self.queries_per_group, keys, bias)

    def modulate(self, cond: Tensor) -> list[Tensor]:
        """Conditions [N, W] -> what each adaptive norm needs of them, [N, 1, 3 W], in the order they are met."""
        return [m.modulate(cond) for m in self.modules() if isinstance(m, AdaRMSNorm)]

    def forward(
        self,
        x: Tensor,
        frame: Frame,
        *,
        past: Sequence[KeyValue] | None = None,
        modulation: list[Tensor] | None = None,
        output: bool = True,
    ) -> tuple[Tensor | None, list[KeyValue]]:
        """x [B, S, W] -> the normalised output [B, S, W], and each layer's own keys and values.

        `modulation` holds a row for every row of x, or one for all. Without `output` the last block stops at its keys
        and values.
        """
        stream = Residual(x.to(self.dtype))
        own: list[KeyValue] = []
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            if i == last and not output:
                own.append(layer.key_value(stream, frame))
                return None, own
            pair = (None, None) if modulation is None else (modulation[2 * i], modulation[2 * i + 1])
            stream, kv = self.run_block(layer, stream, frame, None if past is None else past[i], pair)
            own.append(kv)
        return self.norm(stream, None if modulation is None else modulation[-1])[1], own
