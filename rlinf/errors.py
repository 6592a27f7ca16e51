"""Errors the command line explains in a line instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake the user can fix: exit status 2."""


class NotInstalledError(UserError):
    """An optional package is missing."""


class SimulatorError(RuntimeError):
    """A simulator kept failing, so the run cannot go on: exit status 3."""


class WorkerDiedError(RuntimeError):
    """A process of the run is gone, so the run cannot go on: exit status 5."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest of the known names; nothing where none is near."""
    close = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
