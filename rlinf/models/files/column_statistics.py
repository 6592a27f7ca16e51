"""Column statistics of a data set: taken from rows, read from the JSON of a checkpoint and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rlinf.errors import UserError

Tensor = torch.Tensor
_MAX_VALUES = 1 << 23  # torch.quantile takes no more than 16 M


def quantiles(rows: Tensor) -> tuple[Tensor, Tensor]:
    """1 % and 99 % quantile of each column of rows [M, n], both f64 [n]; very long data are thinned out evenly."""
    rows = rows.double()
    rows = rows[:: 1 + rows.numel() // _MAX_VALUES]
    q01, q99 = torch.quantile(rows, torch.tensor([0.01, 0.99], dtype=torch.float64, device=rows.device), dim=0)
    return q01, q99


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # broken JSON or text encoding
        raise UserError(f"{path} is not valid JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


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
