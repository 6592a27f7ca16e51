"""The published pictures of many envs at once, in torch on the device that drew them; picture.py has those of one.

Letters: B envs, H and W the picture's height and width, h and w those of a texture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlinf.simulators.maniskill.assets import TableImage
from rlinf.simulators.maniskill.constants import NATIVE_SIZE
from rlinf.simulators.maniskill.picture import read_picture, sample, texture_axis
from rlinf.simulators.maniskill.tasks import Texture

ENVS_AT_ONCE = 32  # bounds the memory for textures


class Backdrops:
    """The table images of an environment id, and its textures where it has some, ready on the device."""

    def __init__(
        self, images: Mapping[int, TableImage], texture: Texture | None, size: tuple[int, int], device: torch.device
    ) -> None:
        self._number = {index: n for n, index in enumerate(images)}
        self._texture = texture
        pictures = np.stack([read_picture(image.picture, size) for image in images.values()])
        self._images = torch.from_numpy(pictures).to(device)
        if texture is not None:
            textures = np.stack([read_picture(image.texture, NATIVE_SIZE) for image in images.values()])
            self._textures = torch.from_numpy(textures).float().to(device)
            self._shares = torch.tensor([texture.ratio * image.mix for image in images.values()], device=device)

    def compose(self, drawn: Tensor, bodies: Tensor, images: Sequence[int]) -> Tensor:
        """Drawing u8 [B, H, W, 3] and where robot and bodies are, bool [B, H, W] -> the picture u8 [B, H, W, 3]."""
        numbers = torch.tensor([self._number[index] for index in images], device=self._images.device)
        picture = torch.where(bodies[..., None], drawn, self._images[numbers])
        if self._texture is not None:
            for rows in torch.arange(len(picture), device=picture.device).split(ENVS_AT_ONCE):
                picture[rows] = self._blend(picture[rows], bodies[rows], numbers[rows], self._texture)
        return picture

    def _blend(self, picture: Tensor, bodies: Tensor, numbers: Tensor, texture: Texture) -> Tensor:
        """As picture.blend, for each env."""
        axes = []
        for side, spans in enumerate(_spans(bodies)):
            tables = [
                texture_axis(first, end, NATIVE_SIZE[side], bodies.shape[side + 1], texture.area)
                for first, end in spans
            ]
            low, high, weight = (torch.from_numpy(np.stack(p)).to(picture.device) for p in zip(*tables, strict=True))
            axes.append((low, high, weight))
        env = torch.arange(len(picture), device=picture.device)[:, None]
        over = sample(self._textures[numbers], env, axes[0], axes[1])
        share = self._shares[numbers][:, None, None].expand(bodies.shape)
        if texture.area == "whole":
            over = torch.floor(over + 0.5)
        else:
            share = share * bodies
        share = share[..., None]
        return torch.where(share > 0, over * share + picture * (1 - share), picture).to(torch.uint8)


def _spans(bodies: Tensor) -> list[list[tuple[int, int]]]:
    """First and past-the-last row of each mask bool [B, H, W], then of columns; the whole side where it is empty."""
    edges = []
    for axis in (2, 1):
        hit = bodies.any(axis)
        hit |= ~hit.any(1, keepdim=True)
        edges += [hit.int().argmax(1), hit.shape[1] - hit.flip(1).int().argmax(1)]
    top, bottom, left, right = torch.stack(edges).tolist()  # leaves the device once
    return [list(zip(top, bottom, strict=True)), list(zip(left, right, strict=True))]
