"""The size that an env's image has in a video of several, for simulator processes and for what writes videos.

Torch-free, numpy only: a simulator's own process makes its frames small, before anybody else has to move them.
"""

from __future__ import annotations

import math

import numpy as np

MIN_TILE = 128  # pixels: smaller images are enlarged so that captions can be read
MAX_GRID = 960  # pixels: images of wider grids are made smaller


def grid_shape(count: int) -> tuple[int, int]:
    """Rows and columns of a grid of so many images."""
    rows = max(1, math.isqrt(count))
    return rows, -(-count // rows)


def shrinking(image_size: tuple[int, int], count: int) -> int:
    """The whole number by which images (height, width) are made smaller for a grid of `count`; 1 leaves them."""
    height, width = image_size
    return max(1, min(-(-grid_shape(count)[1] * width // MAX_GRID), min(height, width) // MIN_TILE))


def tile_size(image_size: tuple[int, int], count: int) -> tuple[int, int]:
    """(height, width) of an image that was made small enough for a grid of `count`."""
    factor = shrinking(image_size, count)
    return image_size[0] // factor, image_size[1] // factor


def shrink(image: np.ndarray, factor: int) -> np.ndarray:
    """The image u8 [H, W, 3] with every `factor` x `factor` pixels averaged; rows and columns left over are dropped."""
    if factor == 1:
        return image
    height, width = (side // factor * factor for side in image.shape[:2])
    total = np.full(
        (height // factor, width // factor, 3), factor * factor // 2, np.uint16 if factor < 16 else np.uint32
    )
    for y in range(factor):
        for x in range(factor):
            total += image[y:height:factor, x:width:factor]
    return (total // (factor * factor)).astype(np.uint8)
