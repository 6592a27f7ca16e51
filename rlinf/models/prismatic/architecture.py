"""Sizes of the OpenVLA network, torch-free: `base` (published), `small`, `light`, `compact`; every layer by name.

Letters: S pixels of a side, T tokens a camera, W language width, K actions a chunk, D action columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlinf.models.nn.sizes import Layer, Tower

NUM_BINS = 256  # values of one action token
_PARTS = {"vision_backbone": "vision", "projector": "projector", "language_model": "language"}
_PARTS |= {"proprio_projector": "proprio", "action_head": "regression"}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The optional parts of a network, which OpenVLA-OFT has."""

    proprio_dim: int = 0  # state columns read as one token; 0: none
    film: bool = False  # language conditions the vision towers
    regression: tuple[int, int] | None = None  # (K, D) of an L1 head


PLAIN = Parts()


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

    def layers(self, parts: Parts = PLAIN) -> Iterator[Layer]:
        """Every linear layer and convolution of `PrismaticNet` with these parts, in its own order."""
        w, v = self.width, self.vision_width
        for name, tower in (("featurizer", self.dino), ("fused_featurizer", self.siglip)):
            yield from tower.layers(f"vision_backbone.{name}", self.patch_size, w if parts.film else 0)
        yield Layer("projector.fc1", v, 4 * v, True)
        yield Layer("projector.fc2", 4 * v, w, True)
        yield Layer("projector.fc3", w, w, True)
        for i in range(self.depth):
            block = f"language_model.model.layers.{i}"
            yield from (Layer(f"{block}.self_attn.{part}_proj", w, w) for part in "qkvo")
            yield from (Layer(f"{block}.mlp.{part}_proj", w, self.mlp) for part in ("gate", "up"))
            yield Layer(f"{block}.mlp.down_proj", self.mlp, w)
        yield Layer("language_model.lm_head", w, self.vocab_size)
        if parts.proprio_dim:
            yield Layer("proprio_projector.fc1", parts.proprio_dim, w, True)
            yield Layer("proprio_projector.fc2", w, w, True)
        if parts.regression is not None:
            columns, head = parts.regression[1], "action_head.model"
            yield Layer(f"{head}.fc1", columns * w, w, True)
            yield from (Layer(f"{head}.mlp_resnet_blocks.{i}.ffn.1", w, w, True) for i in range(2))
            yield Layer(f"{head}.fc2", w, columns, True)

    def num_parameters(self, parts: Parts = PLAIN) -> dict[str, int]:
        """Exact parameter counts of `PrismaticNet` with these parts, by part; those it does not have are left out."""
        w, towers = self.width, (self.dino, self.siglip)
        counts = {
            "vision": sum(tower.num_other_parameters(self.image_tokens) for tower in towers),
            "projector": 0,
            "embedding": self.vocab_size * w,
            "language": (2 * self.depth + 1) * w,  # norms
        }
        if parts.regression is not None:
            counts["regression"] = (2 * parts.regression[1] + 6) * w  # norms
        for layer in self.layers(parts):
            part = "film" if layer.name.endswith((".scale", ".shift")) else _PARTS[layer.name.partition(".")[0]]
            counts[part] = counts.get(part, 0) + layer.num_parameters
        return counts


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
        # Channel means and deviations of both towers are ImageNet's, rounded to bf16 by the published preprocessor.
        mean=(0.484375, 0.455078125, 0.40625),
        std=(0.228515625, 0.2236328125, 0.224609375),
    ),
    siglip=Tower(
        width=1152,
        depth=27,
        mlp=4304,
        heads=16,
        class_token=False,
        registers=0,
        layer_scale=False,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
    vocab_size=32064,
    action_end=32000,  # Llama-2's vocabulary ends here, the rows behind it are padding
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
LIGHT = replace(
    SMALL,
    dino=replace(SMALL.dino, width=192, depth=4, mlp=768, heads=3),
    siglip=replace(SMALL.siglip, width=192, depth=4, mlp=768, heads=3),
    width=256,
    mlp=768,
    depth=4,
    num_heads=4,
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
SIZES = {"base": BASE, "small": SMALL, "light": LIGHT, "compact": COMPACT}
