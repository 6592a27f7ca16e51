"""Sizes of the OpenVLA network, torch-free: the published one and two of our own.

Letters: S pixels of a side, T tokens a camera, W language width, K actions a chunk, D action columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlinf.models.prismatic.constants import ACTION_END, DINO_MEAN, DINO_STD, NUM_BINS, SIGLIP_MEAN, SIGLIP_STD

Rgb = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Tower:
    """One vision transformer; only its first `depth - 1` blocks are ever computed, so only they exist."""

    width: int
    depth: int  # blocks of the published tower
    mlp: int
    heads: int
    class_token: bool
    registers: int
    layer_scale: bool
    mean: Rgb  # of pixels in [0, 1]
    std: Rgb

    @property
    def blocks(self) -> int:
        """Blocks computed: features are the output of the second-to-last one."""
        return self.depth - 1

    @property
    def prefix_tokens(self) -> int:
        """Tokens in front of the patches."""
        return self.class_token + self.registers

    def num_parameters(self, patch_size: int, tokens: int) -> int:
        """Exact count of what is computed."""
        w, m = self.width, self.mlp
        block = 4 * (w * w + w) + (w * m + m) + (m * w + w) + 4 * w + (2 * w if self.layer_scale else 0)
        return 3 * patch_size**2 * w + w + (tokens + self.prefix_tokens) * w + self.blocks * block


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Every size of the network; any numbers work, `SIZES` holds the named ones."""

    image_size: int  # S
    patch_size: int
    dino: Tower  # `vision_backbone.featurizer`
    siglip: Tower  # `vision_backbone.fused_featurizer`
    vocab_size: int  # rows of the embedding and of lm_head
    action_end: int  # the action bins are the `num_bins` ids below this one
    width: int  # W
    mlp: int
    depth: int
    num_heads: int
    num_bins: int = NUM_BINS
    norm_eps: float = 1e-6  # the published converter kept its library's default, not Llama 2's 1e-5

    @property
    def image_tokens(self) -> int:
        """Tokens of one camera (T)."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def vision_width(self) -> int:
        """Channels of both towers side by side."""
        return self.dino.width + self.siglip.width

    @property
    def head_dim(self) -> int:
        """Channels of one attention head of the language model."""
        return self.width // self.num_heads

    @property
    def action_begin(self) -> int:
        """First id of the action bins."""
        return self.action_end - self.num_bins

    def num_parameters(
        self, *, proprio_dim: int = 0, film: bool = False, regression: tuple[int, int] | None = None
    ) -> dict[str, int]:
        """Exact parameter counts by part of `PrismaticNet` built with the same options, parts of size 0 left out."""
        w, v = self.width, self.vision_width
        layer = 4 * w * w + 3 * w * self.mlp + 2 * w
        towers = (self.dino, self.siglip)
        parts = {
            "vision": sum(t.num_parameters(self.patch_size, self.image_tokens) for t in towers),
            "projector": (v * 4 * v + 4 * v) + (4 * v * w + w) + (w * w + w),
            "embedding": self.vocab_size * w,
            "language": self.depth * layer + w,
            "lm_head": self.vocab_size * w,
        }
        if film:
            parts["film"] = sum(t.blocks * 2 * (w * t.width + t.width) for t in towers)
        if proprio_dim:
            parts["proprio"] = (proprio_dim * w + w) + (w * w + w)
        if regression is not None:
            d = regression[1]
            residual = 2 * (2 * w + w * w + w)
            parts["regression"] = 2 * d * w + (d * w * w + w) + residual + 2 * w + (w * d + d)
        return parts


BASE = Architecture(
    image_size=224,
    patch_size=14,
    dino=Tower(
        width=1024,
        depth=24,
        mlp=4096,
        heads=16,
        class_token=True,
        registers=4,
        layer_scale=True,
        mean=DINO_MEAN,
        std=DINO_STD,
    ),
    siglip=Tower(
        width=1152,
        depth=27,
        mlp=4304,
        heads=16,
        class_token=False,
        registers=0,
        layer_scale=False,
        mean=SIGLIP_MEAN,
        std=SIGLIP_STD,
    ),
    vocab_size=32064,
    action_end=ACTION_END,
    width=4096,
    mlp=11008,
    depth=32,
    num_heads=32,
)
_SMALL_ACTION_END = 1000 + NUM_BINS  # bins follow the 1000 pieces of the bundled tokenizer
SMALL = replace(
    BASE,
    image_size=112,
    dino=replace(BASE.dino, width=384, depth=7, mlp=1536, heads=6),
    siglip=replace(BASE.siglip, width=384, depth=7, mlp=1536, heads=6),
    vocab_size=1280,
    action_end=_SMALL_ACTION_END,
    width=512,
    mlp=1408,
    depth=6,
    num_heads=8,
)
COMPACT = replace(
    BASE,
    image_size=64,
    patch_size=16,
    dino=replace(BASE.dino, width=64, depth=2, mlp=128, heads=4),
    siglip=replace(BASE.siglip, width=64, depth=2, mlp=128, heads=4),
    vocab_size=1280,
    action_end=_SMALL_ACTION_END,
    width=64,
    mlp=128,
    depth=2,
    num_heads=4,
)
SIZES = {"base": BASE, "small": SMALL, "compact": COMPACT}
