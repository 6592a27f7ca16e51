"""Ctrl-C: exit status 130, no simulator left behind, nothing in shared memory, and the running step is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from rlinf.commands.jobs import train_to_the_end
from rlinf.config.derived import make_plan
from rlinf.runner import Runner
from rlinf.runtime.stop_signals import stop_on_signals
from tests.conftest import REPO
from tests.runs import children, leaked, make_runner, toy_config, wait_gone


class InterruptedRunner(Runner):
    """SIGTERM comes right after the flag has been read `reads` times: at any place, also between two tests of it."""

    reads = 0
    _signal = False

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        signal_was, self.reads = self._signal, self.reads - 1
        self._signal = signal_was or self.reads == 0
        return signal_was

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self._signal = value


def test_sigterm_leaves_no_step_unsaved_whenever_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = toy_config(tmp_path, "runner.max_epochs=3", "runner.save_interval=-1")
    runner = InterruptedRunner(cfg, make_plan(cfg, [0]), watch=MagicMock())
    monkeypatch.setattr(runner, "step", lambda step: {"env/steps": 1.0})
    monkeypatch.setattr("rlinf.runner.step_metrics", lambda *args, **options: {})
    early = 0
    try:
        for reads in range(1, 6):
            runner.global_step, runner.saved_step, runner.stop_requested, runner.reads = 0, 0, False, reads
            runner.train()
            if runner.global_step < 3:
                early += 1
                assert runner.saved_step == runner.global_step > 0, reads
    finally:
        runner.close()
    assert early >= 2


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, None), ("ignored SIGHUP", 0)]
)
def test_signals_that_save(
    number: signal.Signals | str, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nohup made this process ignore stays ignored."""
    runner = make_runner(toy_config(tmp_path, "runner.max_epochs=2", "runner.save_interval=2"))
    monkeypatch.setattr("rlinf.runner.step_metrics", lambda *args, **options: {})
    sent = number if isinstance(number, signal.Signals) else signal.SIGHUP
    handler = signal.getsignal(sent)
    if sent is not number:
        signal.signal(sent, signal.SIG_IGN)

    def step(number: int) -> dict[str, float]:
        os.kill(os.getpid(), sent)
        return {"env/steps": 1.0}

    monkeypatch.setattr(runner, "step", step)
    try:
        if status == 0:
            train_to_the_end(runner)
        else:
            with pytest.raises(KeyboardInterrupt if status is None else SystemExit) as left:
                train_to_the_end(runner)
            assert status is None or left.value.code == status
    finally:
        runner.close()
        assert signal.getsignal(sent) == (signal.SIG_IGN if sent is not number else handler)
        signal.signal(sent, handler)
    assert runner.global_step == runner.saved_step == (2 if status == 0 else 1)


def test_signals_of_one_moment_are_one_and_a_later_one_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout -s INT` signals its child and then its group, which the child is in."""
    runner, clock, outside = Runner.__new__(Runner), [0.0], []
    runner.stop_requested = False
    monkeypatch.setattr("rlinf.runtime.stop_signals.time.monotonic", lambda: clock[0])
    before = signal.signal(signal.SIGINT, lambda *_: outside.append(clock[0]))
    try:
        with stop_on_signals(runner._request_stop):
            for clock[0] in (100.0, 100.02, 102.0):
                signal.raise_signal(signal.SIGINT)
        assert runner.stop_requested
    finally:
        signal.signal(signal.SIGINT, before)
    assert outside == [102.0]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A training run in its second step or later."""
    arguments = ["runner.max_epochs=1000", f"runner.logger.log_path={tmp_path}", "runner.logger.logger_backends=[]"]
    command = [sys.executable, "-m", "rlinf", "train", "toy_ppo_compact", *arguments]
    metrics = tmp_path / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=REPO) as process:
        while not metrics.exists() or not metrics.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        yield process
        process.kill()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(run, times, tmp_path):
    shared = set(os.listdir("/dev/shm"))
    simulators = children(run.pid)
    assert simulators
    for _ in range(times):
        run.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, err = run.communicate()
    assert run.returncode == 130
    assert "Traceback" not in err
    assert wait_gone(simulators)
    assert not leaked(shared)
    saved = list(tmp_path.glob("toy_ppo_compact/checkpoints/global_step_*"))
    assert err.splitlines()[-2:] == [
        "SIGINT: finishing and saving this step; Ctrl-C again leaves at once",
        "interrupted",
    ]
    assert len(saved) == 1  # the running step was finished
