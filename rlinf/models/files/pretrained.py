"""Saving and loading that all policies share: full weights, or adapters beside a base that stays where it is.

A folder with adapters holds adapter_config.json and adapter_model.safetensors (peft's layout), heads.safetensors, and
model.safetensors with the base itself only when no other folder keeps it; a base elsewhere is pinned by base.json.
Loading checks everything before it copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from rlinf.errors import UserError
from rlinf.models.action_path import ActionPath
from rlinf.models.config import ModelConfig
from rlinf.models.files import lora, policy_folder, tokenizers, weights
from rlinf.models.files.lora_settings import CONFIG_FILE, has_adapters, recorded_base
from rlinf.models.files.policy_folder import CONFIG, SETTINGS, Fingerprint, fingerprint_difference
from rlinf.models.files.weights import PreparedLoad, Rename, SideFiles, prepare_load
from rlinf.models.nn.graphs import Recorder
from rlinf.models.policy import Policy

Tensor = torch.Tensor
HEADS_FILE = "heads.safetensors"
_STATISTICS = ("dataset_statistics.json", "**/norm_stats.json")


class PretrainedPolicy(Policy):
    """A policy made of a network, `self.net`, and small parts beside it whose names start with one of `heads`."""

    cfg: ModelConfig
    net: nn.Module
    heads: tuple[str, ...] = ("value_head.",)  # an imitation checkpoint lacks them
    base_folder: Path | None = None  # where the weights under the adapters were taken from, if they can be again
    base_fingerprint: Fingerprint | None = None  # of its files, as they were then
    _act: Recorder

    def __init__(self, cfg: ModelConfig, tokenizer_file: Path) -> None:
        super().__init__()
        self.cfg, self.spec = cfg, cfg.spec()
        self.tokenizer_model = tokenizer_file.read_bytes()  # kept: the folder may be gone when the policy is saved

    @classmethod
    def build(cls, cfg: ModelConfig, device: torch.device, *, seed: int = 0) -> Self:
        """From `cfg.model_path`, or from random weights drawn from `seed`."""
        folder = _model_folder(cfg)
        if folder is None and cfg.size == "base":
            warnings.warn("actor.model.model_path is null: the base model starts from random weights", stacklevel=2)
        self = cls.unloaded(cfg, device, folder)
        self.draw_weights(torch.Generator(device).manual_seed(seed), net=folder is None)
        if cfg.is_lora:
            self.attach_adapters(seed, frozen=self.unadapted())
        if folder is not None:
            self.load_pretrained(folder)
        return self

    @classmethod
    def action_path(cls, cfg: ModelConfig) -> ActionPath:
        """The processor of `cfg.model_path` with its statistics, or one that changes nothing where there is none."""
        folder = _model_folder(cfg)
        path = cls.unloaded_path(cfg, folder)
        if folder is not None:
            policy_folder.refuse_run_folder(folder)
            policy_folder.check_model_type(folder, cfg.model_type)
            adapters = Path(cfg.lora_path).expanduser() if cfg.is_lora and cfg.lora_path is not None else None
            path.prepare(_first_with_statistics(adapters, folder))()
        return path

    def forget_recordings(self) -> None:
        """Free the recordings of `predict`; the next call records anew."""
        self._act.clear()

    # ------------------------------------------------------------------ what a model adds
    @classmethod
    def unloaded(cls, cfg: ModelConfig, device: torch.device, folder: Path | None) -> Self:
        """The policy with uninitialised weights; what must be known of a folder before its weights is read here."""
        raise NotImplementedError

    @classmethod
    def unloaded_path(cls, cfg: ModelConfig, folder: Path | None) -> Any:
        """Its `ActionPath`, an object that reads a folder's statistics with `prepare(folder)()`."""
        raise NotImplementedError

    def draw_weights(self, generator: torch.Generator, *, net: bool) -> None:
        """Random weights of the heads, which a checkpoint may lack, and of the network where there is none (`net`)."""
        raise NotImplementedError

    def unadapted(self) -> tuple[str, ...]:
        """Parts of the network, by the beginning of their names, that LoRA leaves alone."""
        return ()

    def published_names(self, side: SideFiles = ()) -> Rename:
        """From any published name to this policy's (without LoRA); None for a tensor it does not need.

        Parts that `side` files hold are not needed from the usual ones.
        """
        raise NotImplementedError

    def config_json(self) -> dict[str, Any]:
        """What config.json says of the model."""
        raise NotImplementedError

    def save_extras(self, folder: Path) -> None:
        """Write statistics, and what else is not weights, settings or tokenizer."""
        raise NotImplementedError

    def prepare_extras(self, folder: Path) -> Callable[[], None]:
        """Read and check statistics and whatever else is not weights; the function returned takes them over."""
        raise NotImplementedError

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder that says it holds another policy."""
        policy_folder.refuse_run_folder(folder)
        policy_folder.check_model_type(folder, self.cfg.model_type)

    def side_files(self, folder: Path) -> SideFiles:
        """Files that hold weights besides the usual ones, each with the prefix of its names; they win over those."""
        return ()

    def _prepare_weights(self, source: Path, side: SideFiles = ()) -> PreparedLoad:
        """Check whether the full weights of a folder or file fit this policy."""
        targets, names = weights.plain_state(self), self.published_names(side)
        return prepare_load(targets, source, rename=names, optional=self.heads, side=side)

    # ------------------------------------------------------------------ adapters
    def attach_adapters(self, seed: int, *, frozen: tuple[str, ...] = ()) -> None:
        """LoRA as the config says, on a network that has its device and dtypes; layers below `frozen` get none."""
        generator = torch.Generator().manual_seed(seed)
        lora.attach(self.net, self.cfg, generator, frozen=frozen, rename=self._net_names())
        self.eval()  # dropout is for imitation: RL must score an action as it was sampled

    # ------------------------------------------------------------------ saving
    def save_pretrained(self, folder: Path) -> None:
        """Write what `load_pretrained` reads: full weights, or adapters and heads where the base lies elsewhere."""
        if not self.cfg.is_lora:
            self.export(folder)
            return
        self._save_settings(folder, is_lora=True)
        base = self.base_folder
        if base is not None and policy_folder.will_be_deleted(base, folder):
            base = None
        lora.save_adapters(self.net, folder, None if base is None else str(base))
        if base is None:
            weights.save_weights(lora.base_state(self.net), folder)
        elif self.base_fingerprint is not None:
            policy_folder.save_fingerprint(folder, self.base_fingerprint)
        if heads := self._head_tensors():
            weights.save_tensors(heads, folder / HEADS_FILE)

    def export(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a plain checkpoint in the layout of Hugging Face, adapters merged into the weights.

        With `dtype`, floats are stored as that; a policy that loads them computes in its own precision all the same.
        """
        self._save_settings(folder, is_lora=False)
        tensors = lora.merged_state(self.net) | self._head_tensors()
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        weights.save_weights(tensors, folder)

    def _save_settings(self, folder: Path, *, is_lora: bool) -> None:
        """Write everything but weights."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_extras(folder)
        (folder / tokenizers.FILE).write_bytes(self.tokenizer_model)
        settings = asdict(replace(self.cfg, model_path=None, lora_path=None, is_lora=is_lora))
        policy_folder.write_json(folder / CONFIG, self.config_json() | {SETTINGS: settings})

    # ------------------------------------------------------------------ loading
    def load_pretrained(self, folder: Path) -> None:
        """Take weights and statistics of a folder; one that does not fit changes nothing."""
        self.check_folder(folder)
        adapters = self._separate_adapters(folder)
        take_extras = self.prepare_extras(_first_with_statistics(adapters, folder))
        self._load(folder, adapters)
        take_extras()

    def load_weights(self, file: Path) -> None:
        """Take the weights of a file or folder; a head it lacks altogether keeps its own."""
        self._load(file)

    def _load(self, source: Path, adapters: Path | None = None) -> None:
        """Take everything of `source`; the heads of a separate folder of `adapters` win."""
        if has_adapters(source):
            loads, base, found = self._prepare_adapted(source)
        else:
            side = self.side_files(source) if source.is_dir() else ()
            loads, base = [self._prepare_weights(source, side)], source.absolute() if source.is_dir() else None
            found = None if base is None else self._fingerprint(base)
        if adapters is not None:
            loads += self._prepare_heads(adapters)
            _warn_of_another_base(adapters, source, found)
        for load in loads:
            load.run()
        self.base_folder, self.base_fingerprint = base, found

    def _separate_adapters(self, folder: Path) -> Path | None:
        """`lora_path`, where the policy is put together from it and a plain `folder`."""
        if not self.cfg.is_lora or self.cfg.lora_path is None or has_adapters(folder):
            return None
        path = Path(self.cfg.lora_path).expanduser()
        self.check_folder(path)
        return path

    def _fingerprint(self, base: Path) -> Fingerprint | None:
        """Of every file the base was read from; only adapters need it."""
        if not self.cfg.is_lora:
            return None
        return policy_folder.fingerprint([*weights.weight_files(base), *(file for file, _ in self.side_files(base))])

    def _prepare_adapted(self, folder: Path) -> tuple[list[PreparedLoad], Path | None, Fingerprint | None]:
        """Base, heads and adapters of a folder that `save_pretrained` wrote; where the base is, and its fingerprint."""
        if not self.cfg.is_lora:
            raise UserError(
                f"{folder} holds LoRA adapters: set actor.model.is_lora=True, or merge them with `rlinf export`"
            )
        base = _base_of(folder)
        loads, found = [], self.base_fingerprint
        if base is None:
            loads.append(self._prepare_weights(folder))
            found = None
        elif base != self.base_folder:  # frozen weights that are already here need not be read again
            loads.append(self._prepare_weights(base, self.side_files(base)))
            found = self._fingerprint(base)
        recorded = policy_folder.recorded_fingerprint(folder)
        changed = None if recorded is None or found is None else fingerprint_difference(recorded, found)
        if changed is not None:
            raise UserError(
                f"{folder} holds adapters of the base {base}, which has changed since they were trained: {changed}; "
                "bring the old base back (to go on with this one, set actor.model.model_path to it and "
                "actor.model.lora_path to the adapters)"
            )
        loads += self._prepare_heads(folder)
        loads.append(lora.prepare_adapters(self.net, folder, rename=self._net_names()))
        return loads, base, found

    def _prepare_heads(self, folder: Path) -> list[PreparedLoad]:
        """The heads beside a folder's adapters, where it has them."""
        file = folder / HEADS_FILE
        if not file.is_file():
            return []
        return [prepare_load(self._head_tensors(), file, rename=self.published_names(), optional=self.heads)]

    def _head_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if name.startswith(self.heads)}

    def _net_names(self) -> Rename:
        """From published names to those inside `self.net`."""
        names = self.published_names()
        return lambda name: (own := names(name)) and own.removeprefix("net.")


