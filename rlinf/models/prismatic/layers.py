"""Names and sizes of the layers that LoRA may adapt, torch-free, in the network's own order."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf.models.files.adapters import Layer
from rlinf.models.prismatic.architecture import Architecture, Tower


def net_layers(
    arch: Architecture, *, proprio_dim: int = 0, film: bool = False, regression: tuple[int, int] | None = None
) -> Iterator[Layer]:
    """Every linear layer and convolution of `PrismaticNet` built with the same options."""
    w, v = arch.width, arch.vision_width
    for name, tower in (("featurizer", arch.dino), ("fused_featurizer", arch.siglip)):
        yield from _tower(f"vision_backbone.{name}", tower, arch.patch_size, w if film else 0)
    yield from (Layer("projector.fc1", v, 4 * v), Layer("projector.fc2", 4 * v, w), Layer("projector.fc3", w, w))
    for i in range(arch.depth):
        block = f"language_model.model.layers.{i}"
        yield from (Layer(f"{block}.self_attn.{part}_proj", w, w) for part in "qkvo")
        yield from (Layer(f"{block}.mlp.{part}_proj", w, arch.mlp) for part in ("gate", "up"))
        yield Layer(f"{block}.mlp.down_proj", arch.mlp, w)
    yield Layer("language_model.lm_head", w, arch.vocab_size)
    if proprio_dim:
        yield from (Layer("proprio_projector.fc1", proprio_dim, w), Layer("proprio_projector.fc2", w, w))
    if regression is not None:
        columns, head = regression[1], "action_head.model"
        yield Layer(f"{head}.fc1", columns * w, w)
        yield from (Layer(f"{head}.mlp_resnet_blocks.{i}.ffn.1", w, w) for i in range(2))
        yield Layer(f"{head}.fc2", w, columns)


def _tower(name: str, tower: Tower, patch_size: int, film_width: int) -> Iterator[Layer]:
    w = tower.width
    yield Layer(f"{name}.patch_embed.proj", 3 * patch_size**2, w, linear=False)
    for i in range(tower.blocks):
        block = f"{name}.blocks.{i}"
        yield from (Layer(f"{block}.attn.qkv", w, 3 * w), Layer(f"{block}.attn.proj", w, w))
        yield from (Layer(f"{block}.mlp.fc1", w, tower.mlp), Layer(f"{block}.mlp.fc2", tower.mlp, w))
        if film_width:
            yield from (Layer(f"{block}.{part}", film_width, w) for part in ("scale", "shift"))
