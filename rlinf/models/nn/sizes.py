"""Sizes of layers and towers, torch-free: what counts of parameters, LoRA and the networks themselves agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

Rgb = tuple[float, float, float]


class Layer(NamedTuple):
    """A linear layer or convolution, by its published name."""

    name: str
    inputs: int  # columns of its weight, flattened
    outputs: int
    bias: bool = False
    linear: bool = True  # False: a convolution, which `all-linear` leaves alone

    @property
    def num_parameters(self) -> int:
        """Numbers in its weight and bias."""
        return (self.inputs + self.bias) * self.outputs


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

    def layers(self, name: str, patch_size: int, film_width: int) -> Iterator[Layer]:
        """Its convolution and linear layers; FiLM's where `film_width` is not 0."""
        w = self.width
        yield Layer(f"{name}.patch_embed.proj", 3 * patch_size**2, w, bias=True, linear=False)
        for i in range(self.blocks):
            block = f"{name}.blocks.{i}"
            yield from (Layer(f"{block}.attn.qkv", w, 3 * w, True), Layer(f"{block}.attn.proj", w, w, True))
            yield from (Layer(f"{block}.mlp.fc1", w, self.mlp, True), Layer(f"{block}.mlp.fc2", self.mlp, w, True))
            if film_width:
                yield from (Layer(f"{block}.{part}", film_width, w, True) for part in ("scale", "shift"))

    def num_other_parameters(self, tokens: int) -> int:
        """Positions, prefix tokens, norms and gains."""
        return self.width * (tokens + self.prefix_tokens + self.blocks * (6 if self.layer_scale else 4))
