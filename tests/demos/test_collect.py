"""Demonstrations in the toy world and, once, in MetaWorld."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlinf.config.schema import ActorConfig, CollectConfig, Config, EnvGroupConfig, RunnerConfig
from rlinf.demos.collect import collect_demos
from rlinf.demos.dataset import DemoDataset
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.simulators import toy


def config(folder: Path, *, env: dict[str, Any] | None = None, seed: int = 0, **collect: Any) -> Config:
    train = EnvConfig(**{"env_type": "toy", "max_episode_steps": 20, "num_processes": 2, **(env or {})})
    return Config(
        runner=RunnerConfig(seed=seed),
        env=EnvGroupConfig(train=train),
        actor=ActorConfig(model=ModelConfig(model_type="none")),
        collect=CollectConfig(**{"output": str(folder / "demos"), "episodes_per_task": 3, **collect}),
    )


def rows(folder: Path) -> dict[str, list[Any]]:
    return pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pydict()


def test_collects_every_task_from_demonstration_ids_only(tmp_path: Path) -> None:
    cfg, lines = config(tmp_path), []
    folder = collect_demos(cfg, on_progress=lines.append)
    table, spec = rows(folder), env_spec(cfg.env.train)
    assert sorted(table["task_name"]) == ["reach-blue"] * 3 + ["reach-red"] * 3
    assert all(i in spec.reset_ids["demo"] for i in table["reset_id"])
    assert not any(i in spec.reset_ids["eval"] or i in spec.reset_ids["train"] for i in table["reset_id"])
    assert len(set(table["reset_id"])) == 6
    assert all(0 <= std <= 0.3 for std in table["noise_std"])
    assert len(set(table["noise_std"])) == 6
    data = DemoDataset(folder)
    assert sorted(data.tasks) == ["reach the blue dot", "reach the red dot"]
    assert lines[-1].startswith("6 successful episodes of 2 tasks")
    assert json.loads((folder / "meta/collect.json").read_text())["failed_tasks"] == []


def test_collects_every_task_of_a_list(tmp_path: Path) -> None:
    names = ["toy_blue", "toy_red"]
    folder = collect_demos(config(tmp_path, env={"task_suite_name": names}, episodes_per_task=2), on_progress=str)
    assert sorted(rows(folder)["task_name"]) == ["reach-blue"] * 2 + ["reach-red"] * 2
    assert json.loads((folder / "meta/collect.json").read_text())["options"]["task_suite_name"] == names


def test_same_seed_same_dataset_whatever_the_processes(tmp_path: Path) -> None:
    frames = []
    for name, seed, processes in (("a", 0, 1), ("b", 0, 3), ("c", 1, 2)):
        folder = collect_demos(config(tmp_path / name, seed=seed, env={"num_processes": processes}, action_noise=0.9))
        data = DemoDataset(folder)
        frames.append(
            (data.observation(range(len(data))).images.numpy(), data.actions.numpy(), rows(folder)["reset_id"])
        )
    assert np.array_equal(frames[0][0], frames[1][0])
    assert np.array_equal(frames[0][1], frames[1][1])
    assert frames[0][2] == frames[1][2] != frames[2][2]


def test_labels_are_clean_and_clipped(tmp_path: Path) -> None:
    """The toy expert walks straight: after noisy steps its labels still point at the target from where the agent is."""
    data = DemoDataset(collect_demos(config(tmp_path, action_noise=0.5, tasks=["reach-red"])))
    assert float(data.actions.abs().max()) <= 1.0
    assert data.states is not None
    moves = (data.states[1:] - data.states[:-1]) / 0.2
    same = data.last_frame[1:] == data.last_frame[:-1]  # consecutive frames of one episode
    assert float((moves - data.actions[:-1])[same].abs().max()) > 0.05  # what was executed was noisy


def test_every_frame_holds_what_the_simulator_knew(tmp_path: Path) -> None:
    """Without noise the labels are what was executed, so a second world can be walked through the same frames."""
    cfg = config(tmp_path, action_noise=0.0)
    folder = collect_demos(cfg, on_progress=lambda line: None)
    data, table, spec = DemoDataset(folder), rows(folder), env_spec(cfg.env.train)
    assert data.privileged is not None
    assert data.privileged.shape == (len(data), spec.critic_state_dim)
    known, world = [], toy.Scene(toy.Options())
    for reset_id, first, end in zip(
        table["reset_id"], table["dataset_from_index"], table["dataset_to_index"], strict=True
    ):
        world.reset(reset_id)
        for action in data.actions[first:end].numpy():
            known.append(world.observe()["critic_state"])
            world.step_chunk(action[None], stop_on_success=True, record=False)
    assert np.array_equal(data.privileged.numpy(), np.stack(known))


def test_failures_are_dropped_and_replaced(tmp_path: Path) -> None:
    cfg = config(tmp_path, action_noise=1.5, max_steps=5, episodes_per_task=4, max_attempts=20)
    folder = collect_demos(cfg, on_progress=lambda line: None)
    record = json.loads((folder / "meta/collect.json").read_text())
    assert record["tasks"]["reach-red"]["episodes"] == 4
    assert record["tasks"]["reach-red"]["attempts"] > 4
    assert max(rows(folder)["length"]) <= 5


def test_no_id_is_played_twice_when_they_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf.demos.collect.ids_of_task", lambda spec, mode, task: spec.reset_ids["demo"][:3])
    lines: list[str] = []
    folder = collect_demos(config(tmp_path, tasks=["reach-red"], episodes_per_task=4), on_progress=lines.append)
    assert len(set(rows(folder)["reset_id"])) == 3
    assert "reach-red: only 3 of 4 episodes succeeded" in lines


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demos").mkdir()
    (tmp_path / "demos/notes.txt").touch()
    with pytest.raises(UserError, match=r"collect\.output=.*demos is not empty and holds no dataset to replace"):
        collect_demos(config(tmp_path))


def test_a_task_that_never_succeeds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no demonstration succeeded within 1 steps; raise collect\.max_steps"):
        collect_demos(config(tmp_path, max_steps=1, max_attempts=1), on_progress=lambda line: None)
    assert list(tmp_path.iterdir()) == []  # nothing is left of a dataset that failed
    with pytest.raises(UserError, match=r"task 'reach-rad' is not in suite .*did you mean 'reach-red'"):
        collect_demos(config(tmp_path, tasks=["reach-rad"]))


def test_metaworld(tmp_path: Path) -> None:
    env = {
        "env_type": "metaworld",
        "task_suite_name": "handle-press-side-v3",
        "max_episode_steps": 80,
        "init_params": {"image_size": 64, "render": "fast"},
    }
    cfg = config(tmp_path, env=env, episodes_per_task=2)
    data = DemoDataset(collect_demos(cfg, on_progress=lambda line: None))
    obs = data.observation([0, len(data) - 1])
    assert data.num_episodes == 2
    assert obs.images.shape == (2, 64, 64, 3)
    assert data.states is not None
    assert data.states.shape == (len(data), 4)
    assert 20 <= len(data) <= 160
    assert obs.images.float().std() > 10  # a picture, not a blank
    again = DemoDataset(
        collect_demos(
            replace(cfg, collect=replace(cfg.collect, output=str(tmp_path / "again"))), on_progress=lambda line: None
        )
    )
    assert np.array_equal(again.observation(range(len(again))).images, data.observation(range(len(data))).images)
