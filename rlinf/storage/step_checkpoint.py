"""Checkpoints of a training step, complete or absent.

<root>/global_step_N/
  actor/model/...               the policy in HF layout: `rlinf eval` and other tools open it as it is
  actor/optimizer.safetensors   or a part for every rank: training/optimizer_files.py
  runner.json                   step and env states
  manifest.json                 id of the run, SHA-256 of every other file
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf.errors import UserError, did_you_mean, where_to_get
from rlinf.storage.atomic_folder import REPLACED, TEMPORARY, atomic_folder, restore_replaced
from rlinf.storage.provenance import packages

NAME = re.compile(r"global_step_(\d+)$")
EXPECTED = "; expected the folder of a run, of its checkpoint global_step_N or of a policy"
# Keys in which a run and the one that continues it may differ: lengths, places, paths, memory, what is shown and kept.
MAY_DIFFER = (
    "cluster",
    "collect",
    "sft",
    "runner",
    "rollout",
    "env.eval",
    "env.group_name",
    "env.train.video_cfg",
    "env.train.enable_offload",
    "env.train.num_processes",
    "env.train.max_restarts",
    "env.train.step_deadline_s",
    "env.train.python",
    "env.train.reset_ids",  # read from env.eval alone
    "env.train.assets_path",
    "env.train.seeds_path",
    "env.train.init_params.data_path",
    "actor.group_name",
    "actor.micro_batch_size",
    "actor.enable_offload",
    "actor.max_nonfinite_steps",
    "actor.fsdp_config",
    "actor.model.model_path",  # the weights are those of the checkpoint
    "actor.model.lora_path",
    "actor.model.gradient_checkpointing",
    "actor.model.cuda_graphs",
    "actor.optim.total_training_steps",  # a run may be made longer
)
# Keys below those that must be equal all the same.
MUST_AGREE = (
    "runner.seed",
    "runner.max_staleness",
    "runner.weight_sync_interval",
    "runner.logger.experiment_name",
    "rollout.sampling_params",
)


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint folder says about itself."""

    step: int
    files: dict[str, str]  # relative path -> sha256
    config_hash: str
    versions: dict[str, str]
    saved_at: float = 0.0  # Unix time, seconds
    run: str = ""  # id of the run that saved it

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of `folder`, after every file it lists was found whole; raises UserError naming the bad file."""
        manifest = cls.parse(folder)
        for name, want in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise UserError(f"checkpoint {folder}: {name} is missing")
            if sha256(file) != want:
                raise UserError(f"checkpoint {folder}: {name} is corrupt, its checksum differs from manifest.json")
        return manifest

    @classmethod
    def parse(cls, folder: Path) -> Manifest:
        """What manifest.json says, the files unread."""
        path = folder / "manifest.json"
        if not path.is_file():
            raise UserError(f"checkpoint {folder}: manifest.json is missing, so it was never completed")
        try:
            manifest = cls(**json.loads(path.read_text()))
            if not isinstance(manifest.files, dict) or not all(isinstance(h, str) for h in manifest.files.values()):
                raise TypeError("files must be an object of checksums")
            if not manifest.files:
                raise ValueError("it lists no files")
            if NAME.search(folder.name) and manifest.step != step_of(folder.name):
                raise ValueError(f"its step is {manifest.step!r}")
            if not isinstance(manifest.saved_at, int | float):
                raise TypeError("saved_at must be a number")
        except (ValueError, TypeError, RecursionError) as error:  # no text, no JSON, or other keys
            raise UserError(f"checkpoint {folder}: manifest.json cannot be read ({error})") from error
        return manifest


@contextmanager
def new_checkpoint(root: Path, step: int, *, config_hash: str, keep: int = 0, run: str = "") -> Iterator[Path]:
    """The folder global_step_<step> for the block to fill; a manifest is added at its end.

    Then all but the last `keep` checkpoints with this `config_hash` are deleted; 0 deletes none. A checkpoint of the
    same step from a run with another one is renamed, not replaced.
    """
    final = root / f"global_step_{step}"
    _restore_replaced(root)
    if final.exists() and _hash_of(final) not in (config_hash, None):
        number = next(n for n in itertools.count(1) if not (root / f"earlier_{n}_{final.name}").exists())
        final.rename(root / f"earlier_{number}_{final.name}")
    for leftover in root.glob(f"{TEMPORARY}global_step_*"):
        shutil.rmtree(leftover)
    with atomic_folder(final, what=f"checkpoint {final}") as folder:
        yield folder
        files = {str(p.relative_to(folder)): sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        manifest = Manifest(step, files, config_hash, versions(), saved_at=time.time(), run=run)
        (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1))
    if keep > 0:
        so_far = [p for p in numbered(root) if step_of(p.name) <= step]  # later ones belong to an earlier run
        own = [p for p in so_far if _hash_of(p) == config_hash]
        for old in own[:-keep]:
            shutil.rmtree(old)


def find_resume(
    root: Path, resume_dir: str, config_hash: str, warn: Callable[[str], None], run: str | None = None
) -> Path | None:
    """The folder to resume from: the one named, or for `auto` the last complete one that such a config saved.

    With `run`, `auto` takes those of the run with this id only.
    """
    if resume_dir != "auto":
        folder = Path(resume_dir)
        if not folder.is_dir():
            found = [p.name for p in numbered(folder.parent)]
            what = "is not a folder" if os.path.lexists(folder) else "does not exist"
            raise UserError(f"runner.resume_dir={resume_dir} {what}; there: {', '.join(found) or 'none'}")
        Manifest.read(folder)
        read_progress(folder)
        return folder
    _restore_replaced(root)
    saved, skipped = [], []
    for folder in numbered(root):
        try:
            manifest = Manifest.parse(folder)
        except UserError as error:
            warn(f"{error}; skipped")
            continue
        if manifest.config_hash == config_hash and run in (None, manifest.run):
            saved.append((manifest.saved_at, manifest.step, folder))
        else:
            skipped.append(folder.name)
    if skipped:
        warn(
            f"runner.resume_dir=auto skips {', '.join(skipped)} in {root}, saved by another run or under other "
            "settings of what is learnt and how; name one to continue from it all the same"
        )
    for _, _, folder in sorted(saved, reverse=True):  # a higher step may be of an earlier run
        try:
            Manifest.read(folder)
            read_progress(folder)
            return folder
        except UserError as error:
            warn(f"{error}; trying the one before it")
    return None


def read_progress(folder: Path) -> dict[str, Any]:
    """runner.json of a checkpoint: its step, and the env states by rank."""
    path = folder / "runner.json"
    if not path.is_file():
        raise UserError(f"checkpoint {folder}: runner.json is missing")
    try:
        progress = json.loads(path.read_text())
        if progress["step"] != step_of(folder.name) or not isinstance(progress["env"], list):
            raise ValueError("its step is another, or it has no env states")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"checkpoint {folder}: runner.json cannot be read ({error})") from error
    return progress


def policy_folder(ckpt_path: str) -> Path | None:
    """The policy that `runner.ckpt_path` means: inside global_step_N, or the folder itself; None for a file."""
    folder = Path(ckpt_path).expanduser()
    inside = folder / "actor" / "model"
    return inside if inside.is_dir() else folder if folder.is_dir() else None


def checkpoints_of_run(folder: Path) -> list[Path]:
    """Every complete checkpoint of a run folder, by step."""
    roots = (folder, folder / "checkpoints", *sorted(folder.glob("*/checkpoints")))
    return [step for root in roots for step in numbered(root) if (step / "manifest.json").is_file()]


def newest_of_run(ckpt_path: str, key: str = "runner.ckpt_path") -> Path | None:
    """The last checkpoint saved below a run folder; None for any other path. UserError where it holds several runs'."""
    folder = Path(ckpt_path).expanduser()
    if not folder.is_dir() or NAME.search(folder.name) or (folder / "config.json").exists():
        return None
    places = ("global_step_*", "checkpoints/global_step_*", "*/checkpoints/global_step_*")
    saved = [step for place in places for step in folder.glob(place) if (step / "manifest.json").is_file()]
    newest = {step.parent: step for step in sorted(saved, key=lambda step: Manifest.parse(step).saved_at)}
    if len(newest) > 1:
        listed = ", ".join(map(str, newest.values()))
        raise UserError(f"{key}={ckpt_path} holds checkpoints of several runs; name one of {listed}")
    if not newest and (folder / "metrics.jsonl").exists():
        raise UserError(f"{key}={ckpt_path} is a run folder without a checkpoint")
    return next(iter(newest.values()), None)


