"""Folders and files that are complete or absent: filled under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.errors import UserError, writing

TEMPORARY = ".tmp-"  # before the name of what is not complete
REPLACED = ".old-"  # before the name of a folder whose successor takes its place; deleted once that is there


@contextmanager
def atomic_folder(final: Path, *, what: str = "") -> Iterator[Path]:
    """A new folder for the block to fill; at its end it gets the name `final`, in place of what had that name.

    After an error nothing is left of it, and `final` is as it was. What it replaces is deleted last, so that a crash at
    any moment leaves one of the two. `what` names the folder in the error that a path raises where nothing can be
    written.

    Example: with atomic_folder(output, what=f"sft.output={output}") as folder: policy.save_pretrained(folder)
    """
    work, old = (final.with_name(f"{prefix}{final.name}") for prefix in (TEMPORARY, REPLACED))
    try:
        make_folder(final.parent)
        restore_replaced(final)
        _remove(work)  # of a process that was killed
        work.mkdir()
    except OSError as error:
        raise UserError(f"{what or final} cannot be written: {error.strerror}") from error
    try:
        with writing(what or str(final)):
            yield work
            for path in [*work.rglob("*"), work]:
                flush(path)
        if os.path.lexists(final):
            final.rename(old)
        work.rename(final)
        flush(final.parent)
    finally:
        _remove(work)
        restore_replaced(final)


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
    """Write a text file that readers find whole, as it was or as it is now, also after a power cut."""
    work = path.with_name(f"{TEMPORARY}{path.name}")
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
