"""Two tasks in one run: what `rlinf plan` says of it, then training, evaluation and the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.journeys.terminal import types

TWO_TASKS = "quickstart 'env.train.task_suite_name=[reach-v3, push-v3]'"
SMALL = (
    "env.train.total_num_envs=4 env.train.max_episode_steps=10 env.train.max_steps_per_rollout_epoch=10 "
    "env.train.num_processes=1 env.eval.total_num_envs=4 env.eval.num_trials=4 env.eval.num_processes=1 "
    "env.eval.video_cfg.save_video=false actor.micro_batch_size=8 actor.global_batch_size=8 algorithm.update_epoch=1"
)


def test_the_plan_names_tasks_and_shares_and_a_slip_is_one_line(tmp_path: Path) -> None:
    plan = types(
        f"rlinf plan {TWO_TASKS} 'env.train.task_weights={{reach-v3: 3}}' runner.val_check_interval=10", tmp_path
    )
    assert plan.status == 0
    assert plan.lines[0] == "quickstart: openpi compact on reach-v3+push-v3"
    assert "  tasks                 2: reach-v3 (weight 3, 75%), push-v3 (weight 1, 25%)" in plan.lines
    assert any("128 trials = 2 tasks x 64" in line for line in plan.lines)
    slip = types("rlinf train quickstart 'env.train.task_suite_name=[reach-v3, push]'", tmp_path)
    assert slip.status == 2
    assert re.fullmatch(
        r"error: env\.train\.task_suite_name: .*'push' must be .*did you mean '.*push.*'\?\)", slip.lines[-1]
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_train_and_evaluate_two_tasks(tmp_path: Path) -> None:
    train = types(f"rlinf train {TWO_TASKS} {SMALL} runner.max_steps=2 runner.logger.log_path=run", tmp_path)
    assert train.status == 0, train.text
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert [row[f"env/task/{task}/num_trajectories"] for task in ("reach-v3", "push-v3")] == [2, 2]
    assert '"push-v3"' in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    checkpoint = next((tmp_path / "run").rglob("global_step_2"))
    evaluated = types(
        f"rlinf eval {TWO_TASKS} {SMALL} runner.ckpt_path={checkpoint} runner.logger.log_path=eval", tmp_path
    )
    assert evaluated.status == 0, evaluated.text
    for task in ("reach-v3", "push-v3"):
        assert re.search(rf"^ *{task} +\d/2 = ", evaluated.text, re.M), evaluated.text
