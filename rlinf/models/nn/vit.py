"""SigLIP vision transformer, with the parameter names of the published checkpoints.

Letters: M images, T patches, W width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from rlinf.models.nn import fused
from rlinf.models.nn.adapted_layers import effective_weight
from rlinf.models.nn.fused import Residual, add_layer_norm
from rlinf.models.nn.packed import Packed
from rlinf.models.nn.recompute import BlockStack
from rlinf.models.nn.timm_vit import patches_of

Tensor = torch.Tensor
NORM_EPS = 1e-6


class PatchEmbeddings(nn.Module):
    """Square patches through one matrix, plus learned positions; stays fp32 under the bf16 rule."""

    def __init__(self, *, image_size: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patch_embedding = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.position_embedding = nn.Embedding((image_size // patch_size) ** 2, width)

    def forward(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """f32 [M, S, S, 3] in [-1, 1] -> [M, T, W], rounded to `dtype` where given."""
        # Patches do not overlap, so the convolution is a matrix product; columns run (channel, y, x).
        patches = patches_of(images.permute(0, 3, 1, 2), self.patch_size).flatten(2)
        weight = effective_weight(self.patch_embedding).flatten(1)
        bias, positions = self.patch_embedding.bias, self.position_embedding.weight
        assert bias is not None
        return fused.linear_plus(patches.to(weight.dtype), weight, bias, positions, dtype or weight.dtype)


class Attention(Packed):
    """Full self-attention."""

    groups = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        m, t, w = x.shape
        q, k, v = (y.view(m, t, self.heads, -1).transpose(1, 2) for y in self.project(self.groups[0], x))
        out = F.scaled_dot_product_attention(q, k, v)  # [M, heads, T, W / heads]
        return self.out_proj(out.transpose(1, 2).reshape(m, t, w))


class Mlp(nn.Module):
    """Two layers with the tanh form of GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(fused.linear_gelu(x, self.fc1))


class EncoderLayer(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.self_attn = Attention(width, heads)
        self.layer_norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width, hidden)

    def forward(self, stream: Residual) -> Residual:
        """The stream [M, T, W] after this block."""
        x, h = add_layer_norm(stream, self.layer_norm1)
        x, h = add_layer_norm(Residual(x, self.self_attn(h)), self.layer_norm2)
        return Residual(x, self.mlp(h))


class SiglipVision(BlockStack):
    """Images to patch features; all blocks and the final norm are used."""

    def __init__(self, *, image_size: int, patch_size: int, width: int, depth: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(image_size=image_size, patch_size=patch_size, width=width)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(EncoderLayer(width, hidden, heads) for _ in range(depth))}
        )
        self.post_layernorm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, images: Tensor) -> Tensor:
        """f32 [M, S, S, 3] in [-1, 1] -> [M, T, W] in the encoder's dtype."""
        stream = Residual(self.embeddings(images, self.post_layernorm.weight.dtype))
        for layer in self.encoder["layers"].children():
            stream = self.run_block(layer, stream)
        return add_layer_norm(stream, self.post_layernorm)[1]
