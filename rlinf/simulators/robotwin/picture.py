"""The published centre crop, in numpy: the simulator's process has no torch to rely on. Letters: h x w pixels in."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from rlinf.simulators.contract import Array

AREA = 0.9  # of the picture that is kept


def center_crop(picture: Array, size: tuple[int, int]) -> Array:
    """u8 [h, w, 3] -> u8 [*size, 3], bit-equal to rlinf.models.images.center_crop."""
    y0, y1, fy = _samples(picture.shape[0], size[0])
    x0, x1, fx = _samples(picture.shape[1], size[1])
    pixels = picture.astype(np.float32) * np.float32(1.0 / 255.0)
    top, bottom = (_between(pixels[y][:, x0], pixels[y][:, x1], fx[:, None]) for y in (y0, y1))
    return (np.clip(_between(top, bottom, fy[:, None, None]), 0.0, 1.0) * np.float32(255.5)).astype(np.uint8)


def to_bytes(colour: Array) -> Array:
    """A camera's picture, f32 [h, w, 4] from 0 to 1 or u8, as u8 [h, w, 3]; RoboTwin truncates."""
    rgb = colour[..., :3]
    return rgb if rgb.dtype == np.uint8 else (rgb * 255).clip(0, 255).astype(np.uint8)


def _between(a: Array, b: Array, way: Array) -> Array:
    return a + (b - a) * way


@lru_cache(maxsize=16)
def _samples(old: int, new: int) -> tuple[Array, Array, Array]:
    """The pixels i64 [new] before and after each sample, and the way between them f32 [new]."""
    side = np.float32(math.sqrt(np.float32(AREA)))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    step = (start + side - start) * np.float32(old - 1) / np.float32(new - 1)
    at = start * np.float32(old - 1) + np.arange(new, dtype=np.float32) * step
    low = np.floor(at)
    return low.astype(np.int64), np.ceil(at).astype(np.int64), at - low
