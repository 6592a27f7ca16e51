"""preprocess_openpi: resizing, statistics, ALOHA geometry and prompts."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from torch.nn import functional as F

from rlinf.models import images
from rlinf.models.openpi import transforms
from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.openpi.conventions import CONVENTIONS
from rlinf.models.openpi.prompts import PromptTokenizer
from rlinf.models.openpi.statistics import Statistics


@pytest.fixture(scope="module")
def io(golden_dir):
    return load_file(golden_dir / "preprocess_openpi" / "io.safetensors")


def test_every_stored_key_has_a_test(io):
    """But for `resize.*.torch_s3`: no policy here resizes float images."""
    prefixes = ("resize.", "norm.", "unnorm.", "stats.", "aloha.", "tok.", "metaworld.", "calvin.")
    assert [key for key in io if not key.startswith(prefixes)] == ["actions", "state"]


@pytest.mark.parametrize("camera", ["calvin_static", "calvin_wrist", "metaworld", "robotwin"])
def test_resize(io, camera, max_delta):
    image = io.get(f"resize.{camera}.image")
    if image is None:
        image = io[f"resize.{camera}.image_div8"].repeat_interleave(8, 0).repeat_interleave(8, 1)
    exact = images.resize_with_pad(image[None], 224)[0]
    max_delta(f"resize.{camera}.pil_s3", exact[::3, ::3], io[f"resize.{camera}.pil_s3"], 0)


@pytest.mark.parametrize("rule", ["meanstd", "quantile"])
def test_statistics(io, rule, max_delta):
    quantile = rule == "quantile"
    stats = {
        key: Statistics(**{f: io[f"stats.{key}.{f}"] for f in ("mean", "std", "q01", "q99")})
        for key in ("state", "actions")
    }
    for key in ("state", "actions"):
        normal = stats[key].normalize(io[key], quantile=quantile)
        padded = F.pad(normal, (0, 25))
        max_delta(f"norm.{rule}.{key}", normal, io[f"norm.{rule}.{key}"], 1e-6, relative=True)
        max_delta(f"norm.{rule}.{key}_padded", padded, io[f"norm.{rule}.{key}_padded"], 1e-6, relative=True)
    back = stats["state"].unnormalize(io[f"norm.{rule}.state_padded"], quantile=quantile)
    max_delta(f"unnorm.{rule}.state", back, io[f"unnorm.{rule}.state"], 1e-6, relative=True)
    actions = stats["actions"].unnormalize(io[f"unnorm.{rule}.in"], quantile=quantile)
    max_delta(f"unnorm.{rule}.actions", actions, io[f"unnorm.{rule}.actions"], 1e-6, relative=True)


def test_aloha(io, max_delta):
    row = CONVENTIONS["pi05_aloha_robotwin"]
    state = io["aloha.state"]
    max_delta("aloha.in.adaptFalse.state", state, io["aloha.in.adaptFalse.state"], 1e-6)
    max_delta("aloha.in.adaptTrue.state", transforms.aloha_state(state), io["aloha.in.adaptTrue.state"], 1e-6)
    absolute = transforms.shift_by_state(io["aloha.model_actions"][None], state[None], row.delta_mask, 1.0)[0]
    max_delta("aloha.absolute", absolute, io["aloha.absolute"], 1e-6)
    max_delta("aloha.out.adaptFalse", absolute[:, :14], io["aloha.out.adaptFalse"], 1e-6)
    adapted = transforms.aloha_actions(absolute[:, :14])
    max_delta("aloha.out.adaptTrue", adapted, io["aloha.out.adaptTrue"], 1e-6)
    max_delta("inverse of adaptTrue", transforms.aloha_actions_inverse(adapted), absolute[:, :14], 1e-6)
    relative = transforms.shift_by_state(absolute[None], state[None], row.delta_mask, -1.0)[0]
    max_delta("inverse of absolute", relative, io["aloha.model_actions"], 1e-6)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("metaworld", "pi0_metaworld"),
        ("calvin", "pi0_calvin"),
        ("aloha.in.adaptFalse", "pi0_aloha_robotwin"),
        ("aloha.in.adaptTrue", "pi05_aloha_robotwin"),
    ],
)
def test_camera_masks(io, key, name):
    cameras = Config(openpi=OpenPiOptions(config_name=name)).num_cameras
    assert io[f"{key}.masks"].tolist() == [i < cameras for i in range(3)]


def test_prompts(io, golden_dir):
    want = json.loads((golden_dir / "preprocess_openpi" / "prompts.json").read_text())
    calls: list[list] = []

    def encode(text: str, bos: bool) -> list[int]:
        calls.append([text, bos])
        return [2] * bos + [ord(c) % 251 + 3 for c in text]

    spoken = {"pi0": want["pi0_encode_calls"][0][0], "pi05": want["pi05_encode_calls"][0][0]}
    spoken["pi05"] = spoken["pi05"].removeprefix("Task: ").split(", State: ")[0]
    for key, states in (("pi0", None), ("pi05", io["tok.pi05.state"][None])):
        calls.clear()
        prompts = PromptTokenizer(encode, max_len=len(io[f"tok.{key}.tokens"]))([spoken[key]], states)
        assert calls == want[f"{key}_encode_calls"]
        assert prompts.ids[0].tolist() == io[f"tok.{key}.tokens"].tolist()
        assert prompts.valid[0].tolist() == io[f"tok.{key}.mask"].tolist()
