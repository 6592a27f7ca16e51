"""Datasets in LeRobot's layouts v2.1 and v3.0: images and videos, names of their own, and where they come from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.demos.dataset import DemoDataset
from rlinf.demos.features import map_features
from rlinf.demos.hub import find_dataset
from rlinf.errors import UserError
from tests.demos.lerobot_files import FPS, LENGTHS, SIZES, TASKS, Version, level, numbers, write_dataset, write_video

KINDS = [(version, video) for version in ("v2.1", "v3.0") for video in (False, True)]
TOP, WRIST = SIZES


@pytest.mark.parametrize(("version", "video"), KINDS)
def test_every_frame_has_its_own_picture_numbers_and_task(version: Version, video: bool, tmp_path: Path):
    data = DemoDataset(write_dataset(tmp_path / "own", version, video=video))
    count = sum(LENGTHS)
    assert (len(data), data.num_episodes, data.cameras, data.layout.fps) == (count, 3, [TOP, WRIST], FPS)
    assert (data.shape.action_dim, data.shape.state_dim, data.shape.num_cameras) == (3, 4, 2)
    rows = [16, 0, 7, 7, 12, *range(count)]  # in any order, across episodes and key frames
    _, obs, actions, is_target = data.batch(rows, num_actions=3)
    for camera, images in ((TOP, obs.images), (WRIST, obs.wrist_images[:, 0])):
        assert images.shape == (len(rows), *SIZES[camera], 3)
        assert images.dtype == torch.uint8
        told = images.float().mean((1, 2, 3)).numpy()
        assert np.abs(told - [level(camera, row) for row in rows]).max() < (4 if video else 1e-6)
    assert np.array_equal(obs.states.numpy(), numbers()["observation.state"][rows])
    assert np.array_equal(actions[:, 0].numpy(), numbers()["action"][rows])
    assert obs.task_descriptions == [TASKS[int(6 <= row < 10)] for row in rows]
    assert is_target[:5].tolist() == [[True, False, False], [True] * 3, [True] * 3, [True] * 3, [True] * 3]
    kept = data.observation(rows).images
    data.keep(torch.device("cpu"))
    assert torch.equal(data.observation(rows).images, kept)


def test_a_video_of_another_rate_is_read_by_time(tmp_path: Path):
    """Its file has three frames for each of the dataset's: those at the dataset's times are taken."""
    folder = write_dataset(tmp_path / "own", "v2.1", video=True)
    for episode, first in enumerate((0, 6, 10)):
        frames = [np.full((32, 48, 3), level(TOP, first + t), np.uint8) for t in range(LENGTHS[episode])]
        other = np.zeros((32, 48, 3), np.uint8)
        path = folder / f"videos/chunk-000/{TOP}/episode_{episode:06d}.mp4"
        write_video(path, [x for frame in frames for x in (frame, other, other)], fps=3 * FPS)
    told = DemoDataset(folder).observation(range(17)).images.float().mean((1, 2, 3)).numpy()
    assert np.abs(told - [level(TOP, row) for row in range(17)]).max() < 4


def test_cameras_beyond_those_a_policy_reads_are_left_out(tmp_path: Path):
    data = DemoDataset(write_dataset(tmp_path / "own", "v3.0", video=True))
    data.use_cameras(1)
    assert data.observation([3]).wrist_images is None


# ------------------------------------------------------------------ names
def test_a_map_of_names(tmp_path: Path):
    names = {"action": "target", "observation.state": "joints", TOP: "front", WRIST: "hand"}
    folder = write_dataset(tmp_path / "own", "v3.0", video=False, names=names)
    with pytest.raises(
        UserError, match=r"no feature that is usually 'action'; name one with sft.features=\{NAME: action"
    ):
        DemoDataset(folder)
    data = DemoDataset(folder, {"target": "action", "joints": "state", "hand": "main", "front": "wrist_0"})
    assert (data.cameras, data.shape.state_dim) == (["hand", "front"], 4)
    assert data.observation([5]).images[0, 0, 0].tolist() == [level(WRIST, 5)] * 3
    both = DemoDataset(folder, {"target": "action", "joints": "state", "timestamp": "state", "hand": "main"})
    assert (both.shape.state_dim, both.shape.num_cameras) == (5, 1)
    assert both.states[:, 4].tolist() == pytest.approx([t / FPS for n in LENGTHS for t in range(n)])
    assert both.features.text() == "main <- hand, state <- joints + timestamp, action <- target"


NUMBER, CAMERA = {"dtype": "float32", "shape": [3], "names": None}, {"dtype": "image", "shape": [4, 4, 3]}


@pytest.mark.parametrize(
    ("features", "given", "message"),
    [
        (
            {"action": NUMBER, "cam": CAMERA},
            {"kam": "main"},
            r"no feature 'kam' \(did you mean 'cam'\?\); it has: action",
        ),
        (
            {"action": NUMBER, "cam": CAMERA},
            {"cam": "mayn"},
            r"cam: 'mayn' is no input of a policy \(did you mean 'main'",
        ),
        ({"action": NUMBER, "cam": CAMERA}, {"cam": "state"}, r"cam is of kind image, which cannot be 'state'"),
        ({"action": NUMBER, "cam": CAMERA}, {"action": "main"}, r"action is of kind float32, which cannot be 'main'"),
        ({"action": NUMBER, "cam": CAMERA}, {"cam": "wrist_0"}, r"names cameras for wrist_0: main comes first"),
        ({"action": NUMBER, "a": CAMERA, "b": CAMERA}, {"a": "main", "b": "main"}, r"names two cameras for one input"),
        ({"action": NUMBER}, {}, r"no feature that is usually 'main'; name one"),
        ({"action": {**NUMBER, "shape": [2, 3]}, "cam": CAMERA}, {}, r"'action' has shape \[2, 3\]"),
        ({"action": NUMBER, "cam": {**CAMERA, "shape": [4, 4, 1]}}, {}, r"camera 'cam' has shape \[4, 4, 1\]"),
    ],
)
def test_maps_that_cannot_be(features: dict[str, Any], given: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        map_features(features, given)


# ------------------------------------------------------------------ the Hub
def test_a_hub_id_is_taken_from_a_cache_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("HF_LEROBOT_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "hf/hub/datasets--me--own"
    snapshot = write_dataset(repo / "snapshots/abc", "v3.0", video=False)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("abc")
    assert find_dataset("me/own", "sft.dataset") == snapshot
    ours = write_dataset(tmp_path / "hf/lerobot/me/own", "v2.1", video=False)
    assert find_dataset("me/own", "sft.dataset") == ours
    local = write_dataset(tmp_path / "me/own", "v2.1", video=False)
    assert find_dataset("me/own", "sft.dataset").resolve() == local
    for absent in ("data/no/such", "data/such", "me/such"):  # no ids: folders that are not there
        assert find_dataset(absent, "sft.dataset") == Path(absent)


@pytest.mark.parametrize("installed", [True, False])
def test_offline_one_line_says_where_to_get_it(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Hub:
        @staticmethod
        def snapshot_download(name: str, repo_type: str) -> str:
            raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub if installed else None)
    why = "cache: no route to host; on a machine" if installed else "huggingface_hub is not installed; on a machine"
    with pytest.raises(UserError) as error:
        find_dataset("lerobot/pusht", "sft.dataset")
    assert why in str(error.value)
    assert "hf download lerobot/pusht --repo-type dataset --local-dir data/pusht; then sft.dataset=data/pusht" in str(
        error.value
    )
    assert "\n" not in str(error.value)
