"""`python cleaner.py FOLDER`: removes the private folder of a Ray cluster when its run is over. Standard library only.

It waits for the end of its input, which is the end of the run however that came, kill -9 included. Ray's own processes
end with the run, but for two agents that would live for another minute: whoever still has a file of the folder open is
killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

DEADLINE_S = 60.0


def holders(folder: str) -> list[int]:
    """Processes of this user with an open file below `folder`, but for the one that started this program."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getppid():  # a run that has ended in order, and still has Ray's log open
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(fd).startswith(folder + os.sep) for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def main(folder: str) -> None:
    sys.stdin.buffer.read()
    deadline = time.monotonic() + DEADLINE_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        for pid in holders(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
