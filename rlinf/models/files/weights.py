"""Weights between a module and a checkpoint folder: safetensors, sharded or not, strict about every name and shape.

A load is prepared before it is run: every file is found whole and every name, shape and dtype is compared first, so
that a bad checkpoint leaves the module as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from rlinf.errors import UserError
from rlinf.models.files.lora_settings import shortened
from rlinf.models.files.policy_folder import read_json
from rlinf.models.files.tensor_files import Header, open_tensors, read_headers

Tensor = torch.Tensor
Rename = Callable[[str], str | None]  # a stored name -> the module's name of that tensor; None: it is not needed
SideFiles = Sequence[tuple[Path, str]]  # further files of weights, each with a prefix for its names
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 << 30
_SINGLES = (SINGLE, "model_state_dict/full_weights.pt", "actor/model_state_dict/full_weights.pt", "pytorch_model.bin")
_INDICES = (INDEX, "pytorch_model.bin.index.json")
_FLOATS = ("F64", "F32", "F16", "BF16")  # stored dtypes that may be cast to any float
_ADAPTER = re.compile(r"\.(lora_[AB])(?:\.\w+)?\.weight$")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what its header says."""

    file: Path
    name: str  # with the prefix of its file, if that has one
    key: str  # its name in the file
    header: Header
    side: bool  # a side file's tensors replace those of the main files


@dataclass(frozen=True)
class PreparedLoad:
    """A load that was found to fit and has not happened yet."""

    copies: list[tuple[Tensor, StoredTensor]]
    missing: set[str]  # optional names that were not found

    def run(self) -> None:
        """Copy every tensor, cast to the dtype of its target."""
        for file in {stored.file for _, stored in self.copies}:
            with torch.no_grad(), open_tensors(file) as read:
                for target, stored in self.copies:
                    if stored.file == file:
                        target.copy_(read(stored.key))


def prepare_load(
    targets: dict[str, Tensor],
    source: Path,
    *,
    rename: Rename = lambda name: name,
    optional: tuple[str, ...] = (),
    side: SideFiles = (),
) -> PreparedLoad:
    """Check whether a folder or file fits `targets`, tensors by their names without LoRA (`plain_state`).

    Names that start with an entry of `optional` may be missing, all of that entry together (they keep their values),
    and may be left over; any other difference is an error. So may LoRA adapters. Tensors of `side` files win.
    """
    copies: dict[str, StoredTensor] = {}
    unknown = []
    for stored in _stored(source, side):
        name = _renamed(stored.name, rename)
        if name is None:
            continue
        if name not in targets:
            if not name.startswith(optional):
                unknown.append(stored.name)
            continue
        _check_fits(stored, targets[name])
        if name in copies and not stored.side:
            _check_equal(copies[name], stored)
        copies[name] = stored
    if unknown:
        hint = _adapter_hint(targets) if any(map(_is_adapter, unknown)) else ""
        raise UserError(f"{source} holds {len(unknown)} tensors this model does not have: {shortened(unknown)}{hint}")
    missing = targets.keys() - copies.keys()
    groups = {f"{prefix}*": [n for n in targets if n.startswith(prefix) and not _is_adapter(n)] for prefix in optional}
    groups["the LoRA adapters"] = [name for name in targets if _is_adapter(name)]
    for label, group in groups.items():
        lost = sorted(missing.intersection(group))
        if 0 < len(lost) < len(group):
            raise UserError(f"{source} holds only a part of {label}: {shortened(lost)} are missing")
    required = sorted(name for name in missing if not name.startswith(optional) and not _is_adapter(name))
    if required:
        raise UserError(f"{source} lacks {len(required)} tensors of this model: {shortened(required)}")
    return PreparedLoad([(targets[name], stored) for name, stored in copies.items()], missing)


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """A module's tensors by the names they have without LoRA; adapters as `<layer>.lora_A.weight`."""
    return {plain_name(name): tensor for name, tensor in module.state_dict().items()}


def plain_name(name: str) -> str:
    """The name of a tensor as if its layer were not adapted; of an adapter as peft stores it."""
    return _ADAPTER.sub(r".\1.weight", name.replace(".base_layer.", "."))


