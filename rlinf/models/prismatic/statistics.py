"""Action and proprioception statistics in the published layouts (config.json `norm_stats`, dataset_statistics.json)."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from rlinf.errors import UserError
from rlinf.models.files.column_statistics import check_columns, quantiles, read_json, read_vector

Tensor = torch.Tensor
Kind = Literal["q99", "bounds"]
Part = Literal["action", "proprio"]
FILE = "dataset_statistics.json"
FIELDS: dict[Kind, tuple[str, str]] = {"q99": ("q01", "q99"), "bounds": ("min", "max")}
ACTION_STD_FLOOR, STATE_STD_FLOOR = 0.05, 0.01  # columns that hardly move must not be blown up
_EPS = 1e-8
_LENGTH_KEY: dict[Part, str] = {"action": "actor.model.action_dim", "proprio": "the number of state columns"}


class Statistics(nn.Module):
    """The range low..high of each column that maps to [-1, 1]; columns where `mask` is False pass unchanged."""

    low: Tensor  # f64 [n]
    high: Tensor  # f64 [n]
    mask: Tensor  # bool [n]

    def __init__(self, low: Tensor, high: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("low", low.double(), persistent=False)
        self.register_buffer("high", high.double(), persistent=False)
        self.register_buffer("mask", mask.bool(), persistent=False)

    @classmethod
    def identity(cls, n: int) -> Self:
        """Statistics that change nothing."""
        return cls(-torch.ones(n), torch.ones(n), torch.zeros(n, dtype=torch.bool))

    def normalize(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n] in x's dtype, clipped to [-1, 1]."""
        scaled = 2.0 * (x.double() - self.low) / (self.high - self.low + _EPS) - 1.0
        return torch.where(self.mask, scaled.clamp(-1.0, 1.0), x.double()).to(x.dtype)

    def unnormalize(self, x: Tensor, *, eps: float = _EPS) -> Tensor:
        """[..., n] -> [..., n] in x's dtype; the first OpenVLA had no `eps`, OFT and the RL policies have it."""
        scaled = 0.5 * (x.double() + 1.0) * (self.high - self.low + eps) + self.low
        return torch.where(self.mask, scaled, x.double()).to(x.dtype)


@dataclass(frozen=True)
class StatisticsTable:
    """Everything a checkpoint says, by data set key; kept whole so that it can be saved again."""

    entries: dict[str, dict[str, Any]]  # key -> {"action": {"q01": [...], ...}, "proprio": {...}, ...}
    origin: str  # where they come from, for errors
    files: dict[str, Path] = field(default_factory=dict)  # the file each key was read from

    @classmethod
    def read(cls, folder: Path) -> Self:
        """`norm_stats` of config.json with dataset_statistics.json merged over it; empty when there is neither."""
        entries: dict[str, dict[str, Any]] = {}
        files: dict[str, Path] = {}
        for path, inside in ((folder / "config.json", "norm_stats"), (folder / FILE, None)):
            content = read_json(path) if path.is_file() else {}
            found = content.get(inside) or {} if inside else content
            if not isinstance(found, dict) or not all(isinstance(e, dict) for e in found.values()):
                raise UserError(f"{path}: statistics must be an object per data set key")
            entries |= found
            files |= dict.fromkeys(found, path)
        return cls(entries, str(folder), files)

    @classmethod
    def fit(cls, key: str, states: Tensor | None, actions: Tensor, *, mask: list[bool] | None = None) -> Self:
        """Of a data set: states [M, S], actions [M, A] row by row; `mask` marks the action columns to normalise."""
        entry: dict[str, Any] = {"action": _fit(actions, mask or [True] * actions.shape[1], ACTION_STD_FLOOR)}
        if states is not None:
            entry["proprio"] = _fit(states, [True] * states.shape[1], STATE_STD_FLOOR)
        return cls({key: entry | {"num_transitions": len(actions)}}, f"statistics of {key}")

    def resolve(self, unnorm_key: str | None) -> str:
        """The key as stored (`<key>_no_noops` counts); null takes the only one. A wrong key lists the valid ones."""
        if not self.entries:
            raise UserError(f"{self.origin} holds no action statistics: expected norm_stats in config.json, or {FILE}")
        valid = ", ".join(self.entries)
        if unnorm_key is None:
            if len(self.entries) > 1:
                raise UserError(f"actor.model.unnorm_key is null, but {self.origin} has several; set one of: {valid}")
            return next(iter(self.entries))
        for key in (unnorm_key, f"{unnorm_key}_no_noops"):
            if key in self.entries:
                return key
        near = difflib.get_close_matches(unnorm_key, self.entries, n=1, cutoff=0.0)[0]
        raise UserError(
            f"actor.model.unnorm_key={unnorm_key!r} is not in {self.origin}; did you mean {near!r}? It has: {valid}"
        )

    def load(self, unnorm_key: str | None, part: Part, *, kind: Kind, columns: int) -> Statistics:
        """The ranges of `part`, checked; what cannot be used is an error that names file, key and column."""
        key = self.resolve(unnorm_key)
        where = f"{self.files.get(key, self.origin)}: {part} statistics of {key!r}"
        entry = self.entries[key].get(part)
        if not isinstance(entry, dict):
            raise UserError(f"{where} are missing; the key has: {', '.join(self.entries[key])}")
        names = FIELDS[kind]
        low, high = (read_vector(where, entry, name) for name in names)
        mask = entry.get("mask", [True] * columns)
        if not isinstance(mask, list) or not all(flag in (True, False) for flag in mask):
            raise UserError(f"{where}: 'mask' must be a list of true and false, got {str(mask)[:60]}")
        for name, length in ((names[0], len(low)), (names[1], len(high)), ("mask", len(mask))):
            if length != columns:
                raise UserError(f"{where}: {name!r} has {length} columns, {_LENGTH_KEY[part]} is {columns}")
        used = torch.tensor(mask, dtype=torch.bool)
        shown = {names[0]: low, names[1]: high}
        check_columns(where, used & ~(low.isfinite() & high.isfinite()), "they must be finite", **shown)
        check_columns(where, used & (low > high), f"{names[0]} must not exceed {names[1]}", **shown)
        return Statistics(low, high, used)

    def save(self, folder: Path) -> None:
        """Write dataset_statistics.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(self.entries, indent=1) + "\n")


def _fit(rows: Tensor, mask: list[bool], floor: float) -> dict[str, list]:
    """All published fields of rows [M, n]; a column that hardly moves gets std `floor` and a range of 4 x `floor`."""
    rows = rows.double()
    fields = {"mean": rows.mean(0), "std": rows.std(0, correction=0).clamp(min=floor)}
    for (low, high), (a, b) in zip(FIELDS.values(), (quantiles(rows), rows.aminmax(dim=0)), strict=True):
        narrow = (4 * floor - (b - a)).clamp(min=0.0) / 2
        fields |= {low: a - narrow, high: b + narrow}
    return {name: values.tolist() for name, values in fields.items()} | {"mask": mask}
