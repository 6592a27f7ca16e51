"""Runs that only evaluate log to every backend, and leave alone what a training run wrote into the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf.commands import jobs
from rlinf.config.load import load_config
from rlinf.metrics.loggers import read_jsonl
from tests.runs import toy_config

FEW = ["env.eval.num_trials=4", "env.eval.total_num_envs=4", "env.eval.num_processes=1"]


@pytest.mark.parametrize("expert", [False, True])
def test_an_evaluation_logs_to_every_backend(tmp_path: Path, expert: bool) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own = [f"runner.logger.log_path={tmp_path}", "runner.logger.logger_backends=[tensorboard, wandb]"]
    own += [f"runner.eval_{'expert' if expert else 'random'}=true"]
    metrics, records = jobs.evaluate(load_config("toy_ppo_compact", [*own, *FEW], purpose="eval"))
    assert len(records) == 4
    (line,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert line.pop("step") == 0
    assert line.pop("run") == json.loads((tmp_path / "run.json").read_text())["id"]
    assert line == {**metrics, "eval/num_trajectories": 4.0}
    assert {"eval/success_once", "eval/success_low", "eval/success_high", "eval/return"} <= set(line)
    assert expert or {"time/eval", "time/env/evaluate", "time/rollout/evaluate"} <= set(line)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(line)
    assert [(e.step, e.value) for e in events.Scalars("eval/num_trajectories")] == [(0, 4.0)]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert (tmp_path / "config.yaml").exists()


CUT = '{"step": 4, "env/ret'


def test_an_evaluation_in_the_folder_of_a_run_adds_a_line(tmp_path: Path) -> None:
    """A later evaluation of an earlier checkpoint; the training run can still be resumed with its curves whole."""
    cfg = toy_config(
        tmp_path, *FEW, "runner.max_epochs=3", "runner.save_interval=1", "runner.logger.project_name=first"
    )
    runner, _ = jobs.train(cfg)
    trained, config = (tmp_path / "metrics.jsonl").read_text(), (tmp_path / "config.yaml").read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(CUT)  # killed while writing
    own = [f"runner.logger.log_path={tmp_path}", "runner.logger.logger_backends=[]"]
    for step in (2, 1):
        checkpoint = f"runner.ckpt_path={runner.folder}/checkpoints/global_step_{step}"
        jobs.evaluate(load_config("toy_ppo_compact", [*own, *FEW, checkpoint], purpose="eval"))
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert lines.startswith(trained)
    whole = [line for line in lines.splitlines() if line != CUT]  # it stays: a running log may be about to end it
    assert [json.loads(line)["step"] for line in whole] == [1, 2, 3, 2, 1]
    assert (tmp_path / "config.yaml").read_text() == config
    assert "3 training steps" in (tmp_path / "report.html").read_text()
