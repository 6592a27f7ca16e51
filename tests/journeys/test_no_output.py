"""`| head`, a full disk under stdout, a closed stdout: the run goes on to its end and saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.terminal import types

TRAIN = (
    "rlinf train toy_ppo_compact runner.max_steps=2 env.train.total_num_envs=4 env.train.num_processes=1 "
    "env.train.rollout_epoch=1 actor.micro_batch_size=16 actor.global_batch_size=16 runner.logger.log_path=run"
)


@pytest.mark.parametrize(
    ("shell", "lines"),
    [
        ("2>/dev/null | head -c 4", ["run"]),
        pytest.param(
            ">/dev/full",
            [
                "warning: actor.model.model_path is not set: the policy starts from random weights",
                "warning: stdout cannot be written (No space left on device); going on without it",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(">&- 2>&-", [], marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_and_saves(tmp_path: Path, shell: str, lines: list[str]) -> None:
    answer = types(f"{TRAIN} {shell}", tmp_path)
    assert (answer.status, answer.lines) == (0, lines)
    assert (tmp_path / "run/toy_ppo_compact/checkpoints/global_step_2/manifest.json").is_file()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


def test_what_is_only_printed_has_the_status_of_a_lost_output(tmp_path: Path) -> None:
    answer = types("rlinf plan toy_ppo_compact >/dev/full", tmp_path)
    assert answer.status == 6
    assert answer.lines == ["warning: stdout cannot be written (No space left on device); going on without it"]
