"""One file of named tensors (.safetensors, .pt, .bin): its table of shapes first, the numbers one by one.

Reading the table also finds out whether the file is whole, so that a load can be refused before anything is copied.
"""

from __future__ import annotations

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
_NOT_TENSORS = {  # beginnings of what downloads leave in place of a file
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`",
    b"<!doctype": "a web page; the download failed",
    b"<html": "a web page; the download failed",
}


class Header(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, I64


def read_headers(file: Path) -> dict[str, Header]:
    """Every tensor of a .safetensors, .pt or .bin by name; UserError unless the file is whole and of that kind."""
    _refuse_placeholders(file)
    if file.suffix in PICKLES:
        return {name: Header(tuple(t.shape), _word(t.dtype)) for name, t in _unpickle(file).items()}
    try:
        with safe_open(file, "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
            return {name: Header(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(
            f"{file} cannot be read as safetensors ({reason}; {file.stat().st_size} bytes): it is damaged or was cut "
            "off; copy it again"
        ) from error


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


def _unpickle(file: Path) -> dict[str, Tensor]:
    """Published RL checkpoints are pickles; weights_only refuses everything but tensors. None is ever written."""
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
