"""What a checkpoint folder of OpenVLA says beside its weights, in the published files.

config.json holds sizes, preprocessor_config.json pixel statistics, dataset_statistics.json (or config.json's
`norm_stats`) the ranges of actions and robot state that map to [-1, 1].
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from rlinf.errors import UserError, did_you_mean
from rlinf.models.files.policy_folder import CONFIG, check_model_type, read_json_if_there, write_json
from rlinf.models.files.statistics import RANGES, check_columns, fit_columns, read_vector
from rlinf.models.nn.sizes import Rgb
from rlinf.models.prismatic.architecture import Architecture

Tensor = torch.Tensor
Kind = Literal["q99", "bounds"]
Part = Literal["action", "proprio"]
PREPROCESSOR, STATISTICS = "preprocessor_config.json", "dataset_statistics.json"
FIELDS: dict[Kind, tuple[str, str]] = {"q99": RANGES[0], "bounds": RANGES[1]}
ACTION_STD_FLOOR, STATE_STD_FLOOR = 0.05, 0.01  # smallest deviations when statistics are fitted
_EPS = 1e-8
_LENGTH_KEY: dict[Part, str] = {"action": "actor.model.action_dim", "proprio": "the number of state columns"}


# ------------------------------------------------------------------ sizes and pixels
def read_architecture(folder: Path, arch: Architecture) -> Architecture:
    """`arch` with the folder's norm epsilon and pixel statistics; sizes that differ are an error."""
    check_model_type(folder, "openvla", network_only=True)
    config = read_json_if_there(folder / CONFIG)
    text, sizes = config.get("text_config") or {}, config.get("image_sizes")
    if not isinstance(text, dict):
        raise UserError(f"{folder / CONFIG}: text_config={str(text)[:60]} must be an object")
    epsilon = text.get("rms_norm_eps", arch.norm_eps)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float):
        raise UserError(f"{folder / CONFIG}: text_config.rms_norm_eps={str(epsilon)[:60]} must be a number")
    stored = {key: text.get(key) for key in _text_sizes(arch)} | {"n_action_bins": config.get("n_action_bins")}
    stored["image_sizes"] = sizes[0] if isinstance(sizes, list) and sizes else sizes
    wanted = _text_sizes(arch) | {"n_action_bins": arch.num_bins, "image_sizes": arch.image_size}
    for key, value in stored.items():
        if value is not None and value != wanted[key]:
            raise UserError(
                f"{folder / CONFIG} says {key}={value}, this configuration needs {wanted[key]}: other actor.model.size?"
            )
    (dino_mean, siglip_mean), (dino_std, siglip_std) = _pixel_statistics(folder / PREPROCESSOR, arch)
    return replace(
        arch,
        norm_eps=float(epsilon),
        dino=replace(arch.dino, mean=dino_mean, std=dino_std),
        siglip=replace(arch.siglip, mean=siglip_mean, std=siglip_std),
    )


def config_json(arch: Architecture) -> dict[str, Any]:
    """config.json in the published layout; norm_stats stay in dataset_statistics.json beside it."""
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "image_sizes": [arch.image_size] * 2,
        "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": True,
        "n_action_bins": arch.num_bins,
        "text_config": {"model_type": "llama", "rms_norm_eps": arch.norm_eps} | _text_sizes(arch),
        "architecture": asdict(arch),
    }


def preprocessor_json(arch: Architecture) -> dict[str, Any]:
    """preprocessor_config.json in the published layout."""
    towers = (arch.dino, arch.siglip)
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, arch.image_size, arch.image_size]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": [list(tower.mean) for tower in towers],
        "stds": [list(tower.std) for tower in towers],
        "use_fused_vision_backbone": True,
    }


def _text_sizes(arch: Architecture) -> dict[str, int]:
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "intermediate_size": arch.mlp,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.num_heads,
    }


