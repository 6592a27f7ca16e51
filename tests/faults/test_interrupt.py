"""Ctrl-C, once or twice: exit status 130, no simulator left behind, nothing left in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.runs import leaked, wait_gone


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
