"""Runs that are stopped and continued, and folders that hold another run: what a person types and reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.journeys.terminal import types

TOY = (
    "toy_ppo_compact env.train.total_num_envs=4 env.train.rollout_epoch=1 env.train.num_processes=2 "
    "algorithm.update_epoch=20 actor.micro_batch_size=16 actor.global_batch_size=16 env.train.auto_reset=true "
    "env.train.max_episode_steps=12"
)
# Waits for the first step of the run in the background, whose number `run` holds.
UNTIL_A_STEP = 'while [ ! -s "$(echo logs/*/metrics.jsonl)" ]; do kill -0 $run || exit 1; sleep 0.05; done'


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [
        ("kill -INT $run", 130, "SIGINT: finishing and saving this step; Ctrl-C again leaves at once"),
        ("kill -TERM $run $(pgrep -P $run)", 143, "SIGTERM: finishing and saving this step"),
    ],
)
def test_stop_and_continue(stop: str, status: int, said: str, tmp_path: Path) -> None:
    background = f"set -m\nrlinf train {TOY} runner.max_epochs=500 & shell=$!\n"  # -m: else bash lets it ignore Ctrl-C
    child = "while ! run=$(pgrep -P $shell); do sleep 0.05; done; run=${run%%$'\\n'*}\n"
    first = types(f"{background}{child}{UNTIL_A_STEP}\n{stop}\nwait $shell", tmp_path)
    assert first.status == status, first.text
    assert said in first.lines
    (folder,) = (tmp_path / "logs").iterdir()
    done = steps(folder)[-1]
    assert [p.name for p in folder.glob("*/checkpoints/*")] == [f"global_step_{done}"]

    again = types(f"rlinf train {TOY} runner.max_epochs={done + 1} runner.resume_dir=auto", tmp_path)
    assert again.status == 0, again.text
    assert [folder] == list((tmp_path / "logs").iterdir())
    assert steps(folder) == list(range(1, done + 2))
    assert f"run {json.loads((folder / 'run.json').read_text())['id']} in logs/{folder.name}" in again.lines


@pytest.mark.slow
def test_one_folder_for_two_runs_and_for_two_recipes(tmp_path: Path) -> None:
    first = types(
        f"rlinf train {TOY} runner.max_steps=1 runner.save_interval=1 runner.logger.log_path=logs/mine", tmp_path
    )
    assert first.status == 0, first.text
    before = (tmp_path / "logs/mine/metrics.jsonl").read_bytes()
    same = "runner.logger.log_path=logs/mine"
    holds = r"logs/mine holds run [0-9a-f]{8} of toy_ppo_compact, begun \S+"
    for command, line in (
        (f"rlinf train {TOY} runner.seed=77 {same}", f"{holds}: continue it with runner.resume_dir=auto, or choose "),
        (f"rlinf train toy_grpo_compact {same} runner.resume_dir=auto", rf"{holds}, with other settings: .* there "),
    ):
        answer = types(command, tmp_path)
        assert answer.status == 2
        assert re.search(line, answer.lines[-1]), answer.text
    assert (tmp_path / "logs/mine/metrics.jsonl").read_bytes() == before
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["mine"]


@pytest.mark.slow
def test_two_runs_at_once_in_one_folder(tmp_path: Path) -> None:
    both = (
        f"set -m\nrlinf train {TOY} runner.max_epochs=500 runner.logger.log_path=logs/mine & shell=$!\n"
        f"while [ ! -e logs/mine/run.lock ]; do kill -0 $shell || exit 1; sleep 0.05; done\n"
        f"rlinf train {TOY} runner.seed=1 runner.logger.log_path=logs/mine > second.txt 2>&1; echo second $?\n"
        "kill -KILL -- -$shell\nwait $shell\n"
        f"rlinf train {TOY} runner.max_steps=1 runner.logger.log_path=logs/mine"
    )
    answer = types(both, tmp_path)
    said = (tmp_path / "second.txt").read_text().splitlines()[-1]
    assert "second 2" in answer.lines
    assert re.match(
        r"error: runner.logger.log_path=logs/mine is in use by pid \d+ on \S+ since \S+ \(rlinf train ", said
    )
    assert re.search(r"run\.lock was left by pid \d+ on .*, which is gone; taken over", answer.text)
