"""Folders and files that are complete or absent: filled under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rlinf.errors import UserError, space_for

TEMPORARY = ".tmp-"  # before the name of what is not complete
REPLACED = ".old-"  # before the name of a folder whose successor takes its place; deleted once that is there
_RENAME_EXCHANGE = 2  # of Linux's renameat2: both names exist before and after
_AT_FDCWD = -100
_OF_A_RUN = ("run.json", "run.lock", "metrics.jsonl", "checkpoints")  # never replaced
# What shows that a folder is an earlier output of its kind: all names of one of the lines.
_MARKS = {"dataset": (("meta/info.json",),), "policy": (("config.json", "*.safetensors"), ("sft.json",))}
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of file systems without locks


@contextmanager
def atomic_folder(final: Path, *, what: str = "") -> Iterator[Path]:
    """A new folder for the block to fill; at its end it gets the name `final`, in place of what had that name.

    After an error nothing is left of it, and `final` is as it was. What it replaces is deleted last, so that a crash at
    any moment leaves one of the two. `what` names the folder in the error that a path raises where nothing can be
    written, or where another process is filling it.

    Example: with atomic_folder(output, what=f"sft.output={output}") as folder: policy.save_pretrained(folder)
    """
    what = what or str(final)
    final = final.resolve() if final.is_symlink() and final.is_dir() else final  # the folder, not the link to it
    work = final.with_name(f"{TEMPORARY}{final.name}")
    try:
        make_folder(final.parent)
        restore_replaced(final)
        work.mkdir(exist_ok=True)
        held = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror}") from error
    try:
        if try_lock(held) is False:
            raise UserError(f"{what} is being written by another process; wait for it, or choose another folder")
        try:
            with space_for(what):
                for leftover in work.iterdir():  # of a process that was killed
                    _remove(leftover)
                yield work
                for path in [*work.rglob("*"), work]:
                    flush(path)
            _put_in_place(work, final)
            flush(final.parent)
        finally:
            _remove(work)  # the unfinished folder, or the one that was replaced
            restore_replaced(final)
    finally:
        os.close(held)


def check_output(
    output: Path,
    key: str,
    kind: Literal["dataset", "policy"],
    *,
    overwrite: bool,
    inputs: Mapping[str, str | Path] | None = None,
) -> None:
    """Refuse an output that holds something, before anything is computed for it; `key` names it in the error.

    With `overwrite` an earlier output of its `kind` is replaced, and nothing else. What would be deleted on the way is
    refused in any case: the current folder, and the command's `inputs`.
    """
    if output.resolve() == Path.cwd():
        raise UserError(f"{key}={output} is the current folder; name one inside it")
    for name, path in {"the current folder": Path.cwd(), **(inputs or {})}.items():
        if Path(path).expanduser().resolve().is_relative_to(output.resolve()):
            what = name if path == Path.cwd() else f"{name}={path}"
            raise UserError(f"{key}={output} holds {what}, which would be replaced; choose another folder")
    if output.exists() and not output.is_dir():
        raise UserError(f"{key}={output} is a file; choose another folder")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if any((output / name).exists() for name in _OF_A_RUN):
        raise UserError(f"{key}={output} is the folder of a run, which is never replaced; choose another folder")
    if not any(all(any(output.glob(name)) for name in names) for names in _MARKS[kind]):
        raise UserError(f"{key}={output} is not empty and holds no {kind} to replace; choose another folder")
    if not overwrite:
        raise UserError(f"{key}={output} is not empty; choose another folder, or replace it with --overwrite")


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock an open file or folder until it is closed, without waiting; None on file systems without locks.

    Several processes may have a lock that is `shared`, and none has another one then.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def first_free(path: Path, taken: Callable[[Path], bool] = Path.exists) -> Path:
    """The path, or the first of `path-2`, `path-3`, ... that is not taken."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], others) if not taken(p))


def _put_in_place(work: Path, final: Path) -> None:
    """Give the complete folder `work` the name `final`; what had that name is then called `work` or REPLACED."""
    if os.path.lexists(final) and not _exchange(work, final):  # this file system cannot: for a moment there is none
        final.rename(final.with_name(f"{REPLACED}{final.name}"))
    if not os.path.lexists(final):
        work.rename(final)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(other))


def restore_replaced(final: Path) -> None:
    """Give a folder that was about to be replaced its name back, or delete it if its successor is there."""
    old = final.with_name(f"{REPLACED}{final.name}")
    if not os.path.lexists(old):
        return
    if os.path.lexists(final):
        _remove(old)
    else:
        old.rename(final)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents; all of them are on the disk when this returns."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


def write_file(path: Path, text: str) -> None:
    """Write a text file that readers find whole, as it was or as it is now, also after a power cut.

    Of several processes that write it at once, one is the last; none disturbs another.
    """
    work = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex[:12]}-{path.name}")
    try:
        work.write_text(text, encoding="utf-8")
        flush(work)
        work.replace(path)
        flush(path.parent)
    finally:
        work.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a folder with all it holds, a file or a link, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
