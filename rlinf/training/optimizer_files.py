"""The optimiser's state on disk: one file, or one per rank that holds a part, read back on any number of ranks.

optimizer.safetensors                  everything
optimizer-00001-of-00002.safetensors   the rows of each tensor that one rank stepped; the header says which they are
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlinf.errors import UserError
from rlinf.models.files.tensor_files import read_headers

Tensor = torch.Tensor
SINGLE = "optimizer.safetensors"
_SHARD = re.compile(r"optimizer-(\d{5})-of-(\d{5})\.safetensors$")
_ROWS = "rows"  # header entry: JSON of parameter -> [first row, rows of the whole]


class Rows(NamedTuple):
    """Rows [first, end) of a parameter that has `total` of them."""

    first: int
    end: int
    total: int


def save_state(folder: Path, tensors: dict[str, Tensor], rows: Mapping[str, Rows], *, part: int, parts: int) -> None:
    """Write part `part` of `parts`. Tensors are named `<parameter>/<field>`; a parameter not in `rows` is whole."""
    if parts == 1:
        save_file(tensors, folder / SINGLE)
        return
    if part > 0:  # what every rank holds is in the first file
        tensors = {key: tensor for key, tensor in tensors.items() if _parameter(key) in rows}
    names = set(map(_parameter, tensors))
    places = {name: [place.first, place.total] for name, place in rows.items() if name in names}
    file = folder / f"optimizer-{part + 1:05d}-of-{parts:05d}.safetensors"
    save_file(tensors, file, metadata={_ROWS: json.dumps(places)})


def load_state(folder: Path, rows: Mapping[str, Rows]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, cut to the rows wanted of its parameter; none of a parameter without rows."""
    out: dict[str, Tensor] = {}
    with ExitStack() as files:
        for key, pieces in _pieces(folder, files).items():
            want = rows.get(_parameter(key))
            if want is None or (want.end > want.first and not pieces[0].shape):
                out[key] = _joined(key, pieces, 0, pieces[0].total)
            elif want.end > want.first:
                if want.total != pieces[0].total:
                    raise UserError(
                        f"{folder}: the optimiser's {key} has {pieces[0].total} rows, the parameter {want.total}; "
                        "resume with the run's own settings"
                    )
                out[key] = _joined(key, pieces, want.first, want.end)
    return out


def _parameter(key: str) -> str:
    return key.rsplit("/", 1)[0]


@dataclass(frozen=True)
class _Piece:
    file: Any  # safetensors' open file
    path: Path
    shape: tuple[int, ...]  # of the stored rows; () for a number
    first: int
    total: int

    def read(self, key: str, first: int, end: int) -> Tensor:
        """Rows of the whole tensor that lie in this piece."""
        if not self.shape:
            return self.file.get_tensor(key)
        return self.file.get_slice(key)[max(first - self.first, 0) : max(end - self.first, 0)]


def _pieces(folder: Path, files: ExitStack) -> dict[str, list[_Piece]]:
    """Where the rows of every tensor lie, in order."""
    found: dict[str, list[_Piece]] = {}
    for path in _parts(folder):
        headers = read_headers(path)
        file = files.enter_context(safe_open(path, "pt"))
        places = json.loads((file.metadata() or {}).get(_ROWS, "{}"))
        for key, (shape, _) in headers.items():
            whole = (0, shape[0] if shape else 1)
            first, total = places.get(_parameter(key), whole) if shape else whole
            found.setdefault(key, []).append(_Piece(file, path, shape, first, total))
    return {key: sorted(pieces, key=lambda piece: piece.first) for key, pieces in found.items()}


def _parts(folder: Path) -> Iterator[Path]:
    """The files of a checkpoint, all of them."""
    if (folder / SINGLE).is_file():
        yield folder / SINGLE
        return
    parts = sorted(path for path in folder.glob("optimizer-*.safetensors") if _SHARD.match(path.name))
    if not parts:
        raise UserError(f"{folder} holds no optimiser state: expected {SINGLE}")
    total = int(_SHARD.match(parts[0].name)[2])  # type: ignore[index]
    for i in range(1, total + 1):
        path = folder / f"optimizer-{i:05d}-of-{total:05d}.safetensors"
        if not path.is_file():
            raise UserError(f"{folder} lacks {path.name}; the copy is incomplete")
        yield path


def _joined(key: str, pieces: list[_Piece], first: int, end: int) -> Tensor:
    """Rows [first, end) of the tensor, from as many pieces as they lie in."""
    if not pieces[0].shape:
        return pieces[0].read(key, first, end)
    parts, at = [], first
    for piece in pieces:
        if piece.first <= at < min(end, piece.first + piece.shape[0]):
            parts.append(piece.read(key, at, end))
            at += len(parts[-1])
    if at < end:
        raise UserError(f"{pieces[0].path.parent}: rows {at} to {end} of the optimiser's {key} are in no file")
    return parts[0] if len(parts) == 1 else torch.cat(parts)
