"""stdout and stderr of the program: once they cannot be written (`| head`, `> /dev/full`, `>&-`), they are dropped."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


class ForgivingFile(io.FileIO):
    """A descriptor that leads to /dev/null after the first write that fails, so that none of the later ones does."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.fault: OSError | None = None  # why nothing is written any more

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.fileno() == 1 and error.errno != errno.EPIPE:  # a reader that has left knows it
                print(f"warning: stdout cannot be written ({error.strerror}); going on without it", file=sys.stderr)
            return memoryview(data).nbytes


def protect_streams() -> None:
    """Give this process a stdout and a stderr that drop what they cannot write; descriptors 0 to 2 are open after it.

    A closed one is opened on /dev/null: the next file to be opened would have its number, and get what is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the life of the process)
        elif stream is getattr(sys, f"__{name}__"):  # else a test's
            stream.flush()
            writer = io.BufferedWriter(ForgivingFile(descriptor))
            # By lines, also through a pipe: a long command must be seen to work.
            setattr(sys, name, io.TextIOWrapper(writer, stream.encoding, stream.errors, line_buffering=True))


def stdout_fault() -> OSError | None:
    """Why stdout was dropped; None while all that was printed has been written."""
    try:
        sys.stdout.flush()
    except ValueError:  # closed
        return None
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.fault if isinstance(raw, ForgivingFile) else None