def _pixel_statistics(path: Path, arch: Architecture) -> tuple[tuple[Rgb, Rgb], tuple[Rgb, Rgb]]:
    """Means and deviations of both towers, from the file where it has them."""
    content = read_json_if_there(path)
    towers = (arch.dino, arch.siglip)
    found = []
    for key, own in (("means", [t.mean for t in towers]), ("stds", [t.std for t in towers])):
        rows = content.get(key, own)
        try:
            (a, b, c), (d, e, f) = ((float(x) for x in row) for row in rows)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: {key}={rows!r} must be three numbers for each of two towers") from error
        found.append(((a, b, c), (d, e, f)))
    return found[0], found[1]


# ------------------------------------------------------------------ ranges of actions and state
class ColumnRanges(nn.Module):
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
        """Ranges that change nothing."""
        return cls(-torch.ones(n), torch.ones(n), torch.zeros(n, dtype=torch.bool))

    def normalize(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n] in x's dtype, clipped to [-1, 1]."""
        scaled = self._scaled(x)
        return torch.where(self.mask, scaled.clamp(-1.0, 1.0), x.double()).to(x.dtype)

    def scale(self, x: Tensor) -> Tensor:
        """As `normalize`, but not clipped."""
        return torch.where(self.mask, self._scaled(x), x.double()).to(x.dtype)

    def _scaled(self, x: Tensor) -> Tensor:
        return 2.0 * (x.double() - self.low) / (self.high - self.low + _EPS) - 1.0

    def unnormalize(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n] in x's dtype."""
        scaled = 0.5 * (x.double() + 1.0) * (self.high - self.low + _EPS) + self.low
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
        for path, inside in ((folder / CONFIG, "norm_stats"), (folder / STATISTICS, None)):
            content = read_json_if_there(path)
            found = content.get(inside) or {} if inside else content
            if not isinstance(found, dict) or not all(isinstance(e, dict) for e in found.values()):
                raise UserError(f"{path}: statistics must be an object per data set key")
            entries |= found
            files |= dict.fromkeys(found, path)
        return cls(entries, str(folder), files)

    @classmethod
    def fit(cls, key: str, states: Tensor | None, actions: Tensor) -> Self:
        """Of a data set: states [M, S], actions [M, A] row by row."""
        entry: dict[str, Any] = {"action": _fit(actions, ACTION_STD_FLOOR)}
        if states is not None:
            entry["proprio"] = _fit(states, STATE_STD_FLOOR)
        return cls({key: entry | {"num_transitions": len(actions)}}, f"statistics of {key}")

    def resolve(self, unnorm_key: str | None) -> str:
        """The key as stored; null takes the only one. A wrong key lists the valid ones.

        `<key>_no_noops` counts, `<key>_1k` beside `<key>` as RoboTwin's guide and checkpoints write it, and so does the
        key of a checkpoint that has no other.
        """
        if not self.entries:
            raise UserError(
                f"{self.origin} holds no action statistics: expected norm_stats in config.json, or {STATISTICS}"
            )
        valid = ", ".join(self.entries)
        if unnorm_key is None and len(self.entries) > 1:
            raise UserError(f"actor.model.unnorm_key is null, but {self.origin} has several; set one of: {valid}")
        name = unnorm_key or ""
        for key in (name, f"{name}_no_noops", f"{name}_1k", name.removesuffix("_1k")):
            if key in self.entries:
                return key
        if len(self.entries) == 1:
            return valid
        near = did_you_mean(name, self.entries)
        raise UserError(f"actor.model.unnorm_key={unnorm_key!r} is not in {self.origin}{near}; it has: {valid}")

    def load(self, unnorm_key: str | None, part: Part, *, kind: Kind, columns: int) -> ColumnRanges:
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
        return ColumnRanges(low, high, used)

    def save(self, folder: Path) -> None:
        """Write dataset_statistics.json."""
        write_json(folder / STATISTICS, self.entries)


def _fit(rows: Tensor, floor: float) -> dict[str, list]:
    """All published fields of rows [M, n]; every column is normalised."""
    fields = {name: values.tolist() for name, values in fit_columns(rows, floor=floor).items()}
    return fields | {"mask": [True] * rows.shape[1]}
