"""Image resampling in batches on the images' device: u8 in, u8 out, the same bits on every device.

Letters: M images, h x w pixels in, size x size pixels out.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Literal

import torch
from torch.nn import functional as F

Tensor = torch.Tensor
Kernel = Literal["triangle", "bicubic", "lanczos3"]
_SUPPORT: dict[Kernel, float] = {"triangle": 1.0, "bicubic": 2.0, "lanczos3": 3.0}
_PILLOW_BITS = 22  # fractional bits of Pillow's integer weights


def resize_with_pad(images: Tensor, size: int) -> Tensor:
    """u8 [M, h, w, 3] -> u8 [M, size, size, 3], aspect kept, black borders; bit-equal to Pillow's bilinear resize."""
    height, width = images.shape[1:3]
    if (height, width) == (size, size):
        return images
    ratio = max(width / size, height / size)
    new_h, new_w = int(height / ratio), int(width / ratio)
    for new, dim in ((new_w, 2), (new_h, 1)):  # rounded and clipped after each
        if images.shape[dim] != new:
            total = _weigh(images, dim, *_pillow_weights(images.shape[dim], new, images.device))
            images = ((total + (1 << (_PILLOW_BITS - 1))) >> _PILLOW_BITS).clamp(0, 255).to(torch.uint8)
    top, left = (size - new_h) // 2, (size - new_w) // 2
    return F.pad(images, (0, 0, left, size - new_w - left, top, size - new_h - top))


def resize(images: Tensor, size: int, *, kernel: Kernel = "bicubic") -> Tensor:
    """u8 [M, h, w, 3] -> u8 [M, size, size, 3], aspect ignored, antialiased.

    Rounded once at the end, with the f32 arithmetic of torchvision on a CPU (a few pixels in a million still round the
    other way).
    """
    if images.shape[1:3] == (size, size):
        return images
    for dim in (2, 1):
        images = _weigh(images, dim, *_weights(images.shape[dim], size, kernel, torch.float32, images.device))
    return images.clamp(0.0, 255.0).round().to(torch.uint8)


def center_crop(images: Tensor, size: int, *, area: float = 0.9) -> Tensor:
    """u8 [M, h, w, 3] -> u8 [M, size, size, 3]: the central box of `area` of the image, bilinear, corners on corners.

    The published evaluation does this to images in [0, 1] and returns to u8 by truncating 255.5 x value.
    """
    y0, y1, fy = _crop_samples(images.shape[1], size, area, images.device)
    x0, x1, fx = _crop_samples(images.shape[2], size, area, images.device)
    pixels = images.float() * (1.0 / 255.0)
    sides = [pixels.index_select(1, y) for y in (y0, y1)]
    top, bottom = (_between(p.index_select(2, x0), p.index_select(2, x1), fx[:, None]) for p in sides)
    return (_between(top, bottom, fy[:, None, None]).clamp(0.0, 1.0) * 255.5).to(torch.uint8)


def _between(a: Tensor, b: Tensor, way: Tensor) -> Tensor:
    return a + (b - a) * way


@functools.lru_cache(maxsize=16)
def _crop_samples(old: int, new: int, area: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels i64 [new] before and after each sample, and the way between them f32 [new]."""
    side = torch.tensor(math.sqrt(torch.tensor(area)))  # torch's own root is not correctly rounded on every processor
    start = (1.0 - side) / 2.0
    step = (start + side - start) * (old - 1) / (new - 1)
    at = start * (old - 1) + torch.arange(new) * step
    return at.floor().long().to(device), at.ceil().long().to(device), (at - at.floor()).to(device)


def _weigh(images: Tensor, dim: int, taps: Tensor, weights: Tensor) -> Tensor:
    """One axis resampled, in the weights' dtype. Products and sums are separate kernels: fused ones round otherwise."""
    shape = [1] * images.dim()
    shape[dim] = taps.shape[1]
    total = images.index_select(dim, taps[0]) * weights[0].view(shape)
    for tap, weight in zip(taps[1:], weights[1:], strict=True):
        total += images.index_select(dim, tap) * weight.view(shape)
    return total


@functools.lru_cache(maxsize=64)
def _pillow_weights(old: int, new: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bilinear: source indices i64 [taps, new] and fixed-point weights i32 [taps, new], never negative."""
    taps, weights = _weights(old, new, "triangle", torch.float64, device)
    return taps, (weights * (1 << _PILLOW_BITS) + 0.5).int()


@functools.lru_cache(maxsize=64)
def _weights(old: int, new: int, kernel: Kernel, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Source indices i64 [taps, new] and weights [taps, new] that sum to 1, every step rounded to `dtype`.

    Rounding the positions is most of the difference between torchvision's f32 results and exact ones.
    """
    scale = torch.tensor(old, dtype=dtype) / new
    stretch = scale.clamp(min=1.0)
    support = _SUPPORT[kernel] * stretch
    centre = (torch.arange(new, dtype=dtype) + 0.5) * scale
    first = ((centre - support).double() + 0.5).long().clamp(min=0)
    last = ((centre + support).double() + 0.5).long().clamp(max=old)
    taps = first + torch.arange(int((last - first).max()))[:, None]  # [taps, new]
    distance = ((taps.to(dtype) - centre).double() + 0.5) * (1.0 / stretch).double()
    heights = torch.where(taps < last, _height(distance.to(dtype).abs(), kernel), 0.0)
    weights = heights / functools.reduce(operator.add, heights)
    return taps.clamp(max=old - 1).to(device), weights.to(device)


def _height(x: Tensor, kernel: Kernel) -> Tensor:
    """The filter at distance x >= 0."""
    if kernel == "triangle":
        return (1.0 - x).clamp(min=0.0)
    if kernel == "bicubic":  # a = -0.5
        near = _fused(_fused(x, 1.5, -2.5) * x, x, 1.0)
        far = _fused(_fused(x - 5.0, x, 8.0), x, -4.0) * -0.5
        return torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))
    return torch.where(x < 3.0, torch.sinc(x) * torch.sinc(x / 3.0), 0.0)


def _fused(a: Tensor, b: Tensor | float, c: float) -> Tensor:
    """a * b + c with a single rounding to f32, as compilers make of it."""
    return (a.double() * b + c).to(a.dtype)
