"""Errors the command line explains in a line instead of a traceback."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class UserError(ValueError):
    """A mistake the user can fix: exit status 2."""


class NotInstalledError(UserError):
    """An optional package is missing."""


class SimulatorError(RuntimeError):
    """A simulator kept failing, so the run cannot go on: exit status 3."""


class WorkerDiedError(RuntimeError):
    """A process of the run is gone, so the run cannot go on: exit status 5."""


def install_line(extra: str) -> str:
    """The command that adds an extra of the package to the running interpreter."""
    relative = os.path.relpath(sys.executable)
    python = sys.executable if relative.startswith("..") else relative
    checkout = Path(__file__).parents[1] / "constraints.txt"
    what = f'-c constraints.txt -e ".[{extra}]"' if checkout.is_file() else f'"rlinf[{extra}]"'
    return f"{python} -m pip install {what}"


def where_to_get(path: str, key: str) -> str:
    """How to fetch what looks like `org/name` on the Hugging Face Hub, as the end of an error; else nothing."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) or Path(path).parent.exists():
        return ""
    folder = f"checkpoints/{path.rpartition('/')[2]}"
    return (
        f" on this disk; if it is a repository of the Hugging Face Hub: pip install huggingface_hub && "
        f"hf download {path} --local-dir {folder}, then {key}={folder}"
    )


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest of the known names; nothing where none is near."""
    close = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
