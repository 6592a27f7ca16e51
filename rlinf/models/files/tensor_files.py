"""Files of named tensors, headers first: what is inside is known, and known to be whole, before anything is read."""

from __future__ import annotations

import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from rlinf.errors import UserError

Tensor = torch.Tensor
PICKLES = (".pt", ".pth", ".bin")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_NOT_TENSORS = {  # beginnings of what downloads leave in place of a file
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`",
    b"<!doctype": "a web page; the download failed",
    b"<html": "a web page; the download failed",
}


class Header(NamedTuple):
    """A stored tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' word for it, as F32 or I64


def read_headers(file: Path) -> dict[str, Header]:
    """Every tensor of a .safetensors, .pt or .bin; raises UserError unless the file is whole and of that kind."""
    _refuse_placeholders(file)
    if file.suffix in PICKLES:
        return {name: Header(tuple(t.shape), _word(t.dtype)) for name, t in _unpickle(file).items()}
    return _safetensors_headers(file)


@contextmanager
def open_tensors(file: Path) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads one tensor of the file by name."""
    if file.suffix in PICKLES:
        yield _unpickle(file).__getitem__
    else:
        with safe_open(file, "pt") as tensors:
            yield tensors.get_tensor


def _refuse_placeholders(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(64).lstrip().lower()
    if not start:
        raise UserError(f"{file} is empty; copy it again")
    for beginning, what in _NOT_TENSORS.items():
        if start.startswith(beginning):
            raise UserError(f"{file} is {what}")


def _safetensors_headers(file: Path) -> dict[str, Header]:
    """Eight bytes of length, a JSON table, then the numbers: each tensor's bytes must lie inside the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise UserError(f"{file} cannot be read: it ends inside its header, so it was cut off; copy it again")
        try:
            table = json.loads(stream.read(length))
            entries = {name: entry for name, entry in table.items() if name != "__metadata__"}
            spans = {name: _span(entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} cannot be read: it has no safetensors header ({error!r})") from error
    for name, (dtype, shape, start, end) in spans.items():
        if dtype in _BYTES and end - start != math.prod(shape) * _BYTES[dtype]:
            raise UserError(f"{file} cannot be read: {name} takes {end - start} bytes, not those of {dtype} {shape}")
        if 8 + length + end > size:
            raise UserError(f"{file} cannot be read: it was cut off at {size} bytes, inside {name}; copy it again")
    try:
        with safe_open(file, "pt"):  # has rules of its own, as that tensors neither overlap nor leave gaps
            pass
    except SafetensorError as error:
        raise UserError(f"{file} cannot be read ({error}); copy it again") from error
    return {name: Header(shape, dtype) for name, (dtype, shape, _, _) in spans.items()}


def _span(entry: dict) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first and last byte of a header's entry; raises TypeError or ValueError for anything else."""
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or not all(isinstance(n, int) for n in (*shape, start, end)):
        raise TypeError(f"dtype {dtype}, shape {shape}, data_offsets {start}, {end}")
    return dtype, shape, start, end


def _unpickle(file: Path) -> dict[str, Tensor]:
    """Published RL checkpoints are pickles; weights_only refuses everything but tensors. We never write them."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, struct.error) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{file} cannot be read as plain tensors ({reason})") from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{file} is not a table of named tensors; pass the file of the model's weights alone")
    return content


def _word(dtype: torch.dtype) -> str:
    """safetensors' word for a torch dtype."""
    kind = "F" if dtype.is_floating_point else "I"
    known = {torch.bfloat16: "BF16", torch.bool: "BOOL", torch.uint8: "U8"}
    return known.get(dtype, f"{kind}{8 * dtype.itemsize}")
