"""The optimiser's state on disk: one file, or one per rank that holds a part, read back on any number of ranks.

optimizer.safetensors                  everything
optimizer-00001-of-00002.safetensors   the rows of each tensor that one rank stepped; the header says which they are
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlinf.errors import UserError

Tensor = torch.Tensor
SINGLE = "optimizer.safetensors"
_PART = re.compile(r"optimizer-\d{5}-of-(\d{5})\.safetensors$")
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
    save_file(tensors, folder / _part_name(part, parts), metadata={_ROWS: json.dumps(places)})


def load_state(folder: Path, rows: Mapping[str, Rows]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, cut to the rows wanted of its parameter; none of a parameter without rows."""
    out: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in _parts(folder)]
        for key, pieces in _pieces(files).items():
            want, total = rows.get(_parameter(key)), pieces[0].total
            if want is not None and want.end == want.first:
                continue
            if total is None:
                out[key] = pieces[0].file.get_tensor(key)
                continue
            want = want or Rows(0, total, total)
            if want.total != total:
                raise UserError(
                    f"{folder}: the optimiser's {key} has {total} rows, the parameter {want.total}; "
                    "resume with the run's own settings"
                )
            parts = [piece.read(key, want) for piece in pieces if piece.first < want.end and piece.end > want.first]
            if sum(map(len, parts)) < want.end - want.first:
                raise UserError(f"{folder}: some of the rows {want.first} to {want.end} of {key} are in no file")
            out[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out


class _Piece(NamedTuple):
    """The rows [first, end) of a tensor of `total` rows that lie in one file; `total` is None for a single number."""

    first: int
    end: int
    total: int | None
    file: Any  # safetensors' open file

    def read(self, key: str, want: Rows) -> Tensor:
        """The rows of the tensor that are wanted and lie here."""
        return self.file.get_slice(key)[max(want.first - self.first, 0) : want.end - self.first]


def _pieces(files: Sequence[Any]) -> dict[str, list[_Piece]]:
    """Where the rows of every tensor lie, in order."""
    found: dict[str, list[_Piece]] = {}
    for file in files:
        places = json.loads((file.metadata() or {}).get(_ROWS, "{}"))
        for key in file.keys():  # noqa: SIM118  # safetensors' file is no dict
            shape = file.get_slice(key).get_shape()
            first, total = places.get(_parameter(key), (0, shape[0])) if shape else (0, None)
            found.setdefault(key, []).append(_Piece(first, first + shape[0] if shape else 1, total, file))
    return {key: sorted(pieces, key=lambda piece: piece.first) for key, pieces in found.items()}


def _parameter(key: str) -> str:
    """The parameter of a tensor `<parameter>/<field>`."""
    return key.rsplit("/", 1)[0]


def _parts(folder: Path) -> list[Path]:
    """The files of a checkpoint, all of them."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = [name for path in folder.glob("optimizer-*.safetensors") if (name := _PART.match(path.name))]
    if not found:
        raise UserError(f"{folder} holds no optimiser state: expected {SINGLE}")
    total = int(found[0][1])
    parts = [folder / _part_name(part, total) for part in range(total)]
    for path in parts:
        if not path.is_file():
            raise UserError(f"{folder} lacks {path.name}; the copy is incomplete")
    return parts


def _part_name(part: int, parts: int) -> str:
    return f"optimizer-{part + 1:05d}-of-{parts:05d}.safetensors"
