"""preprocess_openvla: both image paths of the published processors, and actions as tokens."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rlinf.models import images
from rlinf.models.prismatic import actions, constants


@pytest.fixture(scope="module")
def io(golden_dir):
    return load_file(golden_dir / "preprocess_openvla" / "io.safetensors")


def test_every_stored_key_has_a_test(io):
    cases = {f"{case}.{key}" for case in ("down", "same", "up") for key in ("image", "pil_s3", "tensor_s3")}
    assert set(io) == cases | {"token_ids", "token_to_normalised", "cont", "cont_to_token"}


def test_constants_are_the_published_ones(golden_dir):
    stored = json.loads((golden_dir / "preprocess_openvla" / "config.json").read_text())["processor"]
    assert stored["means"] == [list(constants.DINO_MEAN), list(constants.SIGLIP_MEAN)]
    assert stored["stds"] == [list(constants.DINO_STD), list(constants.SIGLIP_STD)]
    assert (stored["image_resize_strategy"], stored["interpolations"]) == ("resize-naive", ["bicubic"] * 2)
    assert stored["input_sizes"] == [[3, 224, 224]] * 2


@pytest.mark.parametrize("method", ["pil", "tensor"])
@pytest.mark.parametrize("case", ["down", "same", "up"])
def test_pixel_values(io, case, method, max_delta):
    image = images.resize(io[f"{case}.image"][None], 224, method=method)  # [1, 224, 224, 3]
    assert image.dtype == torch.uint8
    pixels = image.permute(0, 3, 1, 2).float() / 255
    towers = ((constants.DINO_MEAN, constants.DINO_STD), (constants.SIGLIP_MEAN, constants.SIGLIP_STD))
    got = torch.cat([(pixels - torch.tensor(m).view(3, 1, 1)) / torch.tensor(s).view(3, 1, 1) for m, s in towers], 1)
    max_delta(f"{case}.{method}_s3", got[..., ::3, ::3], io[f"{case}.{method}_s3"], 1e-5)


def test_the_two_paths_differ_as_recorded(io):
    gaps = {c: float((io[f"{c}.pil_s3"] - io[f"{c}.tensor_s3"]).abs().max()) for c in ("down", "same", "up")}
    print(gaps)
    assert gaps["same"] == 0
    assert min(gaps["down"], gaps["up"]) > 0.05


def test_tokens(io, max_delta):
    tokens = actions.to_tokens(actions.encode(io["cont"]), constants.ACTION_END)
    max_delta("cont_to_token", tokens, io["cont_to_token"], 0)
    values = actions.decode(actions.to_bins(io["token_ids"], constants.ACTION_END))
    max_delta("token_to_normalised", values, io["token_to_normalised"], 1e-6)
