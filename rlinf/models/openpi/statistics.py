"""Normalisation statistics of π in the published layout (norm_stats.json), and their use on padded vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from rlinf.errors import UserError
from rlinf.models.files.policy_folder import read_json, write_json
from rlinf.models.files.statistics import check_columns, fit_columns, read_vector

Tensor = torch.Tensor
_EPS = 1e-6
_FIELDS = ("mean", "std", "q01", "q99")
FILE = "norm_stats.json"
GAUSSIAN_Q99 = 2.33  # deviations from a Gaussian's mean to its 99 % quantile


class Statistics(nn.Module):
    """mean, std, q01, q99 of one vector, f64 [n]; not part of the weights."""

    mean: Tensor
    std: Tensor
    q01: Tensor
    q99: Tensor

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name in _FIELDS:
            self.register_buffer(name, values[name].double(), persistent=False)
        self._terms: dict[tuple[bool, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    def identity(cls, n: int) -> Self:
        """Statistics that change nothing under either rule (up to the published 1e-6)."""
        return cls(mean=torch.zeros(n), std=torch.ones(n), q01=-torch.ones(n), q99=torch.ones(n))

    @classmethod
    def fit(cls, rows: Tensor, *, floor: float) -> Self:
        """Of rows [M, n]; columns that hardly move are held to `floor` (`fit_columns`)."""
        return cls(**fit_columns(rows, floor=floor))

    def first(self, n: int) -> Statistics:
        """Of the first n columns only."""
        return Statistics(**{name: values[:n] for name, values in self.named_buffers()})

    def normalize(self, x: Tensor, *, quantile: bool) -> Tensor:
        """[..., n] -> [..., n] in x's dtype: q01..q99 to [-1, 1], or (not `quantile`) to mean 0 and deviation 1."""
        low, spread = self.terms(x, quantile=quantile)
        normal = (x - low) / spread
        return normal * 2.0 - 1.0 if quantile else normal

    def unnormalize(self, x: Tensor, *, quantile: bool) -> Tensor:
        """[..., m >= n] -> [..., m]; columns beyond n have the identity's statistics."""
        n, (low, spread) = self.mean.shape[0], self.terms(x, quantile=quantile)
        real, rest = x[..., :n], x[..., n:]
        real = ((real + 1.0) / 2.0 if quantile else real) * spread + low
        return torch.cat((real, rest if quantile else rest * (1.0 + _EPS)), -1) if rest.shape[-1] else real

    def terms(self, x: Tensor, *, quantile: bool) -> tuple[Tensor, Tensor]:
        """What is subtracted from x and what it is divided by, [n] each in x's dtype on its device, made once."""
        key = (quantile, x.dtype, x.device)
        if key not in self._terms:
            low, spread = (self.q01.to(x), self.q99.to(x)) if quantile else (self.mean.to(x), self.std.to(x))
            self._terms[key] = low, (spread - low if quantile else spread) + _EPS
        return self._terms[key]


def save_statistics(folder: Path, asset_id: str, stats: dict[str, Statistics]) -> None:
    """Write `<folder>/<asset_id>/norm_stats.json`."""
    content = {key: {name: values.tolist() for name, values in s.named_buffers()} for key, s in stats.items()}
    write_json(folder / asset_id / FILE, {"norm_stats": content})


def load_statistics(folder: Path, asset_id: str, *, quantile: bool) -> dict[str, Statistics]:
    """Read `<folder>/<asset_id>/norm_stats.json` (also below `assets/`, where openpi itself puts it).

    The quantiles may be left out by checkpoints that are normalised without them (`quantile` False).
    """
    for path in (folder / asset_id / FILE, folder / "assets" / asset_id / FILE):
        if path.is_file():
            content = read_json(path).get("norm_stats")
            if not isinstance(content, dict):
                raise UserError(f"{path} lacks the object 'norm_stats'")
            return {key: _parse(path, key, content, quantile) for key in ("state", "actions")}
    found = sorted({str(p.parent.relative_to(folder)) for p in folder.glob(f"**/{FILE}")})
    raise UserError(
        f"{folder} has no {asset_id}/{FILE}, which this openpi.config_name needs; "
        + (f"statistics found for: {', '.join(found)}" if found else "it holds no statistics at all")
    )


def _parse(path: Path, key: str, content: dict[str, Any], quantile: bool) -> Statistics:
    """One entry, refused when it would silently give NaN or mirrored numbers."""
    if not isinstance(content.get(key), dict):
        raise UserError(f"{path} lacks the entry {key!r}; it has: {', '.join(content)}")
    entry, where = content[key], f"{path}: statistics of {key!r}"
    fields = {name: read_vector(where, entry, name) for name in ("mean", "std")}
    if entry.get("q01") is None or entry.get("q99") is None:
        if quantile:
            raise UserError(f"{path} lacks q01 and q99 of {key!r}, by which this openpi.config_name normalises")
        spread = GAUSSIAN_Q99 * fields["std"]  # a Gaussian's, never read
        fields |= {"q01": fields["mean"] - spread, "q99": fields["mean"] + spread}
    else:
        fields |= {name: read_vector(where, entry, name) for name in ("q01", "q99")}
    lengths = {name: len(values) for name, values in fields.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{where} have different numbers of columns: {lengths}")
    used = {name: fields[name] for name in (("q01", "q99") if quantile else ("mean", "std"))}
    check_columns(where, ~torch.stack(list(used.values())).isfinite().all(0), "they must be finite", **used)
    if quantile:
        check_columns(where, fields["q01"] > fields["q99"], "q01 must not exceed q99", **used)
    else:
        check_columns(where, fields["std"] < 0, "std must not be negative", **used)
    return Statistics(**fields)
