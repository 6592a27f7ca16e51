"""What travels between processes: tensors as raw buffers, calls with holes for values that are still being made."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlinf.data.struct import TensorStruct
from rlinf.runtime.cluster import merge

Tensor = torch.Tensor
Packed = tuple[np.ndarray, torch.dtype, tuple[int, ...]]  # raw bytes u8 [N], dtype and shape


def pack(x: Tensor) -> Packed:
    """A tensor as bytes that a pickler may send out of band; no copy on the CPU."""
    x = x.detach().cpu().contiguous()
    return x.reshape(-1).view(torch.uint8).numpy(), x.dtype, tuple(x.shape)


def unpack(packed: Packed) -> Tensor:
    """The tensor over the received bytes themselves. It must not be written to: other readers may share them.

    torch.from_numpy would warn of exactly that; torch.frombuffer of a ctypes array does not, and keeps its owner alive.
    """
    array, dtype, shape = packed
    if array.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in a message."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, TensorStruct):
        return value.num_bytes()
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values()))
    return 0


@dataclass(frozen=True)
class Hole:
    """Where the value of a future goes."""

    index: int  # among the values of the call


@dataclass(frozen=True)
class Call:
    """One method call without the values it waits for."""

    method: str
    args: tuple[Any, ...]  # holes stand for values, also inside lists
    kwargs: dict[str, Any]
    sources: tuple[int, ...]  # the process that makes each value
    cuts: tuple[tuple[int, int], ...] | None = None  # rows of each value, which together are the first argument

    def arguments(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The positional arguments, once every value is there."""
        if self.cuts is not None:
            return (merge(values, self.cuts), *self.args)
        return tuple(_fill(arg, values) for arg in self.args)


def _fill(arg: Any, values: Sequence[Any]) -> Any:
    if isinstance(arg, Hole):
        return values[arg.index]
    if isinstance(arg, list):
        return [_fill(a, values) for a in arg]
    return arg
