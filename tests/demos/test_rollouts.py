"""Rollouts as a dataset: what it holds is what was played, step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.data.noise import Noise
from rlinf.data.types import Observation, PolicyOutput
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.rollouts import record_rollouts
from rlinf.envs.spec import env_options, env_spec
from rlinf.errors import UserError
from rlinf.models.config import PolicySpec
from rlinf.models.policy import Policy
from rlinf.simulators import toy

CHUNK = 3


class Wanderer(Policy):
    """Moves right, and a little at random: some episodes succeed."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        self.bias = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
        self.calls: list[list[str]] = []

    def predict(self, obs: Observation, *, mode: str, noise: Noise) -> PolicyOutput:
        self.calls.append(obs.task_descriptions)
        actions = self.bias + 0.3 * noise.normal((CHUNK, 2))
        return PolicyOutput(actions, torch.zeros_like(actions), None, {})


def config(*overrides: str) -> Config:
    own = ["env.eval.max_episode_steps=12", "env.eval.max_steps_per_rollout_epoch=12", "env.eval.total_num_envs=4"]
    own += [f"actor.model.num_action_chunks={CHUNK}", "env.eval.num_processes=1", "env.eval.init_params.spread=50"]
    return load_config("toy_ppo_compact", [*own, "runner.eval_random=true", *overrides], purpose="eval", devices=[0])


def played(folder: Path) -> dict[str, list[Any]]:
    return pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pydict()


def test_every_step_of_successes_and_failures(tmp_path: Path):
    cfg = config()
    policy, lines = Wanderer(cfg.actor.model.spec()), []
    success = record_rollouts(cfg, policy, tmp_path / "all", episodes=10, on_progress=lines.append)
    data, table, spec = DemoDataset(tmp_path / "all"), played(tmp_path / "all"), env_spec(cfg.env.eval)
    assert 0 < success.successes < success.trials == 10 == data.num_episodes
    assert sum(table["success"]) == success.successes
    assert lines[-1] == f"rollouts 10/10  success {success}"
    assert all(reset_id in spec.reset_ids["train"] for reset_id in table["reset_id"])
    assert len(set(table["reset_id"])) == 10

    obs, first = data.observation(range(len(data))), 0
    for reset_id, length, solved in zip(table["reset_id"], table["length"], table["success"], strict=True):
        scene = toy.Scene(env_options(cfg.env.eval, "env.eval"))
        scene.reset(reset_id)
        ended = False
        for row in range(first, first + length):
            assert not ended
            assert np.array_equal(obs.images[row].numpy(), np.asarray(scene.observe()["images"]))
            assert obs.task_descriptions[row] == scene.observe()["task_description"]
            _, ended, _ = scene.step(data.actions[row].numpy())
        assert (ended, ended or length == 12) == (solved, True)
        first += length
    assert first == len(data)

    info = json.loads((tmp_path / "all/meta/info.json").read_text())
    assert (info["robot_type"], info["fps"], info["total_episodes"]) == ("toy", 10, 10)
    assert info["features"]["action"] == {"dtype": "float32", "shape": [2], "names": ["x", "y"]}
    assert info["features"]["observation.images.main"]["shape"] == [32, 32, 3]
    about = json.loads((tmp_path / "all/meta/rollouts.json").read_text())
    assert (about["simulator"], about["horizon"], about["episodes_played"]) == ("toy", 12, 10)

    record_rollouts(cfg, policy, tmp_path / "again", episodes=10, on_progress=lambda line: None)
    assert torch.equal(DemoDataset(tmp_path / "again").actions, data.actions)


def test_successes_only(tmp_path: Path):
    cfg = config()
    policy = Wanderer(cfg.actor.model.spec())
    success = record_rollouts(
        cfg, policy, tmp_path / "good", episodes=10, successes_only=True, on_progress=lambda line: None
    )
    assert played(tmp_path / "good")["success"] == [True] * success.successes
    with torch.no_grad():
        policy.bias.copy_(torch.tensor([0.0, 0.0]))
    few = replace(cfg, env=replace(cfg.env, eval=replace(cfg.env.eval, max_episode_steps=1)))
    with pytest.raises(UserError, match="none of 2 episodes succeeded"):
        record_rollouts(few, policy, tmp_path / "none", episodes=2, successes_only=True, on_progress=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]


def test_an_episode_whose_simulator_died_is_played_again(tmp_path: Path):
    cfg = config("env.eval.init_params.fault=crash", f"env.eval.init_params.fault_file={tmp_path}/fault")
    success = record_rollouts(
        cfg, Wanderer(cfg.actor.model.spec()), tmp_path / "all", episodes=6, on_progress=lambda line: None
    )
    assert (tmp_path / "fault.0").exists()
    assert success.trials == 6 == DemoDataset(tmp_path / "all").num_episodes
    assert len(set(played(tmp_path / "all")["reset_id"])) == 6
