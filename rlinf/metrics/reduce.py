"""From the values of micro batches and ranks to one number per metric. Torch-free; names are up to the caller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, SupportsFloat

VARIANCE_SUMS = ("count", "returns_sum", "returns_sq_sum", "errors_sum", "errors_sq_sum")
"""Sums a critic loss reports as `critic/variance/<one of these>`; they give the exact `critic/explained_variance`."""

Kind = Literal["mean", "sum", "max"]


@dataclass
class Cell:
    """One metric on its way: its kind, the running value (of a mean: the weighted sum) and the weight so far."""

    kind: Kind
    value: float
    weight: float

    def combine(self, name: str, other: Cell) -> Cell:
        if other.kind != self.kind:
            raise ValueError(
                f"metric {name!r} was added as {self.kind} and as {other.kind}; a metric has one reduction"
            )
        if self.kind in ("mean", "sum"):
            return Cell(self.kind, self.value + other.value, self.weight + other.weight)
        for cell in (self, other):
            if math.isnan(cell.value):
                return cell  # so that a broken batch or rank shows
        return max(self, other, key=lambda cell: cell.value)


@dataclass
class Accumulator:
    """Collects the values of a training step; plain data, so that it can travel to be merged with other ranks'."""

    cells: dict[str, Cell] = field(default_factory=dict)

    def add(self, name: str, value: SupportsFloat, weight: SupportsFloat = 1.0) -> None:
        """A mean over `weight` entries; a weight of 0 says that there were none and `value` means nothing."""
        if float(weight) > 0.0:
            self._put(name, Cell("mean", float(value) * float(weight), float(weight)))

    def add_many(self, metrics: Mapping[str, tuple[SupportsFloat, SupportsFloat]]) -> None:
        """(value, weight) pairs; the raw sums behind an explained variance are summed, whatever their weight."""
        for name, (value, weight) in metrics.items():
            if "/variance/" in name:
                self.add_sum(name, value)
            else:
                self.add(name, value, weight)

    def add_sum(self, name: str, value: SupportsFloat) -> None:
        """A count or another quantity that adds up."""
        self._put(name, Cell("sum", float(value), 1.0))

    def add_max(self, name: str, value: SupportsFloat) -> None:
        """The largest counts: a gap, or the seconds of the slowest rank."""
        self._put(name, Cell("max", float(value), 1.0))

    def merge(self, other: Accumulator) -> None:
        """Take in another batch's or another rank's values."""
        for name, cell in other.cells.items():
            self._put(name, cell)

    def result(self) -> dict[str, float]:
        """One number per metric, sorted by name; raw sums appear as the explained variance they give."""
        out = {n: c.value / c.weight if c.kind == "mean" else c.value for n, c in self.cells.items()}
        for prefix in [name.removesuffix("variance/count") for name in out if name.endswith("/variance/count")]:
            sums = [out.pop(f"{prefix}variance/{name}") for name in VARIANCE_SUMS]
            out[f"{prefix}explained_variance"] = explained_variance(*sums)
        return dict(sorted(out.items()))

    def _put(self, name: str, cell: Cell) -> None:
        self.cells[name] = self.cells[name].combine(name, cell) if name in self.cells else cell


def explained_variance(
    count: float, returns_sum: float, returns_sq_sum: float, errors_sum: float, errors_sq_sum: float
) -> float:
    """1 - Var(R - V) / Var(R) of returns R and values V; NaN where all R are equal: there is nothing to explain."""
    if count == 0:
        return math.nan
    returns_var = returns_sq_sum / count - (returns_sum / count) ** 2
    errors_var = errors_sq_sum / count - (errors_sum / count) ** 2
    return 1.0 - errors_var / returns_var if returns_var > 0 else math.nan
