"""A disk that fills up while a run trains: one line, its own exit status, and the last checkpoint to continue from."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.terminal import types

TRAIN = (
    "rlinf train toy_ppo_compact runner.max_steps=3 runner.save_interval=1 env.train.total_num_envs=4 "
    "env.train.num_processes=1 env.train.rollout_epoch=1 actor.micro_batch_size=16 actor.global_batch_size=16"
)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    answer = types(f"ulimit -f 1000; {TRAIN} runner.logger.log_path=run", tmp_path)
    assert answer.status == 6
    errors = [line for line in answer.lines if line.startswith("error: ")]
    assert errors == [
        "error: checkpoint run/toy_ppo_compact/checkpoints/global_step_1 cannot be written: File too large; "
        "no step was saved yet"
    ]
    assert "Traceback" not in answer.text
    assert list((tmp_path / "run/toy_ppo_compact/checkpoints").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 7 MB, which holds one checkpoint of the toy."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(folder)]
    try:
        permitted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        permitted = False
    if not permitted:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint_which_trains_on_elsewhere(small_disk: Path, tmp_path: Path) -> None:
    answer = types(f"{TRAIN} runner.logger.log_path=disk", tmp_path)
    saved = "disk/toy_ppo_compact/checkpoints/global_step_1"
    assert answer.status == 6
    assert answer.lines[-1] == (
        "error: checkpoint disk/toy_ppo_compact/checkpoints/global_step_2 cannot be written: No space left on device; "
        f"{saved} is complete: runner.resume_dir={saved} continues from it"
    )
    assert [path.name for path in (tmp_path / saved).parent.iterdir()] == ["global_step_1"]
    resumed = types(f"{TRAIN} runner.resume_dir={saved} runner.logger.log_path=roomy", tmp_path)
    assert resumed.status == 0, resumed.text
    assert (tmp_path / "roomy/toy_ppo_compact/checkpoints/global_step_3").is_dir()