def _model_folder(cfg: ModelConfig) -> Path | None:
    """The folder that `model_path` names; None without one."""
    folder = None if cfg.model_path is None else Path(cfg.model_path).expanduser()
    if folder is not None and not folder.is_dir():
        raise UserError(f"actor.model.model_path={cfg.model_path} is not a folder")
    return folder


def _base_of(folder: Path) -> Path | None:
    """The folder of the weights under a folder's adapters; None when they lie in the same one."""
    recorded = recorded_base(folder)
    if not recorded:
        return None
    if not isinstance(recorded, str):
        raise UserError(f"{folder / CONFIG_FILE}: base_model_name_or_path={recorded!r} must be a folder, or null")
    base = Path(recorded).expanduser()
    if not base.is_dir():
        raise UserError(
            f"{folder / CONFIG_FILE}: base_model_name_or_path={recorded} is not a folder here, and the adapters need "
            "it; write its new place there, or set actor.model.model_path to the base and actor.model.lora_path to "
            f"{folder}"
        )
    return base


def _first_with_statistics(adapters: Path | None, folder: Path) -> Path:
    """The adapters' own folder where it holds statistics: they were trained with them."""
    if adapters is not None and any(next(adapters.glob(pattern), None) for pattern in _STATISTICS):
        return adapters
    return folder


def _warn_of_another_base(adapters: Path, base: Path, found: Fingerprint | None) -> None:
    """Warn of adapters on weights they were not trained on: such a policy runs, and is merely bad."""
    recorded, name = policy_folder.recorded_fingerprint(adapters), recorded_base(adapters)
    if recorded is not None and found is not None:
        change = fingerprint_difference(recorded, found)
    elif isinstance(name, str) and Path(name).expanduser().is_dir():
        same = Path(name).expanduser().resolve() == base.resolve()
        change = None if same else "another folder"
    else:
        change = "a base of its own" if name is None and policy_folder.saved_settings(adapters) else None
    if change is not None:
        warnings.warn(
            f"actor.model.lora_path={adapters} was trained on the base {name or adapters}, not on "
            f"actor.model.model_path={base} ({change})",
            stacklevel=4,
        )
