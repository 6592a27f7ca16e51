"""requirements/install.sh refuses what it does not know before it touches anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "requirements/install.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("embodied --model nothing --env metaworld", "unknown model 'nothing'; available: openpi"),
        ("embodied --model openpi --env nothing", "unknown env 'nothing'; available: metaworld"),
        ("embodied --model openpi", "--env is missing; available: metaworld"),
        ("embodied --model", "--model needs a value"),
        ("embodied --fast", "unknown option '--fast'; see: bash requirements/install.sh -h"),
        ("agentic --model openpi --env metaworld", "unknown target 'agentic'; available: embodied"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(arguments: str, message: str) -> None:
    done = install(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"install.sh: {message}\n")


@pytest.mark.parametrize("arguments", [(), ("-h",), ("embodied", "--help")])
def test_help(arguments: tuple[str, ...]) -> None:
    done = install(*arguments)
    assert done.returncode == 0
    for name in ("--model", "--env", "--venv", "--no-root", "openpi", "metaworld"):
        assert name in done.stdout
