"""Vision transformer with timm's parameter names, up to the features of its second-to-last block.

The last block, the final norm and any pooling head of a published tower are never read, so they do not exist here.
Letters: M images, T patches, N patches and prefix tokens, P patch side, W width, C conditioning width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from rlinf.models.nn.adapted_layers import effective_weight
from rlinf.models.nn.fused import Residual, add_layer_norm
from rlinf.models.nn.mlp import named_sequential
from rlinf.models.nn.recompute import BlockStack
from rlinf.models.nn.sizes import Tower

Tensor = torch.Tensor
NORM_EPS = 1e-6


def patches_of(pixels: Tensor, patch_size: int) -> Tensor:
    """Non-overlapping squares of [M, 3, S, S] (any dtype, any strides) -> [M, T, 3, P * P]."""
    m, c, s, _ = pixels.shape
    p, grid = patch_size, s // patch_size
    squares = pixels.reshape(m, c, grid, p, grid, p).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(m, grid * grid, c, p * p)


class PatchEmbed(nn.Module):
    """Patches through one matrix, stored as the convolution it is."""

    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch_size, stride=patch_size)

    def forward(self, patches: Tensor) -> Tensor:
        """[M, T, 3, P * P] -> [M, T, W]."""
        weight = effective_weight(self.proj).flatten(1)
        return F.linear(patches.flatten(2).to(weight.dtype), weight, self.proj.bias)


class Attention(nn.Module):
    """Full self-attention with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        m, n, w = x.shape
        q, k, v = self.qkv(x).view(m, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [M, heads, N, W / heads]
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(m, n, w))


class LayerScale(nn.Module):
    """A learned gain per channel on what a branch adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))


class Block(nn.Module):
    """Pre-norm transformer block; with a condition, features are scaled and shifted (FiLM) between its two halves."""

    def __init__(self, tower: Tower, film_width: int) -> None:
        super().__init__()
        width, hidden = tower.width, tower.mlp
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width, tower.heads)
        self.ls1 = LayerScale(width) if tower.layer_scale else None
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = named_sequential(fc1=nn.Linear(width, hidden), gelu=nn.GELU(), fc2=nn.Linear(hidden, width))
        self.ls2 = LayerScale(width) if tower.layer_scale else None
        if film_width:
            self.scale = nn.Linear(film_width, width)
            self.shift = nn.Linear(film_width, width)

    def forward(self, stream: Residual, condition: Tensor | None) -> Residual:
        """The stream [M, N, W] after this block, condition [M, C]."""
        x, h = add_layer_norm(stream, self.norm1)
        stream = Residual(x, self.attn(h), _gain(self.ls1))
        if condition is not None:
            scale, shift = 1 + self.scale(condition)[:, None], self.shift(condition)[:, None]
            stream = Residual(torch.addcmul(shift, stream.total(), scale))
        x, h = add_layer_norm(stream, self.norm2)
        return Residual(x, self.mlp(h), _gain(self.ls2))


def _gain(scale: LayerScale | None) -> Tensor | None:
    return None if scale is None else scale.scale_factor


class TimmVit(BlockStack):
    """Images to patch features."""

    def __init__(self, tower: Tower, *, num_patches: int, patch_size: int, film_width: int = 0) -> None:
        super().__init__()
        self.film, width = film_width > 0, tower.width
        self.patch_embed = PatchEmbed(patch_size, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if tower.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, tower.registers, width)) if tower.registers else None
        self.blocks = nn.ModuleList(Block(tower, film_width) for _ in range(tower.blocks))

    def forward(self, patches: Tensor, condition: Tensor | None = None) -> Tensor:
        """Normalised patches [M, T, 3, P * P] and, with FiLM, a condition [M, C] -> [M, T, W], without a final norm."""
        assert (condition is not None) == self.film
        x = self.patch_embed(patches) + self.pos_embed
        prefix = [t.expand(len(x), -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        x = torch.cat((*prefix, x), 1) if prefix else x  # prefix tokens have no position
        if condition is not None:
            condition = condition.to(x.dtype)
        stream = Residual(x)
        for block in self.blocks:
            stream = self.run_block(block, stream, condition)
        return stream.total()[:, -patches.shape[1] :]
