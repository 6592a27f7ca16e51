"""What is wrong with a dataset, one line for each defect; a dataset with any is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlinf.errors import UserError

MOST_LINES = 20  # of defects that are shown


class Defects:
    """Collects defects while a dataset is read; `refuse` raises them together, so that all can be mended at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def add(self, where: str | Path, what: str) -> None:
        """Note a defect of a file, named from the dataset's folder."""
        inside = isinstance(where, Path) and where.is_relative_to(self.folder)
        shown = Path(where).relative_to(self.folder) if inside else where
        self.lines.append(f"{shown}: {what}")

    def add_rows(self, where: str | Path, what: str, bad: np.ndarray) -> None:
        """Note a defect where any row of bad [n] is True, with the number of the first one."""
        if bad.any():
            more = int(bad.sum()) - 1
            others = f", and in {more} more" if more else ""
            self.add(where, f"{what} in row {int(np.argmax(bad))}{others}")

    def refuse(self) -> None:
        """Raise what was found so far."""
        if not self.lines:
            return
        if len(self.lines) == 1:
            raise UserError(f"dataset {self.folder} is damaged: {self.lines[0]}")
        hidden = len(self.lines) - MOST_LINES
        shown = [*self.lines[:MOST_LINES], *([f"and {hidden} more"] if hidden > 0 else [])]
        raise UserError("\n  ".join([f"dataset {self.folder} is damaged in {len(self.lines)} places:", *shown]))
