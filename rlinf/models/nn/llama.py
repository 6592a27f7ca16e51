"""Llama decoder: causal or bidirectional over a whole sequence, or one token at a time on preallocated keys and values.

Parameter names are the published ones.
Letters: B rows, S tokens of this call, L slots of a cache, W width, E head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from rlinf.models.nn import fused
from rlinf.models.nn.fused import Residual
from rlinf.models.nn.gemma import Rope, additive, rope
from rlinf.models.nn.mlp import GatedMlp
from rlinf.models.nn.packed import Packed
from rlinf.models.nn.recompute import BlockStack

Tensor = torch.Tensor


class Frame(NamedTuple):
    """What all layers of a call share: rotations, and which token attends to which (a bias on scores, or causal)."""

    rope: Rope
    bias: Tensor | None
    causal: bool
    slot: int = 0  # the first token's place in a cache


class LayerCache(NamedTuple):
    """Keys (rotated) and values of one layer: [B, heads, L, E]."""

    k: Tensor
    v: Tensor


class KeyValueCache:
    """Buffers for keys and values of L tokens of B rows; each call writes behind the last, and reads no further."""

    def __init__(
        self, *, depth: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shape` is B, heads, L, E."""
        buffers = [torch.empty(2, *shape, dtype=dtype, device=device) for _ in range(depth)]
        self.layers = [LayerCache(k, v) for k, v in buffers]
        self.hidden: Tensor | None = None  # bool [B, P]; tokens of the first call that are attended to by none

    def bias(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """The bias [B, 1, 1, length] that hides them from later tokens; None when there are none."""
        if self.hidden is None:
            return None
        shown = F.pad(~self.hidden, (0, length - self.hidden.shape[1]), value=True)
        return additive(shown[:, None, None], dtype)


class Attention(Packed):
    """Multi-head attention with rotary positions."""

    groups = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, frame: Frame, cache: LayerCache | None) -> Tensor:
        """[B, S, W] -> [B, S, W]; a cache is written from the frame's slot on and attended to up to there."""
        b, s, w = x.shape
        q, k, v = self.project(self.groups[0], x)
        room = None if cache is None else (cache.k, cache.v, frame.slot)
        q, k, v = fused.rope(q, k, v, frame.rope, head_dim=w // self.heads, room=room)  # [B, heads, ..., E]
        if cache is not None:
            k, v = k[:, :, : frame.slot + s], v[:, :, : frame.slot + s]
        if frame.causal:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = fused.attend(q, k, v, frame.bias)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, w))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, width: int, hidden: int, heads: int, eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.mlp = GatedMlp(width, hidden, gelu=False)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)  # computes in fp32, whatever the dtype
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def forward(self, stream: Residual, frame: Frame, cache: LayerCache | None) -> Residual:
        """The stream [B, S, W] after this layer."""
        x, h = _add_norm(stream, self.input_layernorm)
        x, h = _add_norm(Residual(x, self.self_attn(h, frame, cache)), self.post_attention_layernorm)
        return Residual(x, self.mlp(h))


def _add_norm(stream: Residual, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    assert norm.eps is not None
    return fused.add_norm(*stream, norm.weight, eps=norm.eps)


class Llama(BlockStack):
    """Embeddings, blocks and final norm."""

    def __init__(self, *, vocab_size: int, width: int, hidden: int, depth: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Block(width, hidden, heads, eps) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=eps)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype the blocks compute in."""
        return self.norm.weight.dtype

    def new_cache(self, batch: int, length: int) -> KeyValueCache:
        """An empty cache for `batch` rows of at most `length` tokens."""
        shape = (batch, self.heads, length, self.head_dim)
        return KeyValueCache(depth=len(self.layers), shape=shape, dtype=self.dtype, device=self.norm.weight.device)

    def forward(
        self, x: Tensor, positions: Tensor, valid: Tensor | None, *, causal: bool, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Embedded tokens [B, S, W] at i64 [B, S] -> [B, S, W] after the final norm.

        Tokens where bool `valid` [B, S] is False are attended to by none. A causal call may fill a cache from slot 0.
        """
        frame = Frame(rope(positions, self.head_dim, self.dtype), self._bias(valid, causal), causal and valid is None)
        if cache is not None:
            assert causal
            cache.hidden = None if valid is None else ~valid
        return self._run(x, frame, cache)

    @torch.no_grad()
    def decode(self, x: Tensor, positions: Tensor, cache: KeyValueCache, slot: int) -> Tensor:
        """One embedded token [B, W] at i64 [B], behind `slot` tokens of the cache -> [B, W] after the final norm."""
        angles = rope(positions[:, None], self.head_dim, self.dtype)
        return self._run(x[:, None], Frame(angles, cache.bias(slot + 1, self.dtype), False, slot), cache)[:, 0]

    def _run(self, x: Tensor, frame: Frame, cache: KeyValueCache | None) -> Tensor:
        stream = Residual(x.to(self.dtype))
        for i, layer in enumerate(self.layers):
            stream = self.run_block(layer, stream, frame, None if cache is None else cache.layers[i])
        return _add_norm(stream, self.norm)[1]

    def _bias(self, valid: Tensor | None, causal: bool) -> Tensor | None:
        """[B, 1, S or 1, S], or None when a plain triangle, or nothing, is hidden."""
        if valid is None:
            return None
        visible = valid[:, None, None, :]
        if causal:
            s = valid.shape[1]
            visible = visible & torch.ones(s, s, dtype=torch.bool, device=valid.device).tril()
        return _aligned(additive(visible, self.dtype))


def _aligned(bias: Tensor) -> Tensor:
    """The same with rows that start at multiples of 8, which the library's fused attention reads without a copy."""
    s = bias.shape[-1]
    return F.pad(bias, (0, -s % 8))[..., :s]
