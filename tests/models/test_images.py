"""Resampling against Pillow and torch, and what must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from rlinf.models import images

KERNELS = ("triangle", "bicubic", "lanczos3")
SIZES = [(480, 640, 224), (240, 320, 224), (200, 200, 224), (84, 84, 224), (224, 97, 56), (31, 17, 64), (5, 300, 9)]


def random_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_resize_with_pad_equals_pillow():
    draw = np.random.default_rng(0).integers(3, 160, (20, 3)).tolist()
    for height, width, size in SIZES + draw:
        image = random_images(height, width, 3, seed=height)
        ratio = max(height / size, width / size)
        new_h, new_w = int(height / ratio), int(width / ratio)
        if min(new_h, new_w) < 1:
            continue
        # Width and height in two calls: one call takes the height first in recent versions, for some shapes.
        want = Image.fromarray(image.numpy()).resize((new_w, height), Image.Resampling.BILINEAR)
        want = np.array(want.resize((new_w, new_h), Image.Resampling.BILINEAR))
        top, left = (size - new_h) // 2, (size - new_w) // 2
        got = images.resize_with_pad(image[None], size)[0].numpy()
        assert np.array_equal(got[top : top + new_h, left : left + new_w], want), (height, width, size)
        assert got.sum() == want.sum()


def test_resize_equals_torch():
    """Up to pixels within float error of a half: at most 3 of 100,000, by one level."""
    wrong = pixels = 0
    for height, width, size in SIZES:
        image = random_images(2, height, width, 3)
        exact = F.interpolate(image.movedim(-1, 1).float(), (size, size), mode="bicubic", antialias=True)
        want = exact.clamp(0, 255).round().movedim(1, -1)
        difference = (images.resize(image, size).float() - want).abs()
        assert difference.max() <= 1
        wrong, pixels = wrong + int(difference.sum()), pixels + difference.numel()
    print(f"{wrong} of {pixels} values differ")
    assert wrong <= 3e-5 * pixels


def test_a_flat_image_stays_flat_and_a_fitting_one_is_left_alone():
    for kernel in KERNELS:
        flat = torch.full((1, 50, 70, 3), 201, dtype=torch.uint8)
        assert images.resize(flat, 33, kernel=kernel).unique().tolist() == [201]
    fitting = random_images(2, 40, 40, 3)
    assert images.resize(fitting, 40) is fitting
    assert images.resize_with_pad(fitting, 40) is fitting


FUNCTIONS = {
    "pad": lambda x: images.resize_with_pad(x, 56),
    "resize": lambda x: images.resize(x, 56),
    "lanczos": lambda x: images.resize(x, 56, kernel="lanczos3"),
    "crop": lambda x: images.center_crop(x, 56),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_do_not_depend_on_their_batch(name):
    batch, f = random_images(5, 48, 90, 3), FUNCTIONS[name]
    whole = f(batch)
    assert whole.shape == (5, 56, 56, 3)
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, torch.cat([f(row[None]) for row in batch]))
    assert torch.equal(whole.flip(0), f(batch.flip(0)))
    channels_first = batch.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)  # same values, other memory order
    assert torch.equal(whole, f(channels_first))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gpu_gives_the_same_bits(name):
    for shape in ((4, 480, 640, 3), (4, 200, 200, 3), (4, 30, 17, 3)):
        batch = random_images(*shape)
        assert torch.equal(FUNCTIONS[name](batch.cuda()).cpu(), FUNCTIONS[name](batch))


def test_resize_with_pad():
    constant = torch.full((1, 30, 60, 3), 77, dtype=torch.uint8)
    out = images.resize_with_pad(constant, 64)
    assert (out[0, 16:48] == 77).all()
    assert not out[0, :16].any()
    assert not out[0, 48:].any()
    checker = torch.zeros(1, 128, 128, 3, dtype=torch.uint8)
    checker[:, ::2, ::2] = 255
    inside = images.resize_with_pad(checker, 64)[0, 1:-1, 1:-1].unique().tolist()
    # Halving weighs 4 pixels (1, 3, 3, 1) / 8 along each axis; u8 after each pass: round(255 / 2) = 128, then 64.
    assert inside == [64]


def test_center_crop_geometry():
    """A ramp of 0..200 over 201 pixels: the box runs from 5.13 to 194.87, its ends sampled exactly."""
    ramp = torch.arange(201, dtype=torch.uint8).view(1, 1, 201, 1).expand(1, 201, 201, 3)
    side = 0.9**0.5
    start = 200 * (1 - side) / 2
    want = start + torch.arange(11, dtype=torch.float64) * (200 * side) / 10
    got = images.center_crop(ramp, 11)[0, 0, :, 0].double()
    assert torch.equal(got, (want * 255.5 / 255).floor())
    assert torch.equal(images.center_crop(ramp.transpose(1, 2), 11), images.center_crop(ramp, 11).transpose(1, 2))
    full = random_images(1, 20, 20, 3)
    assert torch.equal(images.center_crop(full, 20, area=1.0), full)
