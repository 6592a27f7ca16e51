"""The network OpenVLA and OpenVLA-OFT share: two vision towers, a projector and a Llama, with OFT's optional parts.

Letters: B rows, n cameras, M images (B * n), T tokens a camera, S pixels of a side, L tokens of a sequence, W language
width, K actions a chunk, D action columns.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import nn

from rlinf.models.nn.adapted_layers import linear_rows
from rlinf.models.nn.llama import KeyValueCache, Llama
from rlinf.models.nn.mlp import named_sequential
from rlinf.models.nn.sizes import Rgb, Tower
from rlinf.models.nn.timm_vit import TimmVit, patches_of
from rlinf.models.prismatic.architecture import PLAIN, Architecture, Parts

Tensor = torch.Tensor


@cache  # never dropped: recorded kernels keep its address
def _pixel_affine(mean: Rgb, std: Rgb, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shift and scale, f32 [3, 1], that normalise bytes: bytes * scale + shift. Kept out of `.to(bfloat16)`."""
    center, spread = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (mean, std))
    return (-center / spread).float().to(device), (1.0 / (255.0 * spread)).float().to(device)


class VisionBackbone(nn.Module):
    """Both towers on the same images, their features side by side."""

    def __init__(self, arch: Architecture, film: bool) -> None:
        super().__init__()
        self.arch = arch
        film_width = arch.width if film else 0
        tower = partial(TimmVit, num_patches=arch.image_tokens, patch_size=arch.patch_size, film_width=film_width)
        self.featurizer, self.fused_featurizer = tower(arch.dino), tower(arch.siglip)

    def forward(self, images: Tensor, language: Tensor | None) -> Tensor:
        """u8 [M, S, S, 3] or normalised f32 [M, 6, S, S], language [M, W] with FiLM -> [M, T, vision width]."""
        size = self.arch.patch_size
        if images.dtype == torch.uint8:
            shared = patches_of(images.permute(0, 3, 1, 2), size)  # the two towers differ only in normalisation
            dino, siglip = (self._normalized(shared, tower) for tower in (self.arch.dino, self.arch.siglip))
        else:
            dino, siglip = (patches_of(part, size) for part in images.split(3, 1))
        return torch.cat((self.featurizer(dino, language), self.fused_featurizer(siglip, language)), -1)

    def _normalized(self, patches: Tensor, tower: Tower) -> Tensor:
        shift, scale = _pixel_affine(tower.mean, tower.std, patches.device)
        return torch.addcmul(shift, patches.float(), scale)


class ResidualBlock(nn.Module):
    """x + ReLU(Linear(LayerNorm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


def projector(vision_width: int, width: int) -> nn.Sequential:
    """Vision features to language embeddings."""
    return named_sequential(
        fc1=nn.Linear(vision_width, 4 * vision_width),
        gelu1=nn.GELU(),
        fc2=nn.Linear(4 * vision_width, width),
        gelu2=nn.GELU(),
        fc3=nn.Linear(width, width),
    )


def proprio_projector(proprio_dim: int, width: int) -> nn.Sequential:
    """The robot state as one token."""
    return named_sequential(fc1=nn.Linear(proprio_dim, width), gelu=nn.GELU(), fc2=nn.Linear(width, width))


def regression_head(columns: int, width: int) -> nn.Sequential:
    """OFT's continuous actions: hidden states of an action's columns, side by side, to its values [B, K, columns]."""
    mlp = named_sequential(
        layer_norm1=nn.LayerNorm(columns * width),
        fc1=nn.Linear(columns * width, width),
        relu=nn.ReLU(),
        mlp_resnet_blocks=nn.Sequential(ResidualBlock(width), ResidualBlock(width)),
        layer_norm2=nn.LayerNorm(width),
        fc2=nn.Linear(width, columns),
    )
    return named_sequential(model=mlp)


class LanguageModel(nn.Module):
    """The decoder and its vocabulary."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.model = Llama(
            vocab_size=arch.vocab_size,
            width=arch.width,
            hidden=arch.mlp,
            depth=arch.depth,
            heads=arch.num_heads,
            eps=arch.norm_eps,
        )
        self.lm_head = nn.Linear(arch.width, arch.vocab_size, bias=False)


class PrismaticNet(nn.Module):
    """The network's weights and passes; callers lay out the sequence (`sequence`, and the policies)."""

    def __init__(self, arch: Architecture, parts: Parts = PLAIN) -> None:
        super().__init__()
        self.arch, self.parts = arch, parts
        self.vision_backbone = VisionBackbone(arch, parts.film)
        self.projector = projector(arch.vision_width, arch.width)
        self.language_model = LanguageModel(arch)
        if parts.proprio_dim:
            self.proprio_projector = proprio_projector(parts.proprio_dim, arch.width)
        if parts.regression is not None:
            self.action_head = regression_head(parts.regression[1], arch.width)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of embeddings and hidden states."""
        return self.language_model.model.dtype

    # ------------------------------------------------------------------ embeddings
    def embed_images(self, images: Tensor, language: Tensor | None = None) -> Tensor:
        """u8 [B, n, S, S, 3], or normalised f32 [B, n, 6, S, S] -> [B, n * T, W]; all cameras in one pass.

        `language` [B, W], the mean language embedding, is what FiLM conditions on.
        """
        b, n = images.shape[:2]
        condition = None if language is None else language.repeat_interleave(n, 0)
        features = self.vision_backbone(images.flatten(0, 1), condition)
        return self.projector(features).view(b, -1, self.arch.width)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """i64 [B, L] -> [B, L, W]."""
        return self.language_model.model.embed_tokens(ids)

    def embed_proprio(self, proprio: Tensor) -> Tensor:
        """Normalised state f32 [B, p] -> its token [B, 1, W]."""
        return self.proprio_projector(proprio.to(self.dtype))[:, None]

    # ------------------------------------------------------------------ language model
    def new_cache(self, batch: int, length: int) -> KeyValueCache:
        """Room for `batch` rows of at most `length` tokens; keep it and hand it to every call."""
        return self.language_model.model.new_cache(batch, length)

    def hidden(
        self, x: Tensor, positions: Tensor, valid: Tensor | None, *, causal: bool, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Embeddings [B, L, W] at i64 [B, L] -> [B, L, W] after the final norm; a cache is filled from slot 0 on.

        Tokens where bool `valid` [B, L] is False are attended to by none; None when every token counts.
        """
        return self.language_model.model(x, positions, valid, causal=causal, cache=cache)

    def decode(self, ids: Tensor, positions: Tensor, cache: KeyValueCache, slot: int) -> Tensor:
        """One more token i64 [B] at i64 [B], behind the `slot` tokens of the cache -> [B, W]."""
        return self.language_model.model.decode(self.embed_tokens(ids), positions, cache, slot)

    # ------------------------------------------------------------------ heads
    def action_logits(self, hidden: Tensor) -> Tensor:
        """[..., W] -> f32 [..., 256] of the action bins alone; column 0 is id `arch.action_begin`."""
        return linear_rows(self.language_model.lm_head, hidden, self.arch.action_begin, self.arch.action_end).float()

    def regress(self, hidden: Tensor) -> Tensor:
        """Hidden states of the action slots [B, K * D, W] -> f32 [B, K, D], normalised, not squashed."""
        assert self.parts.regression is not None
        k, _ = self.parts.regression
        return self.action_head(hidden.reshape(hidden.shape[0], k, -1)).float()
