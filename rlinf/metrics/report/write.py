"""Write the report of one run or several to a file that is free, or that held their report before."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import quote

from rlinf.errors import UserError, writing
from rlinf.metrics.report.page import GENERATOR, make_page
from rlinf.metrics.report.run_files import RunFiles, read_runs
from rlinf.storage.atomic_folder import make_folder, write_file

_IDENTITIES = re.compile(r'<meta name="rlinf-runs" content="([^"]*)">')


def write_report(*folders: Path, out: Path | None = None) -> Path:
    """Write one page about the runs in these folders and return its path.

    Unless told where: report.html in the folder of a single run, else the first of report.html, report-2.html, ... in
    the working folder that is free or holds the report of the same runs. No other file is replaced.
    """
    runs = read_runs(folders)
    out = out or _free_place(runs)
    with writing(str(out)):
        free = _may_replace(out, runs)
    if not free:
        raise UserError(
            f"{out} exists and is not a report of {'this run' if len(runs) == 1 else 'these runs'}; "
            "it stays as it is: choose another file with -o, or move it away"
        )
    page = make_page(runs, link=lambda path: quote(Path(os.path.relpath(path, out.parent)).as_posix()))
    with writing(str(out)):
        make_folder(out.parent)
        write_file(out, page)
    return out


def _free_place(runs: list[RunFiles]) -> Path:
    if len(runs) == 1:
        return runs[0].folder / "report.html"
    return next(path for path in _names() if _may_replace(path, runs))


def _names() -> Iterator[Path]:
    yield Path("report.html")
    number = 2
    while True:
        yield Path(f"report-{number}.html")
        number += 1


def _may_replace(path: Path, runs: list[RunFiles]) -> bool:
    """Whether a path is free, or a report of the same runs; in its run's own folder any report is."""
    if not os.path.lexists(path):
        return True
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(4096)
    if f'<meta name="generator" content="{GENERATOR}">' not in head:
        return False
    found = _IDENTITIES.search(head)
    same = found is not None and unescape(found[1]) == " ".join(run.identity for run in runs)
    return same or (len(runs) == 1 and path.resolve() == (runs[0].folder / "report.html").resolve())
