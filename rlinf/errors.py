"""Errors the command line explains in a line instead of a traceback."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a user's quota, the shell's limit of a file's size


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


class DiskFullError(RuntimeError):
    """A file of the run found no space on the disk: exit status 6."""


def full_disk(error: BaseException | None) -> str | None:
    """The system's words for a full disk, quota or file-size limit, where the error or one that led to it tells of it.

    Found by number or by text: the libraries that write weights, tables and videos have error types of their own.
    """
    while error is not None:
        for code in NO_SPACE:
            if (isinstance(error, OSError) and error.errno == code) or os.strerror(code) in str(error):
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def space_for(what: str) -> Iterator[None]:
    """Raise DiskFullError, which says that `what` cannot be written, where the block fails for want of space."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if (reason := full_disk(error)) is None:
            raise
        raise DiskFullError(f"{what} cannot be written: {reason}") from error


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise UserError, which says why `what` cannot be written, or DiskFullError where there is no space for it.

    For blocks that do nothing but write; around others, whose errors may be of other files, `space_for`.

    Example: with writing(f"report {path}"): path.write_text(page)
    """
    try:
        with space_for(what):
            yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror or error}") from error


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest of the known names; nothing where none is near."""
    close = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
