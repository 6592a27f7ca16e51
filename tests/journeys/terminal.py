"""A person at a shell: commands typed in a folder of their own, and what came back."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPO


@dataclass(frozen=True)
class Answer:
    """How a command ended: its exit status, what it printed on both streams, in one text."""

    status: int
    text: str

    @property
    def lines(self) -> list[str]:
        """The printed lines that hold something."""
        return [line.rstrip() for line in self.text.splitlines() if line.strip()]


def environment(columns: int = 100, **extra: str) -> dict[str, str]:
    """The variables of a shell in which this checkout is installed, with no GPU and a terminal of `columns`."""
    fixed = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(columns), "PYTHONPATH": str(REPO)}
    return {**os.environ, **fixed, **extra}


def types(command: str, folder: Path, **extra: str) -> Answer:
    """Types a command line into bash, in `folder`; `rlinf` is this checkout's program."""
    program = f'rlinf() {{ {shlex.quote(sys.executable)} -m rlinf "$@"; }}\nset -o pipefail\n'
    done = subprocess.run(
        ["bash", "-c", program + command],
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Answer(done.returncode, done.stdout)
