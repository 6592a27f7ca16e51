"""From what the camera draws to the published picture: the table image behind, a texture over it.

numpy only; `sample` also takes tensors of torch. Letters: B pictures, H and W their height and width, h and w those of
a texture, m the share of the texture.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlinf.simulators.contract import Array

Area = Literal["bodies", "whole"]  # what a texture covers: robot and bodies, or everything
Axis = tuple[Any, Any, Any]  # per pixel of a side: the texture's lower and upper neighbour, and the upper one's weight


def compose(drawn: Array, mask: Array, backdrop: Array) -> Array:
    """Keep robot and bodies (mask bool [H, W]) of the drawing u8 [H, W, 3], put the table image everywhere else."""
    return np.where(mask[..., None], drawn, backdrop)


def blend(picture: Array, mask: Array, texture: Array, m: float, area: Area) -> Array:
    """Lay a texture u8 [h, w, 3] over the picture: stretched over robot and bodies, or windowed over everything."""
    if m == 0 or not mask.any():
        return picture
    spans = [(int(hit[0]), int(hit[-1]) + 1) for hit in (np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0)))]
    axes = [texture_axis(*spans[i], texture.shape[i], mask.shape[i], area) for i in (0, 1)]
    inside = tuple(slice(*span) for span in spans) if area == "bodies" else (slice(None), slice(None))
    down, across = (tuple(values[None, part] for values in axis) for axis, part in zip(axes, inside, strict=True))
    over = sample(texture[None].astype(np.float32), np.zeros((1, 1), np.int64), down, across)[0]
    if area == "whole":
        over = np.floor(over + np.float32(0.5))  # the enlarged texture was kept as whole numbers
    mixed = over * np.float32(m) + picture[inside].astype(np.float32) * np.float32(1 - m)
    blended = picture.copy()
    blended[inside] = mixed if area == "whole" else np.where(mask[inside][..., None], mixed, picture[inside])
    return blended


def texture_axis(first: int, end: int, source: int, size: int, area: Area) -> Axis:
    """Where a texture of `source` pixels is read along a side of `size`, [size] each; bodies lie in [first, end)."""
    if area == "whole":  # twice as large, from the middle of the bodies on
        window = slice((first + end - 1) // 2, (first + end - 1) // 2 + size)
        low, high, weight = interpolation(source, 2 * size)
        return low[window], high[window], weight[window]
    tables = interpolation(source, end - first)
    low, high, weight = (np.zeros(size, table.dtype) for table in tables)
    low[first:end], high[first:end], weight[first:end] = tables
    return low, high, weight


def sample(textures: Any, env: Any, down: Axis, across: Axis) -> Any:
    """Textures f32 [B, h, w, 3] read bilinearly, rows by `down` [B, H] and columns by `across` [B, W]: [B, H, W, 3].

    `env` is 0 ... B - 1 as a column [B, 1].
    """
    for low, high, weight in (down, across):  # the second time round, columns stand where rows stood
        share = weight[:, :, None, None]
        textures = (textures[env, low] * (1 - share) + textures[env, high] * share).swapaxes(1, 2)
    return textures


def shrink(image: Array, height: int, width: int) -> Array:
    """Every new pixel is the mean of what it covers; u8 [height, width, 3], the image itself at its own size."""
    if image.shape[:2] == (height, width):
        return image
    down, across = _coverage(image.shape[0], height), _coverage(image.shape[1], width)
    mean = np.einsum("hy,yxc,wx->hwc", down, image.astype(np.float32), across, optimize=True)
    return np.floor(mean + 0.5).astype(np.uint8)


def read_picture(path: Path, size: tuple[int, int]) -> Array:
    """A picture file in height and width `size`, u8 [H, W, 3], by SAPIEN's reader: no image library is needed."""
    import sapien

    return shrink(sapien.render.RenderTexture2D(str(path)).download()[..., :3], *size)


@cache
def interpolation(source: int, target: int) -> Axis:
    """Bilinear, without smoothing: lower and upper neighbour and the upper one's weight f32, for pixel centres."""
    at = np.clip((np.arange(target, dtype=np.float32) + 0.5) * np.float32(source / target) - 0.5, 0, None)
    low = np.minimum(at.astype(np.int64), source - 1)
    return low, np.minimum(low + 1, source - 1), (at - low).astype(np.float32)


def _coverage(source: int, target: int) -> Array:
    """Share of each old pixel in each new one, f32 [target, source]; rows sum to 1."""
    edges = np.arange(target + 1) * source / target
    old = np.arange(source)
    covered = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
    return (np.clip(covered, 0, None) * target / source).astype(np.float32)