def verify_ckpt_path(ckpt_path: str, key: str = "runner.ckpt_path") -> None:
    """Refuse weights that are not there, or that differ from the manifest of the checkpoint they lie in."""
    path = Path(ckpt_path).expanduser()
    if not path.exists():
        found = ", ".join(p.name for p in numbered(path.parent))
        near = f"; there: {found}" if found else did_you_mean(path, map(str, path.parent.glob("*"))) or EXPECTED
        raise UserError(f"{key}={ckpt_path} does not exist{where_to_get(ckpt_path, key) or near}")
    for folder in (path, *path.absolute().parents[:2]):  # global_step_N, or global_step_N/actor/model
        if NAME.search(folder.name) and folder.is_dir():
            Manifest.read(folder)


def step_of(ckpt_path: str | None) -> int:
    """The training step a checkpoint path names; 0 where it names none."""
    names = [NAME.search(part) for part in Path(ckpt_path or "").parts]
    return next((int(m.group(1)) for m in names if m), 0)


def config_hash(cfg: Any) -> str:
    """A short digest of what is learnt and how: two runs that differ in anything else may continue one another."""
    return hashlib.sha256(json.dumps(settings(cfg), sort_keys=True, default=str).encode()).hexdigest()[:16]


def settings(cfg: Any) -> dict[str, Any]:
    """The keys of what is learnt and how, dotted, with their values: everything but MAY_DIFFER."""

    def leaves(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            key = f"{path}{name}"
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{key}.")
            elif _is_below(key, MUST_AGREE) or not _is_below(key, MAY_DIFFER):
                yield key, value

    return dict(leaves(asdict(cfg), ""))


def _is_below(key: str, blocks: tuple[str, ...]) -> bool:
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers of this run depend on."""
    names, found = ("rlinf", "torch", "numpy", "mujoco", "metaworld"), packages()
    return {"python": platform.python_version()} | {n: found[n] for n in names if n in found}


def sha256(path: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(folder: Path) -> str | None:
    """The config_hash of a checkpoint; None of one that was never completed."""
    try:
        return Manifest.parse(folder).config_hash
    except UserError:
        return None


def _restore_replaced(root: Path) -> None:
    """Finish what a crash left between two renames."""
    for old in root.glob(f"{REPLACED}global_step_*"):
        restore_replaced(root / old.name.removeprefix(REPLACED))


def numbered(root: Path) -> list[Path]:
    """The checkpoint folders below `root`, by step."""
    found = [(int(m.group(1)), p) for p in root.glob("global_step_*") if (m := NAME.search(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]
