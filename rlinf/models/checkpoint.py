"""Weights in and out of checkpoint folders: safetensors (sharded or not), strict about every name and shape."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from rlinf.errors import UserError

Tensor = torch.Tensor
Rename = Callable[[str], str | None]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 << 30
_IMPORTS = ("model_state_dict/full_weights.pt", "actor/model_state_dict/full_weights.pt")


def load_weights(
    module: nn.Module, source: Path, *, rename: Rename = lambda name: name, optional: tuple[str, ...] = ()
) -> set[str]:
    """Copy the tensors of a folder or file into `module`, cast to its dtypes; returns the optional names not found.

    `rename` maps a stored name to the module's (None: skip it). Names that start with an entry of `optional` may be
    missing (they keep their values) and may be left over; any other difference is an error.
    """
    targets = module.state_dict()
    missing, unknown = set(targets), []
    with torch.no_grad():
        for stored, tensor in read_tensors(source):
            name = rename(stored)
            if name is None:
                continue
            if name not in targets:
                if not name.startswith(optional):
                    unknown.append(stored)
                continue
            if tensor.shape != targets[name].shape:
                raise UserError(
                    f"{source}: {stored} has shape {list(tensor.shape)}, the model expects "
                    f"{list(targets[name].shape)}; the checkpoint is of another size or configuration"
                )
            targets[name].copy_(tensor)
            missing.discard(name)
    if unknown:
        raise UserError(f"{source} holds {len(unknown)} tensors this model does not have: {_some(unknown)}")
    required = sorted(name for name in missing if not name.startswith(optional))
    if required:
        raise UserError(f"{source} lacks {len(required)} tensors of this model: {_some(required)}")
    return missing


def read_tensors(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, one at a time, of a folder in HF layout, a .safetensors file or an imported .pt."""
    for file in weight_files(source):
        if file.suffix == ".pt":
            yield from _read_pickle(file).items()
            continue
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read ({error}); copy it again") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """Published RL checkpoints are pickles; weights_only refuses everything but tensors. We never write them."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"{file} cannot be read as plain tensors ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{file} is not a table of named tensors; pass the file of the model's weights alone")
    return content


def weight_files(source: Path) -> list[Path]:
    """The files that hold the weights of `source`."""
    if source.is_file():
        return [source]
    if (source / INDEX).is_file():
        shards = sorted(set(json.loads((source / INDEX).read_text())["weight_map"].values()))
        lost = [name for name in shards if not (source / name).is_file()]
        if lost:
            raise UserError(f"{source} lacks {_some(lost)}, named in {INDEX}; the copy is incomplete")
        return [source / name for name in shards]
    for name in (SINGLE, *_IMPORTS):
        if (source / name).is_file():
            return [source / name]
    raise UserError(f"{source} holds no weights: expected {SINGLE} or {INDEX}")


def save_weights(tensors: dict[str, Tensor], folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `tensors` as model.safetensors, or as shards with an index when they exceed `max_shard_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors.items(), max_shard_bytes))
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    names = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(shard, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1) + "\n")


def _shards(items: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in items:
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().contiguous().cpu()
        size += num_bytes
    yield shard


def _some(names: list[str], n: int = 4) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")
