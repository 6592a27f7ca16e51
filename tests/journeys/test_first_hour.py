"""The first hour: train the toy, evaluate it, open the report, take the policy along; each command names the next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.journeys.terminal import row, types, types_in_terminal

SMALL = "env.train.total_num_envs=8 env.train.rollout_epoch=1 actor.micro_batch_size=32 actor.global_batch_size=32"
FEW = "env.train.num_processes=1 env.eval.num_trials=4 env.eval.total_num_envs=4 env.eval.num_processes=1"
TRAIN = f"rlinf train toy_ppo_compact runner.max_steps=2 {SMALL} {FEW}"


@pytest.mark.slow
def test_train_then_what_each_command_says_comes_next(tmp_path: Path) -> None:
    trained = types(TRAIN + " runner.logger.log_path=logs/try", tmp_path)
    assert trained.status == 0, trained.text
    assert re.match(r"success .{5} %  step 2/2  ETA 0:00:00 ", trained.lines[-7])
    assert row(trained, "checkpoint") == "logs/try/toy_ppo_compact/checkpoints/global_step_2"
    assert (tmp_path / row(trained, "report")).is_file()
    assert float(row(trained, "seconds")) > 0
    assert "step 1" in row(trained, "training")

    evaluated = types(row(trained, "next"), tmp_path)
    assert evaluated.status == 0, evaluated.text
    assert re.fullmatch(r"\d/4 = .* % \[.*\], evaluation at step 2", row(evaluated, "success"))
    assert (tmp_path / row(evaluated, "report")).is_file()

    exported = types(row(evaluated, "next"), tmp_path)
    assert exported.status == 0, exported.text
    assert (tmp_path / row(exported, "policy") / "config.json").is_file()

    again = types(row(exported, "next"), tmp_path)
    assert again.status == 0, again.text
    assert row(again, "success").startswith(row(evaluated, "success").partition(",")[0])

    report = types("rlinf report logs/try", tmp_path)
    assert (report.status, report.lines) == (0, ["report: logs/try/report.html"])


@pytest.mark.slow
def test_demonstrations_then_what_each_command_says_comes_next(tmp_path: Path) -> None:
    expert = types(f"rlinf eval toy_ppo_compact runner.eval_expert=true {FEW}", tmp_path)
    assert row(expert, "success").startswith("4/4 = 100.0 %")
    collected = types(f"{row(expert, 'next')} collect.episodes_per_task=2", tmp_path)
    assert collected.status == 0, collected.text
    imitated = types(f"{row(collected, 'next')} sft.steps=2 sft.batch_size=4", tmp_path)
    assert imitated.status == 0, imitated.text
    trained = types(f"{row(imitated, 'next')} runner.max_steps=1 {SMALL}", tmp_path)
    assert trained.status == 0, trained.text
    assert row(trained, "checkpoint").endswith("global_step_1")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 160])
def test_a_terminal_shows_lines_that_fit_and_no_bar_in_the_end(tmp_path: Path, columns: int) -> None:
    answer = types_in_terminal(f"{TRAIN} --verbose", tmp_path, columns)
    assert answer.status == 0, answer.text
    steps = [line for line in answer.lines if re.match(r"success .{5} %  step \d/2  ETA \d:\d\d:\d\d ", line)]
    assert len(steps) == 2
    assert all(columns - 30 < len(line) <= columns for line in steps)
    boxes = [line for line in answer.lines if line.startswith(("╭", "│", "╰"))]
    assert {len(line) for line in boxes} == {columns}
    assert not any("━" in line for line in answer.lines)


def test_a_policy_of_nothing_is_evaluated_only_when_asked_for(tmp_path: Path) -> None:
    refused = types("rlinf eval toy_ppo_compact", tmp_path)
    assert (refused.status, len(refused.lines)) == (2, 1)
    assert "runner.ckpt_path=" in refused.lines[0]
    assert "--random" in refused.lines[0]
    assert not (tmp_path / "logs").exists()


def test_more_steps_than_epochs_are_refused_with_two_ways_out(tmp_path: Path) -> None:
    refused = types("rlinf train toy_ppo_compact runner.max_steps=50", tmp_path)
    assert (refused.status, refused.lines) == (
        2,
        [
            "error: runner.max_steps=50 is above runner.max_epochs=40, where training would end: set "
            "runner.max_epochs=50 to train that long, or runner.max_steps=-1 to train 40 steps"
        ],
    )
