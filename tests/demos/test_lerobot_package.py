"""Datasets written by the lerobot package become policies, and it opens those that rlinf writes.

Runs where RLINF_LEROBOT_V3 and RLINF_LEROBOT_V21 name the Pythons of two environments with lerobot, one that writes
layout v3.0 (0.4) and one that writes v2.1 (0.3.3).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rlinf
from rlinf.demos.dataset import DemoDataset
from tests.conftest import REPO
from tests.journeys.terminal import types

pytestmark = pytest.mark.slow
PYTHONS = {"v3.0": "RLINF_LEROBOT_V3", "v2.1": "RLINF_LEROBOT_V21"}


def lerobot(version: str, *arguments: str) -> str:
    """Run the tool in the environment whose lerobot has that layout; returns what it printed."""
    python = os.environ.get(PYTHONS[version])
    if python is None:
        pytest.skip(f"{PYTHONS[version]} names no Python with lerobot")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    tool = str(REPO / "tools/lerobot_dataset.py")
    done = subprocess.run([python, tool, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("kind", ["video", "image"])
def test_its_datasets_become_policies(version: str, kind: str, tmp_path: Path):
    wrote = lerobot(version, "write", str(tmp_path / "own"), "--kind", kind)
    assert f"lerobot wrote 5 episodes, 110 frames, layout {version}" in wrote
    lerobot(version, "read", str(tmp_path / "own"), "--json", str(tmp_path / "frames.json"))
    frames, data = json.loads((tmp_path / "frames.json").read_text()), DemoDataset(tmp_path / "own")
    _, obs, actions, _ = data.batch(range(len(data)), 1)
    assert obs.task_descriptions == [frame["task"] for frame in frames]
    assert np.allclose(obs.states.numpy(), [frame["observation.state"] for frame in frames])
    assert np.allclose(actions[:, 0].numpy(), [frame["action"] for frame in frames])
    for images, name in zip((obs.images, obs.wrist_images[:, 0]), data.cameras, strict=True):
        theirs = np.array([frame["pixels"][name] for frame in frames])
        assert np.abs(images.float().mean((1, 2, 3)).numpy() - theirs).max() < 2.0  # decoders round colours differently
    few = "sft.steps=5 sft.batch_size=8 'runner.logger.logger_backends=[]'"
    answer = types(f"rlinf sft own_data_sft sft.dataset=own sft.output=policy {few}", tmp_path)
    assert answer.status == 0, answer.text
    assert "policy      policy" in answer.lines
    spec = rlinf.load_policy(tmp_path / "policy").spec
    assert (spec.action_dim, spec.state_dim, spec.num_images) == (6, 6, 2)


def test_it_opens_demonstrations_and_rollouts(tmp_path: Path):
    train = "rlinf train toy_ppo_compact runner.max_steps=1 runner.save_interval=1 runner.logger.log_path=run"
    checkpoint = "run/toy_ppo_compact/checkpoints/global_step_1"
    commands = [
        "rlinf collect toy_ppo_compact collect.output=demos collect.episodes_per_task=2",
        f"{train} && rlinf export {checkpoint} played --rollouts toy_ppo_compact --episodes 4",
    ]
    for command, folder in zip(commands, ("demos", "played"), strict=True):
        answer = types(command, tmp_path)
        assert answer.status == 0, answer.text
        assert f"dataset     {folder}" in answer.lines
        printed = lerobot("v3.0", "read", str(tmp_path / folder), "--json", str(tmp_path / "frames.json"))
        assert "lerobot opened 4 episodes" in printed
        assert "fps 10\nrobot toy, cameras observation.images.main, tasks" in printed
        assert "action names ['x', 'y']" in printed
        frames, data = json.loads((tmp_path / "frames.json").read_text()), DemoDataset(tmp_path / folder)
        _, obs, actions, _ = data.batch(range(len(data)), 1)
        assert np.allclose(actions[:, 0].numpy(), [frame["action"] for frame in frames])
        assert obs.task_descriptions == [frame["task"] for frame in frames]
        theirs = np.array([frame["pixels"]["observation.images.main"] for frame in frames])
        assert np.abs(obs.images.float().mean((1, 2, 3)).numpy() - theirs).max() < 1e-2
