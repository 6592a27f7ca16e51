"""From what the camera draws to the published picture: the table image behind, a texture over it. numpy only.

Letters: H, W the picture's height and width; m the share of the texture.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from rlinf.simulators.contract import Array


def compose(drawn: Array, mask: Array, backdrop: Array) -> Array:
    """Keep robot and bodies (mask bool [H, W]) of the drawing u8 [H, W, 3], put the table image everywhere else."""
    return np.where(mask[..., None], drawn, backdrop)


def blend(picture: Array, mask: Array, texture: Array, m: float, area: Literal["bodies", "whole"]) -> Array:
    """Lay a texture u8 [480, 640, 3] over the picture: stretched over robot and bodies, or windowed over everything."""
    if m == 0 or not mask.any():
        return picture
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    over = picture.astype(np.float32)
    if area == "bodies":
        inside = (slice(*box[:2]), slice(*box[2:]))
        stretched = resize(texture, box[1] - box[0], box[3] - box[2])
        mixed = stretched * np.float32(m) + over[inside] * np.float32(1 - m)
        over[inside] = np.where(mask[inside][..., None], mixed, over[inside])
    else:
        height, width = mask.shape
        top, left = (box[0] + box[1] - 1) // 2, (box[2] + box[3] - 1) // 2
        doubled = np.floor(resize(texture, 2 * height, 2 * width) + np.float32(0.5))  # was kept as whole numbers
        window = doubled[top : top + height, left : left + width]
        over = window * np.float32(m) + over * np.float32(1 - m)
    return over.astype(np.uint8)


def resize(image: Array, height: int, width: int) -> Array:
    """Bilinear, without smoothing: f32 [height, width, 3]."""
    down, across = interpolation(image.shape[0], height), interpolation(image.shape[1], width)
    image = image.astype(np.float32)
    rows = image[down[0]] * (1 - down[2])[:, None, None] + image[down[1]] * down[2][:, None, None]
    return rows[:, across[0]] * (1 - across[2])[:, None] + rows[:, across[1]] * across[2][:, None]


def shrink(image: Array, height: int, width: int) -> Array:
    """Every new pixel is the mean of what it covers; u8 [height, width, 3], the image itself at its own size."""
    if image.shape[:2] == (height, width):
        return image
    down, across = _coverage(image.shape[0], height), _coverage(image.shape[1], width)
    mean = np.einsum("hy,yxc,wx->hwc", down, image.astype(np.float32), across, optimize=True)
    return np.floor(mean + 0.5).astype(np.uint8)


@cache
def interpolation(source: int, target: int) -> tuple[Array, Array, Array]:
    """Lower and upper neighbour and the upper one's weight f32, for pixel centres."""
    at = np.clip((np.arange(target, dtype=np.float32) + 0.5) * np.float32(source / target) - 0.5, 0, None)
    low = np.minimum(at.astype(np.int64), source - 1)
    return low, np.minimum(low + 1, source - 1), (at - low).astype(np.float32)


def _coverage(source: int, target: int) -> Array:
    """Share of each old pixel in each new one, f32 [target, source]; rows sum to 1."""
    edges = np.arange(target + 1) * source / target
    old = np.arange(source)
    covered = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
    return (np.clip(covered, 0, None) * target / source).astype(np.float32)
