"""Folders that are complete or absent: filled under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.errors import UserError, writing

TEMPORARY = ".tmp-"  # before the name of a folder that is not complete


@contextmanager
def atomic_folder(final: Path, *, what: str = "") -> Iterator[Path]:
    """A new folder for the block to fill; at its end it gets the name `final`, in place of what had that name.

    After an error nothing is left of it, and `final` is as it was. `what` names the folder in the error that a path
    raises where nothing can be written.

    Example: with atomic_folder(output, what=f"sft.output={output}") as folder: policy.save_pretrained(folder)
    """
    work = final.with_name(f"{TEMPORARY}{final.name}")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{what or final} cannot be written: {error.strerror}") from error
    try:
        with writing(what or str(final)):
            yield work
            for path in [*work.rglob("*"), work]:
                _flush(path)
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
        _flush(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
