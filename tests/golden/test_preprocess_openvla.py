"""preprocess_openvla: the tensor image path of the published processors, and actions as tokens."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rlinf.models import images
from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic.architecture import BASE

TOWERS = (BASE.dino, BASE.siglip)


@pytest.fixture(scope="module")
def io(golden_dir):
    return load_file(golden_dir / "preprocess_openvla" / "io.safetensors")


def test_every_stored_key_has_a_test(io):
    """But for `pil_s3`: no policy here resizes by Pillow's bicubic rule."""
    cases = {f"{case}.{key}" for case in ("down", "same", "up") for key in ("image", "pil_s3", "tensor_s3")}
    assert set(io) == cases | {"token_ids", "token_to_normalised", "cont", "cont_to_token"}


def test_constants_are_the_published_ones(golden_dir):
    stored = json.loads((golden_dir / "preprocess_openvla" / "config.json").read_text())["processor"]
    assert stored["means"] == [list(tower.mean) for tower in TOWERS]
    assert stored["stds"] == [list(tower.std) for tower in TOWERS]
    assert (stored["image_resize_strategy"], stored["interpolations"]) == ("resize-naive", ["bicubic"] * 2)
    assert stored["input_sizes"] == [[3, 224, 224]] * 2


@pytest.mark.parametrize("case", ["down", "same", "up"])
def test_pixel_values(io, case, max_delta):
    image = images.resize(io[f"{case}.image"][None], 224)  # [1, 224, 224, 3]
    assert image.dtype == torch.uint8
    pixels = image.permute(0, 3, 1, 2).float() / 255
    scaled = [(pixels - torch.tensor(t.mean).view(3, 1, 1)) / torch.tensor(t.std).view(3, 1, 1) for t in TOWERS]
    max_delta(f"{case}.tensor_s3", torch.cat(scaled, 1)[..., ::3, ::3], io[f"{case}.tensor_s3"], 1e-5)


def test_the_two_paths_differ_as_recorded(io):
    gaps = {c: float((io[f"{c}.pil_s3"] - io[f"{c}.tensor_s3"]).abs().max()) for c in ("down", "same", "up")}
    print(gaps)
    assert gaps["same"] == 0
    assert min(gaps["down"], gaps["up"]) > 0.05


def test_tokens(io, max_delta):
    tokens = action_bins.encode(io["cont"]) + BASE.action_begin
    max_delta("cont_to_token", tokens, io["cont_to_token"], 0)
    values = action_bins.decode(io["token_ids"] - BASE.action_begin)
    max_delta("token_to_normalised", values, io["token_to_normalised"], 1e-6)
