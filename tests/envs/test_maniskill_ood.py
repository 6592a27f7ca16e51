"""The out-of-distribution evaluation in one command: every row played, classes and averages added up rightly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlinf.commands import jobs
from rlinf.config.load import load_config
from rlinf.data.types import EpisodeRecord
from rlinf.demos.collect import collect_demos
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import eval_trials
from rlinf.metrics.episode_summary import group_rates, summarise, task_rates
from rlinf.metrics.stats import Rate
from rlinf.simulators.maniskill import Options, spec
from rlinf.simulators.maniskill.reset_ids import OOD, STRIDE
from rlinf.simulators.maniskill.tasks import PREFIX, VARIANTS

ROWS = 16
TINY = ["env.eval.num_processes=1", "env.eval.total_num_envs=1", "env.eval.init_params.image_size=32"]


def record(task: str, success: bool) -> EpisodeRecord:
    return EpisodeRecord(OOD, task, 0, 0, 0, 1, float(success), success, success)


def test_averages_are_those_of_the_published_table() -> None:
    """A published line, 256 trials a row: 94.14 % IND, 84.69 vision, 45.54 semantic, 44.66 execution, 60.64 average."""
    shape, won = spec(Options(id=OOD)), {"IND": 241, "Vision": 1084, "Semantic": 816, "Execution": 343}
    records = []
    for group, successes in won.items():
        trials = [task for task in shape.task_groups[group] for _ in range(256)]
        records += [record(task, n < successes) for n, task in enumerate(trials)]
    rates = group_rates(records, shape.task_groups)
    assert {name: round(100 * rate.rate, 2) for name, rate in rates.items()} == {
        "IND": 94.14,
        "Vision": 84.69,
        "Semantic": 45.54,
        "Execution": 44.66,
        "OOD": 58.41,
        "Average": 60.64,
    }
    metrics = summarise(records, shape.task_groups)
    assert metrics["group/Semantic/success_once"] == 816 / 1792
    assert "group_average" not in metrics  # groups that share tasks have no mean of their own
    assert list(task_rates(records, shape.task_groups)) == list(shape.tasks)


def test_tasks_outside_of_groups_come_last_and_one_alone_not_at_all() -> None:
    records = [record(task, task == "b") for task in "cba"]
    assert list(task_rates(records, {"first": ["c"]})) == ["c", "a", "b"]
    assert task_rates(records, {})["b"] == Rate(1, 1)
    assert task_rates(records[:1], {}) == {}


def test_num_trials_is_shared_evenly_by_the_rows() -> None:
    shape = spec(Options(id=OOD))
    for wanted in (ROWS, 4 * ROWS, 64 * ROWS):
        trials = eval_trials(EnvConfig(env_type="maniskill", num_trials=wanted), shape)
        assert np.bincount([i // STRIDE for i in trials]).tolist() == [wanted // ROWS] * ROWS
        assert len(set(trials)) == wanted
    assert max(shape.reset_ids["eval"]) < 2**63
    assert max(v.total for sets in VARIANTS.values() for v in sets.values()) < STRIDE


def test_the_first_row_is_the_training_set_of_main() -> None:
    shape = spec(Options(id=OOD))
    assert VARIANTS[PREFIX + "Carrot-v1"]["train"] == VARIANTS[PREFIX + "Main-v3"]["train"]
    assert set(shape.reset_ids["eval"][:64]) <= set(spec(Options()).reset_ids["eval"])


@pytest.mark.usefixtures("maniskill_path")
def test_one_command_fills_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*TINY, f"runner.logger.log_path={tmp_path}", "runner.eval_expert=true", f"env.eval.num_trials={ROWS}"]
    metrics, _ = jobs.evaluate(load_config("maniskill_ood", overrides, purpose="eval", devices=[0]))
    written = json.loads((tmp_path / "eval/step_0/result.json").read_text())
    shape, printed = spec(Options(id=OOD)), capsys.readouterr().out
    assert list(written["tasks"]) == list(shape.tasks)
    assert {task: rate["trials"] for task, rate in written["tasks"].items()} == dict.fromkeys(shape.tasks, 1)
    assert [written["groups"][name]["trials"] for name in shape.task_groups] == [1, 5, 7, 3, 15, ROWS]
    assert sum(rate["successes"] for rate in written["tasks"].values()) >= ROWS - 1
    for episode in written["episodes"]:
        assert not episode["success_once"] or episode["return"] == np.float32(1.2)
    lines = {line.split()[0]: line for line in printed.splitlines() if line.startswith("  ")}
    assert lines.keys() == {*shape.tasks, *shape.task_groups}
    average = Rate(written["success"]["successes"], ROWS)
    assert lines["Average"].split(maxsplit=1)[1] == str(average)
    assert metrics["eval/group/Average/success_once"] == average.rate


@pytest.mark.usefixtures("maniskill_path")
def test_a_demonstration_is_collected(tmp_path: Path) -> None:
    overrides = ["collect.episodes_per_task=1", f"collect.output={tmp_path / 'demos'}", "collect.action_noise=0.005"]
    overrides += ["env.train.num_processes=1", "env.train.init_params.image_size=32"]
    folder = collect_demos(load_config("maniskill_ppo_compact", overrides, purpose="collect", devices=[0]))
    kept = json.loads((folder / "meta/collect.json").read_text())["tasks"]
    assert kept == {PREFIX + "Single-v1": {"episodes": 1, "attempts": 1}}
    assert json.loads((folder / "meta/info.json").read_text())["total_frames"] < 60
