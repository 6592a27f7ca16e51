"""Ctrl-C, once or twice: exit status 130, no simulator left behind, nothing left in shared memory."""

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

from rlinf.config.derived import make_plan
from rlinf.runner import Runner
from tests.conftest import REPO
from tests.runs import leaked, toy_config, wait_gone


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


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
def test_ctrl_c(run, times):
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
    if times == 1:
        assert err.splitlines()[-1] == "interrupted"
