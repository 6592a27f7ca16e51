"""Work that takes long tells how far it is; the console of the process, where there is one, shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int], None]
_listeners: list[Listener] = []


def report(what: str, done: int, total: int) -> None:
    """Tell that `done` of `total` parts of the work `what` are done; with done == total it has ended.

    Example: report("building reach-v3", 3, 50)
    """
    if _listeners:
        _listeners[-1](what, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hand what is reported during the block to `listener`, from whichever thread it comes."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