def weight_files(source: Path) -> list[Path]:
    """The files that hold the weights of `source`, a folder or one such file."""
    if source.is_file():
        return [source]
    if (index := _first(source, _INDICES)) is not None:
        shards = sorted(set(_weight_map(index).values()))
        lost = [shard for shard in shards if not (source / shard).is_file()]
        if lost:
            raise UserError(f"{source} lacks {shortened(lost)}, named in {index.name}; the copy is incomplete")
        return [source / shard for shard in shards]
    if (single := _first(source, _SINGLES)) is not None:
        return [single]
    raise UserError(f"{source} holds no weights: expected {SINGLE} or {INDEX}")


def save_weights(tensors: dict[str, Tensor], folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `tensors` as model.safetensors, or as shards with an index when they exceed `max_shard_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    names = {}
    for i, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        # One shard at a time goes to the CPU: a network need not fit there as a whole.
        save_tensors({name: tensors[name] for name in shard}, folder / file)
        names.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": names}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write one safetensors file; the tensors need not lie on the CPU."""
    copies = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(copies, file, metadata={"format": "pt"})


def _is_adapter(name: str) -> bool:
    """Whether a tensor belongs to LoRA."""
    return _ADAPTER.search(name) is not None


def _stored(source: Path, side: SideFiles) -> Iterator[StoredTensor]:
    """Every tensor of a folder or file, and of the side files, each name once and where the index says."""
    found: dict[str, Path] = {}
    for file in weight_files(source):
        for name, header in read_headers(file).items():
            if name in found:
                raise UserError(f"{name} is stored twice: in {found[name]} and in {file}")
            found[name] = file
            yield StoredTensor(file, name, name, header, False)
    if (index := _first(source, _INDICES)) is not None:
        for name, shard in _weight_map(index).items():
            if found.get(name) != source / shard:
                raise UserError(f"{source / shard} lacks {name}, which {index.name} says it holds")
    for file, prefix in side:
        for key, header in read_headers(file).items():
            yield StoredTensor(file, prefix + key, key, header, True)


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that `folder` has; None where it has none of them, or is a file itself."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _weight_map(index: Path) -> dict[str, str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UserError(f"{index} cannot be read as an index of shards: weight_map must name a file per tensor")
    for shard in shards.values():
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise UserError(f"{index} names {shard!r}: shards must lie in its own folder")
    return shards


def _renamed(stored: str, rename: Rename) -> str | None:
    """The target of a stored name, which may carry the marks of a peft model."""
    name = plain_name(stored.removeprefix("base_model.model."))
    adapter = _ADAPTER.search(name)
    if adapter is None:
        return rename(name)
    layer = rename(f"{name[: adapter.start()]}.weight")
    return None if layer is None else f"{layer.removesuffix('.weight')}.{adapter[1]}.weight"


def _check_fits(stored: StoredTensor, target: Tensor) -> None:
    shape, dtype = stored.header
    if shape != tuple(target.shape):
        raise UserError(
            f"{stored.file}: {stored.name} has shape {list(shape)}, the model expects "
            f"{list(target.shape)}; the checkpoint is of another size or configuration"
        )
    if (dtype in _FLOATS) != target.is_floating_point():
        raise UserError(
            f"{stored.file}: {stored.name} is stored as {dtype}, the model expects {target.dtype}; "
            "quantised weights must be converted to a float type first"
        )


def _check_equal(a: StoredTensor, b: StoredTensor) -> None:
    """Two stored names that mean one tensor, as a tied embedding, must agree."""
    with ExitStack() as files:
        first, second = (files.enter_context(open_tensors(s.file))(s.key) for s in (a, b))
        coarser = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(first.to(coarser), second.to(coarser)):
            raise UserError(f"{b.file}: {a.name} and {b.name} are one tensor in this model, but their values differ")


def _shards(tensors: dict[str, Tensor], limit: int) -> list[list[str]]:
    """Names by shard, in order; a tensor larger than the limit has a shard of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _adapter_hint(targets: dict[str, Tensor]) -> str:
    if any(map(_is_adapter, targets)):
        return "; here these layers are frozen, or not among actor.model.lora_targets"
    return "; for its LoRA adapters set actor.model.is_lora=True, or merge them with `rlinf export`"
