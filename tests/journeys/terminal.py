"""A person at a shell: commands typed in a folder of their own, and what came back."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
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


def row(answer: Answer, name: str) -> str:
    """What a command's summary says under `name`."""
    (line,) = [line for line in answer.lines if re.match(rf"{name} {{2,}}", line)]
    return line.removeprefix(name).strip()


def environment(columns: int = 100, **extra: str) -> dict[str, str]:
    """The variables of a shell in which this checkout is installed, with no GPU and a terminal of `columns`."""
    fixed = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(columns), "PYTHONPATH": str(REPO)}
    return {**os.environ, **fixed, **extra}


PROGRAM = f'rlinf() {{ {shlex.quote(sys.executable)} -m rlinf "$@"; }}\nset -o pipefail\n'


def types(command: str, folder: Path, **extra: str) -> Answer:
    """Types a command line into bash, in `folder`; `rlinf` is this checkout's program."""
    done = subprocess.run(
        ["bash", "-c", PROGRAM + command],
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Answer(done.returncode, done.stdout)


def types_in_terminal(command: str, folder: Path, columns: int, **extra: str) -> Answer:
    """As `types`, in a terminal `columns` wide that knows colours; the text is what it shows in the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {**environment(columns, **extra), "TERM": "xterm-256color"}
    for name in ("COLUMNS", "CI", "NO_COLOR"):  # the terminal itself tells its width
        variables.pop(name, None)
    with subprocess.Popen(
        ["bash", "-c", PROGRAM + command], cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        printed = b""
        while chunk := _read(ours):
            printed += chunk
    os.close(ours)
    return Answer(process.returncode, "\n".join(shown(printed.decode(), columns)))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody writes any more
        return b""


def shown(printed: str, columns: int) -> list[str]:
    """The lines of an endless screen after `printed`, with the moves and deletions of its control sequences done."""
    lines, row, column = [""], 0, 0
    for match in re.finditer(r"([^\x1b\r\n]+)|\x1b\[([\d;?]*)([A-Za-z])|\x1b.|\r|\n", printed):
        text, moves, kind = match[1], match[2], match[3] or match[0]
        if text:
            for letter in text:
                if column == columns:  # the terminal wraps
                    row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = lines[row].ljust(column)[:column] + letter + lines[row][column + 1 :]
                column += 1
        elif kind == "\r":
            column = 0
        elif kind == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif kind == "A":
            row = max(0, row - int(moves or 1))
        elif kind == "K":
            lines[row] = "" if moves == "2" else lines[row][:column]
    return lines
