"""The last lines of a command: what they name, and which settings the next command keeps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rlinf.commands import cli, jobs, summary
from rlinf.runner import Runner
from rlinf.storage.atomic_folder import first_free
from tests.runs import toy_config

TINY = ("env.train.total_num_envs=4", "env.train.num_processes=1", "env.train.rollout_epoch=1", "runner.max_epochs=1")
BATCH = ("actor.global_batch_size=16", "actor.micro_batch_size=16", "algorithm.update_epoch=1")


def test_a_row_for_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rlinf", "eval", "toy", "env.eval.init_params={spread: 20}"]
    summary.print_summary(started=time.time(), training="a\nb", report=Path("logs/report.html"), next_command=command)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["", "training    a", "            b", "report      logs/report.html"]
    assert lines[4].startswith("seconds     ")
    assert lines[5:] == ["next        rlinf eval toy 'env.eval.init_params={spread: 20}'"]


def test_the_next_command_keeps_what_decides_the_task_and_the_model() -> None:
    settings = [
        "runner.max_steps=20",
        "runner.seed=3",
        "runner.logger.log_path=logs/x",
        "+env.eval.num_trials=4",
        "~env.train.video_cfg",
        "actor.model.size=compact",
        "actor.model.model_path=checkpoints/weak",
        "actor.optim.lr=1",
        "actor.global_batch_size=8",
        "sft.steps=3",
    ]
    shared = ["runner.seed=3", "+env.eval.num_trials=4", "~env.train.video_cfg", "actor.model.size=compact"]
    evaluation = summary.evaluation_command("toy", settings, Path("c/global_step_2"))
    assert evaluation == ["rlinf", "eval", "toy", *shared, "runner.ckpt_path=c/global_step_2"]
    training = summary.training_command("toy", settings, Path("checkpoints/better"))
    batches = ["actor.optim.lr=1", "actor.global_batch_size=8"]
    assert training == ["rlinf", "train", "toy", *shared, *batches, "actor.model.model_path=checkpoints/better"]


def test_without_a_simulator_the_policy_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "sft", lambda cfg, **_: Path(cfg.sft.output))
    cli.sft("own_data_sft", [f"sft.output={tmp_path}"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("next        python -c 'import rlinf; print(rlinf.")


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    assert first_free(tmp_path / "demos") == tmp_path / "demos"
    for name in ("demos", "demos-2"):
        (tmp_path / name).mkdir()
    assert first_free(tmp_path / "demos") == tmp_path / "demos-3"


def test_the_last_step_is_saved_unless_told_otherwise(tmp_path: Path) -> None:
    runner, log = jobs.train(toy_config(tmp_path / "default", *TINY, *BATCH))
    assert runner.last_checkpoint == tmp_path / "default/toy_ppo_compact/checkpoints/global_step_1"
    assert (summary.training_success(log) or "").endswith("], step 1")
    assert log.report == tmp_path / "default/report.html"
    runner, _ = jobs.train(toy_config(tmp_path / "off", *TINY, *BATCH, "runner.save_last=false"))
    assert runner.last_checkpoint is None
    assert not (tmp_path / "off/toy_ppo_compact").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, None)])
def test_a_run_that_is_stopped_says_how_to_go_on(
    number: signal.Signals,
    status: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = Runner.step

    def stopped(self: Runner, index: int) -> dict[str, float]:
        os.kill(os.getpid(), number)
        return step(self, index)

    monkeypatch.setattr(Runner, "step", stopped)
    settings = [*TINY[:-1], *BATCH, "runner.max_epochs=9", f"runner.logger.log_path={tmp_path}"]
    with pytest.raises(KeyboardInterrupt if status is None else SystemExit) as left:
        cli.train("toy_ppo_compact", [*settings, "runner.resume_dir=auto"])
    assert status is None or left.value.code == status
    lines = capsys.readouterr().out.splitlines()
    assert f"checkpoint  {tmp_path}/toy_ppo_compact/checkpoints/global_step_1" in lines
    assert lines[-1] == f"next        rlinf train toy_ppo_compact {' '.join(settings)} runner.resume_dir=auto"
