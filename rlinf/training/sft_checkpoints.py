"""What `rlinf sft` saves while it trains, beside its output, and how it goes on from there.

<output>-checkpoints/global_step_N/
  actor/model/...               the policy in HF layout: `rlinf eval runner.ckpt_path=...` opens it
  actor/optimizer.safetensors   Adam's state, fp32 copies of the weights, random states, the layer of sft.state_loss
  below.safetensors             with sft.stop_at_most: the last weights below the band
  sft.json                      step, curves, and the settings that a continued training shares
  manifest.json                 SHA-256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlinf.config.schema import Config
from rlinf.errors import UserError
from rlinf.models.policy import Policy
from rlinf.storage.step_checkpoint import Manifest, new_checkpoint, numbered, settings
from rlinf.training.optim import MasterAdamW, load_optimizer_tensors, optimizer_tensors
from rlinf.training.optimizer_files import load_state, save_state

Tensor = torch.Tensor
STATE, BELOW, OWN = "sft.json", "below.safetensors", "@"
# Keys of `sft` in which a training and the one that continues it may differ: paths, lengths, what is shown and kept.
MAY_DIFFER = (
    *("dataset", "output", "log_interval", "save_interval", "keep_checkpoints"),
    *("eval_interval", "eval_trials", "stop_at_success", "stop_at_most"),
)


def checkpoints_of(output: Path) -> Path:
    """The folder of the checkpoints of the training that fills `output`."""
    return output.with_name(f"{output.name}-checkpoints")


def check_unfinished(output: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse to begin beside the checkpoints of an earlier training, and a wish to continue what is finished."""
    if overwrite and resume:
        raise UserError("--resume continues a training and --overwrite begins anew: give one of them")
    if resume and (output / STATE).is_file():
        raise UserError(f"sft.output={output} is finished: nothing is left to continue; choose another folder")
    saved = numbered(checkpoints_of(output))
    if saved and not (overwrite or resume):
        raise UserError(
            f"sft.output={output}: {saved[-1]} is of an earlier training; continue it with --resume, "
            "replace it with --overwrite, or choose another folder"
        )


class Checkpoints:
    """Those of one training."""

    def __init__(self, cfg: Config, data: Mapping[str, Any], *, resume: bool, warn: Callable[[str], None]) -> None:
        """`data` describes the dataset; with `resume` the newest whole checkpoint, if any, is `found`."""
        self.root, self.keep = checkpoints_of(Path(cfg.sft.output)), cfg.sft.keep_checkpoints
        self.settings = _settings(cfg, data)
        self.hash = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]
        self.found = self._newest(warn) if resume else None
        if self.found is not None:
            self._compare(self.found)

    def save(
        self,
        step: int,
        policy: Policy,
        optimizer: MasterAdamW,
        *,
        tensors: Mapping[str, Tensor],
        below: Mapping[str, Tensor],
        progress: Mapping[str, Any],
    ) -> Path:
        """Save a step; an earlier training's checkpoints, which this one replaces, go with its first."""
        if self.found is None:
            shutil.rmtree(self.root, ignore_errors=True)
        with new_checkpoint(self.root, step, config_hash=self.hash, keep=self.keep) as folder:
            policy.save_pretrained(folder / "actor/model")
            own = {f"{OWN}{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_state(folder / "actor", optimizer_tensors(optimizer) | own, {}, part=0, parts=1)
            if below:
                save_file({name: tensor.cpu().contiguous() for name, tensor in below.items()}, folder / BELOW)
            (folder / STATE).write_text(json.dumps({"step": step, "settings": self.settings, **progress}, indent=1))
        self.found = self.root / f"global_step_{step}"
        return self.found

    def load(
        self, policy: Policy, optimizer: MasterAdamW
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        """Take weights and optimiser of `found`; the progress, tensors and weights below the band of `save`."""
        assert self.found is not None
        policy.load_pretrained(self.found / "actor/model")
        tensors = load_state(self.found / "actor", {})
        own = {name.removeprefix(OWN): tensors.pop(name) for name in list(tensors) if name.startswith(OWN)}
        load_optimizer_tensors(optimizer, tensors)
        below = self.found / BELOW
        return json.loads((self.found / STATE).read_text()), own, load_file(below) if below.is_file() else {}

    def finish(self) -> None:
        """The output is complete: delete the checkpoints, unless all are to be kept."""
        if self.keep > 0:
            shutil.rmtree(self.root, ignore_errors=True)

    def _newest(self, warn: Callable[[str], None]) -> Path | None:
        for folder in reversed(numbered(self.root)):
            try:
                Manifest.read(folder)
            except UserError as error:
                warn(f"{error}; trying the one before it")
            else:
                return folder
        return None

    def _compare(self, folder: Path) -> None:
        """Refuse a checkpoint that was trained otherwise."""
        there = json.loads((folder / STATE).read_text())["settings"]
        here = json.loads(json.dumps(self.settings))
        other = [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
        if other:
            shown = "; ".join(f"{key} is {here.get(key)}, there {there.get(key)}" for key in other[:3])
            raise UserError(
                f"{folder} was trained with other settings: {shown}; take those, or choose another sft.output"
            )


def _settings(cfg: Config, data: Mapping[str, Any]) -> dict[str, Any]:
    """What is learnt and how, by key."""
    sft, model = asdict(cfg.sft), ("actor.model.", "actor.seed", "runner.seed")
    free = MAY_DIFFER if cfg.sft.lr_scheduler != "constant" else (*MAY_DIFFER, "steps")
    learnt = {key: value for key, value in settings(cfg).items() if key.startswith(model)}
    learnt |= {f"sft.{key}": value for key, value in sft.items() if key not in free}
    learnt |= {f"dataset {key}": data[key] for key in ("episodes", "frames", "state", "action")}
    return json.loads(json.dumps(learnt, default=str))
