"""Statistics per column of a data set, for normalisation: fitted to rows, read from a checkpoint's JSON and checked."""

from __future__ import annotations

from typing import Any

import torch

from rlinf.errors import UserError

Tensor = torch.Tensor
RANGES = (("q01", "q99"), ("min", "max"))  # 1 % and 99 % quantile; smallest and largest value
_MAX_VALUES = 1 << 23  # torch.quantile takes no more than 16 M


def fit_columns(rows: Tensor, *, floor: float) -> dict[str, Tensor]:
    """mean, std and both `RANGES` of rows [M, n], each f64 [n].

    A column that hardly moves gets std `floor` and a range of 4 x `floor`, so that its noise is not scaled up.
    """
    rows = rows.double()
    fitted = {"mean": rows.mean(0), "std": rows.std(0, correction=0).clamp(min=floor)}
    for names, (low, high) in zip(RANGES, (_quantiles(rows), rows.aminmax(dim=0)), strict=True):
        missing = (4 * floor - (high - low)).clamp(min=0.0) / 2
        fitted |= dict(zip(names, (low - missing, high + missing), strict=True))
    return fitted


def read_vector(where: str, entry: dict[str, Any], field: str) -> Tensor:
    """The numbers of `field`, f64 [n]; `where` names file and entry in errors."""
    if entry.get(field) is None:
        raise UserError(f"{where} lacks {field!r}; it has: {', '.join(entry) or 'nothing'}")
    values = entry[field]
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise UserError(f"{where}: {field!r} must be a list of numbers, got {str(values)[:60]}")
    return torch.tensor(values, dtype=torch.float64)


def check_columns(where: str, bad: Tensor, rule: str, **values: Tensor) -> None:
    """Raise when any column of bad [n] is True, naming the first one, its values and the rule it breaks."""
    if bad.any():
        i = int(bad.nonzero()[0])
        shown = ", ".join(f"{name}={float(v[i]):g}" for name, v in values.items())
        raise UserError(f"{where}: column {i} has {shown}; {rule}")


def _quantiles(rows: Tensor) -> tuple[Tensor, Tensor]:
    """1 % and 99 % quantile of each column of rows f64 [M, n]; very long data are thinned out evenly."""
    rows = rows[:: 1 + rows.numel() // _MAX_VALUES]
    q01, q99 = torch.quantile(rows, torch.tensor([0.01, 0.99], dtype=torch.float64, device=rows.device), dim=0)
    return q01, q99
