"""Rank, scale and targets of LoRA adapters, without torch: from the config or from a peft folder, and their size.

`files.lora` attaches such adapters to a network and moves them in and out of folders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlinf.errors import UserError, did_you_mean
from rlinf.models.config import ModelConfig, is_placeholder
from rlinf.models.files.policy_folder import read_json
from rlinf.models.nn.sizes import Layer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# What other kinds of LoRA set in adapter_config.json, and the values that leave it the plain kind.
_PLAIN: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out"), (None, False)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters"), (None, {}, [])),
    **dict.fromkeys(("layers_to_transform", "layer_replication", "trainable_token_indices"), (None, {}, [])),
    **dict.fromkeys(("exclude_modules", "alora_invocation_tokens", "arrow_config"), (None, [])),
}


@dataclass(frozen=True)
class LoraSettings:
    """Rank, scale and targets of a set of adapters."""

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...] | None  # names or endings of layers; None: every linear layer
    pattern: str | None = None  # a regular expression for whole names instead of `targets`
    folder: Path | None = None  # where the adapters themselves lie; None: they start fresh

    @classmethod
    def from_config(cls, cfg: ModelConfig) -> Self:
        """The adapters of a model block: those that `model_path` or `lora_path` hold, else fresh ones."""
        given = (None if is_placeholder(p) else p for p in (cfg.model_path, cfg.lora_path))  # `plan` counts without
        model, own = (None if p is None else Path(p).expanduser() for p in given)
        if own is not None and not has_adapters(own):
            raise UserError(f"actor.model.lora_path={own} holds no {CONFIG_FILE}, so it is no adapter folder")
        if model is not None and has_adapters(model):
            if own is not None:
                raise UserError(
                    f"actor.model.model_path={model} holds adapters already, and actor.model.lora_path={own} names "
                    "others; set lora_path to null, or model_path to a plain base"
                )
            return cls.from_folder(model)
        if own is not None:
            if model is None:
                raise UserError(
                    f"actor.model.lora_path={own} needs the weights under its adapters: set actor.model.model_path to "
                    f"them (recorded: {recorded_base(own)}), or to {own} instead of lora_path if rlinf saved it"
                )
            return cls.from_folder(own)
        if cfg.lora_rank < 1:
            raise UserError(f"actor.model.lora_rank={cfg.lora_rank} must be at least 1")
        if not 0.0 <= cfg.lora_dropout < 1.0:
            raise UserError(f"actor.model.lora_dropout={cfg.lora_dropout} must lie in [0, 1)")
        names = (cfg.lora_targets,) if isinstance(cfg.lora_targets, str) else tuple(cfg.lora_targets)
        if not names or not all(names):
            raise UserError(
                f"actor.model.lora_targets={cfg.lora_targets!r} names no layer; give names or endings, or {ALL_LINEAR}"
            )
        alpha = cfg.lora_rank if cfg.lora_alpha is None else cfg.lora_alpha
        if alpha <= 0:
            raise UserError(f"actor.model.lora_alpha={alpha} must be positive, or null for the rank")
        return cls(cfg.lora_rank, alpha, cfg.lora_dropout, None if names == (ALL_LINEAR,) else names)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """What the adapter_config.json of `folder` says; kinds of LoRA that are not the plain one are refused."""
        path = folder / CONFIG_FILE
        content: dict[str, Any] = read_json(path)
        for key, plain in _PLAIN.items():
            if content.get(key, plain[0]) not in plain:
                raise UserError(f"{path}: {key}={content[key]!r} is not supported; only plain LoRA is")
        content = {"r": None, "lora_alpha": None, "target_modules": None, "lora_dropout": 0.0} | content
        rank, alpha, targets, dropout = (content[k] for k in ("r", "lora_alpha", "target_modules", "lora_dropout"))
        for key, value, good, rule in (
            ("r", rank, isinstance(rank, int) and _positive(rank), "a whole number of at least 1"),
            ("lora_alpha", alpha, _positive(alpha), "a positive number"),
            ("lora_dropout", dropout, dropout == 0 or (_positive(dropout) and dropout < 1), "a number in [0, 1)"),
            ("target_modules", targets, _names_layers(targets), "a list of layer names, or a regular expression"),
        ):
            if not good:
                raise UserError(f"{path}: {key}={str(value)[:60]} must be {rule}")
        if isinstance(targets, str):
            return cls(rank, alpha, float(dropout), None, None if targets == ALL_LINEAR else targets, folder)
        return cls(rank, alpha, float(dropout), tuple(targets), None, folder)

    def select(self, layers: Iterable[Layer]) -> list[Layer]:
        """The layers that get adapters; a target that names none of them is an error."""
        layers = list(layers)
        chosen = [layer for layer in layers if self._selects(layer)]
        lost = [t for t in self.targets or () if not any(n == t or n.endswith(f".{t}") for n, *_ in chosen)]
        if chosen and (self.folder is not None or not lost):
            self._check_rank(chosen)
            return chosen
        endings = sorted({layer.name.rpartition(".")[2] for layer in layers})
        wanted = self.pattern or shortened(lost) or ALL_LINEAR
        near = next(filter(None, (did_you_mean(t, endings) for t in lost)), "")
        key = "actor.model.lora_targets" if self.folder is None else f"{self.folder / CONFIG_FILE}: target_modules"
        raise UserError(f"{key}: {wanted} names no layer of this model{near}; endings: {', '.join(endings)}")

    def num_parameters(self, layers: Iterable[Layer]) -> int:
        """Numbers in the adapters of these layers."""
        return sum(self.rank * (layer.inputs + layer.outputs) for layer in self.select(layers))

    def _selects(self, layer: Layer) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, layer.name) is not None
        if self.targets is None:
            return layer.linear
        return layer.name in self.targets or layer.name.endswith(tuple(f".{t}" for t in self.targets))

    def _check_rank(self, chosen: list[Layer]) -> None:
        """Refuse a rank that no layer can use: it was mistyped, and may not fit into memory."""
        largest = max(min(layer.inputs, layer.outputs) for layer in chosen)
        if self.rank > largest:
            key = "actor.model.lora_rank" if self.folder is None else f"{self.folder / CONFIG_FILE}: r"
            raise UserError(f"{key}={self.rank} must be at most {largest}, the full rank of the largest adapted layer")


def has_adapters(folder: Path) -> bool:
    """Whether a policy folder keeps its training result as adapters."""
    return (folder / CONFIG_FILE).is_file()


def recorded_base(folder: Path) -> Any:
    """What a folder's adapter_config.json says of where the weights under its adapters lie; None: nothing."""
    return read_json(folder / CONFIG_FILE).get("base_model_name_or_path")


def shortened(names: Sequence[str], n: int = 4) -> str:
    """The first names of a list, for errors."""
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _names_layers(targets: object) -> bool:
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error:
            return False
        return bool(targets)
    return isinstance(targets, list) and bool(targets) and all(isinstance(t, str) and t for t in targets)
