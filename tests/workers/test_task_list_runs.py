"""A training run on a list of tasks: what is played, logged and shown of each task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlinf.training.sft
from rlinf.config.schema import Config
from rlinf.envs.spec import env_spec
from tests.runs import make_runner, toy_config

TWO_TASKS = [
    "env.train.task_suite_name=[toy_blue,toy_red]",
    "env.eval.task_suite_name=[toy_red,toy_blue]",
    "env.train.total_num_envs=8",
    "env.train.rollout_epoch=2",
    "env.train.num_processes=1",
    "env.eval.num_processes=1",
    "env.eval.num_trials=8",
    "actor.micro_batch_size=32",
    "actor.global_batch_size=32",
    "runner.max_steps=2",
    "runner.val_check_interval=2",
]


def test_tasks_are_played_in_their_shares_and_told_apart(tmp_path: Path) -> None:
    runner = make_runner(toy_config(tmp_path, *TWO_TASKS, "env.train.task_weights={reach-red: 3}"))
    try:
        runner.train()
    finally:
        runner.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert [row[f"env/task/reach-{c}/num_trajectories"] for c in ("red", "blue")] == [12, 4]
    told = ("success_once", "success_at_end", "return", "episode_len", "num_trajectories")
    for task in ("reach-red", "reach-blue"):
        assert all(f"eval/task/{task}/{name}" in rows[-1] for name in told)
        assert rows[-1][f"eval/task/{task}/num_trajectories"] == 4
    played = json.loads((tmp_path / "eval/step_2/result.json").read_text())
    assert {task: rate["trials"] for task, rate in played["tasks"].items()} == {"reach-red": 4, "reach-blue": 4}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(f'"{task}"' in page for task in ("reach-red", "reach-blue"))


@pytest.mark.slow
def test_a_resumed_run_plays_and_learns_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    settings = [*TWO_TASKS, "runner.val_check_interval=-1", "runner.save_interval=1", "env.train.auto_reset=true"]

    def train(folder: Path, steps: int) -> list[dict[str, float]]:
        runner = make_runner(toy_config(folder, *settings, f"runner.max_steps={steps}", "runner.resume_dir=auto"))
        try:
            runner.train()
        finally:
            runner.close()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        own = ("time/", "system/", "sync/", "run")  # of a run, not of what it learns
        return [{name: value for name, value in row.items() if not name.startswith(own)} for row in rows]

    straight = train(tmp_path / "straight", 2)
    train(tmp_path / "stopped", 1)
    assert train(tmp_path / "stopped", 2) == straight
    assert any(name.startswith("env/task/reach-red/") for name in straight[-1])


def test_imitation_is_tried_on_the_tasks_of_the_training_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = toy_config(tmp_path, *TWO_TASKS, "env.eval.task_suite_name=toy_red", "sft.eval_interval=1")
    cfg = replace(cfg, sft=replace(cfg.sft, eval_trials=6))
    tried: list[tuple[Config, list[int]]] = []

    @contextmanager
    def probe(cfg: Config, ids: list[int]) -> Iterator[Any]:
        tried.append((cfg, ids))
        yield None

    monkeypatch.setattr(rlinf.training.sft, "Probe", probe)
    with rlinf.training.sft._evaluator(cfg, None):
        ((given, ids),) = tried
    assert env_spec(given.env.eval).tasks == ("reach-blue", "reach-red")
    assert [i // 1_000_000 for i in ids] == [1, 0] * 3  # every task in turn
