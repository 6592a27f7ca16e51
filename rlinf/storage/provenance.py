"""Where a run comes from: its command, commit, packages, machine and accelerators."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlinf.storage.redaction import redacted_command

PACKAGE = Path(__file__).parents[1]


def describe_start(gpus: Sequence[str]) -> dict[str, Any]:
    """What run.json tells of one start of a run on accelerators of these names."""
    return {
        **describe_process(),
        "folder": os.getcwd(),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": packages(),
        "gpus": list(gpus),
    }


def describe_process() -> dict[str, Any]:
    """Who writes to a run's folder."""
    return {"command": command(), "at": now(), "host": socket.gethostname(), "pid": os.getpid()}


def command() -> str:
    """The command line of this process without its secrets, ready to paste."""
    program, *arguments = sys.argv
    inside = Path(program).name in ("__main__.py", "rlinf")
    return shlex.join(redacted_command(["rlinf" if inside else program, *arguments]))


def now() -> str:
    """The local time with its offset, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@cache
def packages() -> dict[str, str]:
    """Versions of every installed package, by name."""
    found = {(d.metadata["Name"] or "").lower(): d.version for d in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name))


@cache
def _commit() -> str | None:
    """The git commit of this package, with `+changes` where tracked files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        options = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(options, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if git("ls-files", "--", __file__) == "":  # installed below somebody else's repository
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
