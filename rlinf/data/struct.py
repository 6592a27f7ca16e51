"""TensorStruct: frozen dataclasses of tensors; cat, slice and moves are written once over their fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch


@dataclass(frozen=True)
class TensorStruct:
    """Base of every message: fields are tensors, nested structs, dicts of tensors, lists (one item per row) or None.

    All rows run along the first dimension of every tensor.
    """

    def to(self, device: torch.device | str) -> Self:
        """The same struct with every tensor on `device`."""
        return self.map(lambda t: t.to(device))

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same struct with `fn` applied to every tensor; lists are kept."""
        return replace(self, **{f.name: _map(getattr(self, f.name), fn) for f in fields(self)})

    def __len__(self) -> int:
        for f in fields(self):
            n = _length(getattr(self, f.name))
            if n is not None:
                return n
        raise ValueError(f"{type(self).__name__} holds no rows")

    def __getitem__(self, index: slice | Sequence[int] | torch.Tensor) -> Self:
        """Rows by slice, list of ints, index tensor or boolean mask (always a batch, never a single row)."""
        return replace(self, **{f.name: _take(getattr(self, f.name), index) for f in fields(self)})

    @classmethod
    def cat(cls, parts: Sequence[Self], dim: int = 0) -> Self:
        """Parts one after another along dimension `dim` of every tensor; lists are appended."""
        if len(parts) == 1:
            return parts[0]
        return replace(parts[0], **{f.name: _cat([getattr(p, f.name) for p in parts], dim) for f in fields(cls)})


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in a tensor, a struct or a dict; 0 for anything else."""
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    _map(value, count)
    return sum(sizes)


def _map(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, TensorStruct):
        return value.map(fn)
    if isinstance(value, dict):
        return {k: _map(v, fn) for k, v in value.items()}
    return value


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor | TensorStruct | list):
        return len(value)
    if isinstance(value, dict):
        return next((n for n in map(_length, value.values()) if n is not None), None)
    return None


def _take(value: Any, index: Any) -> Any:
    if isinstance(value, torch.Tensor | TensorStruct):
        return value[index]
    if isinstance(value, dict):
        return {k: _take(v, index) for k, v in value.items()}
    if isinstance(value, list):
        if isinstance(index, slice):
            return value[index]
        if isinstance(index, torch.Tensor):
            index = index.nonzero().flatten() if index.dtype == torch.bool else index
            index = index.tolist()
        return [value[i] for i in index]
    return value


def _cat(values: list[Any], dim: int) -> Any:
    first = values[0]
    if any((v is None) != (first is None) for v in values):
        raise ValueError("cannot join None with a value: every part must have the field or none")
    if first is None:
        return None
    if isinstance(first, torch.Tensor):
        return torch.cat(values, dim)
    if isinstance(first, TensorStruct):
        return type(first).cat(values, dim)
    if isinstance(first, dict):
        return {k: _cat([v[k] for v in values], dim) for k in first}
    if isinstance(first, list | tuple):
        return type(first)(item for v in values for item in v)
    raise TypeError(f"cannot join values of type {type(first).__name__}")
