"""Signals that end a run once the step it is in has been saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SAME_STOP = 1.0  # seconds in which a further SIGINT is taken for the first: `timeout` signals a process and its group


@contextmanager
def stop_on_signals(request: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-C call `request` during the block instead of what they did before.

    A second Ctrl-C, SAME_STOP after the first, does what it did before. Signals that this process was told to ignore
    (nohup) stay ignored, and in a thread, which gets no signals, nothing changes.
    """
    interrupted: float | None = None  # when the first SIGINT came

    def handle(number: int, _: object) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and interrupted is not None:
            if time.monotonic() - interrupted >= SAME_STOP:
                signal.signal(number, before[number])
                signal.raise_signal(number)
            return
        if number == signal.SIGINT:
            interrupted = time.monotonic()
        request(signal.Signals(number))
        again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
        with suppress(OSError):  # not print: the signal may have come in the midst of one
            os.write(2, f"\n{signal.Signals(number).name}: finishing and saving this step{again}\n".encode())

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in STOPS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
