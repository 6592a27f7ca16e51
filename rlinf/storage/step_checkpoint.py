"""Checkpoints of a training step, complete or absent.

<root>/global_step_N/
  actor/model/...               the policy in HF layout: `rlinf eval` and other tools open it as it is
  actor/optimizer.safetensors   or a part for every rank: training/optimizer_files.py
  runner.json                   step and env states
  manifest.json                 SHA-256 of every other file
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf.errors import UserError, where_to_get
from rlinf.storage.atomic_folder import TEMPORARY, atomic_folder

NAME = re.compile(r"global_step_(\d+)$")


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint folder says about itself."""

    step: int
    files: dict[str, str]  # relative path -> sha256
    config_hash: str
    versions: dict[str, str]
    saved_at: float = 0.0  # Unix time, seconds

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
        except (ValueError, TypeError, RecursionError) as error:  # no text, no JSON, or other keys
            raise UserError(f"checkpoint {folder}: manifest.json cannot be read ({error})") from error
        return manifest


@contextmanager
def new_checkpoint(root: Path, step: int, *, config_hash: str, keep: int = 0) -> Iterator[Path]:
    """The folder global_step_<step> for the block to fill; a manifest is added at its end.

    Then all but the last `keep` checkpoints with this `config_hash` are deleted; 0 deletes none. A checkpoint of the
    same step from a run with another one is renamed, not replaced.
    """
    final = root / f"global_step_{step}"
    if final.exists() and _hash_of(final) not in (config_hash, None):
        number = next(n for n in itertools.count(1) if not (root / f"earlier_{n}_{final.name}").exists())
        final.rename(root / f"earlier_{number}_{final.name}")
    for leftover in root.glob(f"{TEMPORARY}global_step_*"):
        shutil.rmtree(leftover)
    with atomic_folder(final, what=f"checkpoint {final}") as folder:
        yield folder
        files = {str(p.relative_to(folder)): sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        manifest = Manifest(step, files, config_hash, versions(), saved_at=time.time())
        (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1))
    if keep > 0:
        so_far = [p for p in _numbered(root) if step_of(p.name) <= step]  # later ones belong to an earlier run
        own = [p for p in so_far if _hash_of(p) == config_hash]
        for old in own[:-keep]:
            shutil.rmtree(old)


def find_resume(root: Path, resume_dir: str, config_hash: str, warn: Callable[[str], None]) -> Path | None:
    """The folder to resume from: the one named, or for `auto` the last complete one that such a config saved."""
    if resume_dir != "auto":
        folder = Path(resume_dir)
        if not folder.is_dir():
            found = [p.name for p in _numbered(folder.parent)]
            raise UserError(f"runner.resume_dir={resume_dir} does not exist; there: {', '.join(found) or 'none'}")
        Manifest.read(folder)
        return folder
    saved, skipped = [], []
    for folder in _numbered(root):
        try:
            manifest = Manifest.parse(folder)
        except UserError as error:
            warn(f"{error}; skipped")
            continue
        if manifest.config_hash == config_hash:
            saved.append((manifest.saved_at, manifest.step, folder))
        else:
            skipped.append(folder.name)
    if skipped:
        warn(
            f"runner.resume_dir=auto skips {', '.join(skipped)} in {root}, saved under other settings of what is "
            "learnt and how; name one to continue from it all the same"
        )
    for _, _, folder in sorted(saved, reverse=True):  # a higher step may be of an earlier run
        try:
            Manifest.read(folder)
            return folder
        except UserError as error:
            warn(f"{error}; trying the one before it")
    return None


def policy_folder(ckpt_path: str) -> Path | None:
    """The policy that `runner.ckpt_path` means: inside global_step_N, or the folder itself; None for a file."""
    folder = Path(ckpt_path).expanduser()
    inside = folder / "actor" / "model"
    return inside if inside.is_dir() else folder if folder.is_dir() else None


def newest_of_run(ckpt_path: str) -> Path | None:
    """The last checkpoint saved below a run folder; None for any other path. UserError where it holds several runs'."""
    folder = Path(ckpt_path).expanduser()
    if not folder.is_dir() or NAME.search(folder.name) or (folder / "config.json").exists():
        return None
    places = ("global_step_*", "checkpoints/global_step_*", "*/checkpoints/global_step_*")
    saved = [step for place in places for step in folder.glob(place) if (step / "manifest.json").is_file()]
    newest = {step.parent: step for step in sorted(saved, key=lambda step: Manifest.parse(step).saved_at)}
    if len(newest) > 1:
        listed = ", ".join(map(str, newest.values()))
        raise UserError(f"runner.ckpt_path={ckpt_path} holds checkpoints of several runs; name one of {listed}")
    if not newest and (folder / "metrics.jsonl").exists():
        raise UserError(f"runner.ckpt_path={ckpt_path} is a run folder without a checkpoint")
    return next(iter(newest.values()), None)


def verify_ckpt_path(ckpt_path: str, key: str = "runner.ckpt_path") -> None:
    """Refuse weights that are not there, or that differ from the manifest of the checkpoint they lie in."""
    path = Path(ckpt_path).expanduser()
    if not path.exists():
        found = ", ".join(p.name for p in _numbered(path.parent)) or "no checkpoints"
        raise UserError(f"{key}={ckpt_path} does not exist{where_to_get(ckpt_path, key) or f'; there: {found}'}")
    for folder in (path, *path.absolute().parents[:2]):  # global_step_N, or global_step_N/actor/model
        if NAME.search(folder.name) and folder.is_dir():
            Manifest.read(folder)


def step_of(ckpt_path: str | None) -> int:
    """The training step a checkpoint path names; 0 where it names none."""
    names = [NAME.search(part) for part in Path(ckpt_path or "").parts]
    return next((int(m.group(1)) for m in names if m), 0)


def config_hash(cfg: Any) -> str:
    """A short digest of what is learnt and how: two runs that differ in anything else may continue one another."""
    tree = asdict(cfg)
    model, train = tree["actor"]["model"], tree["env"]["train"]
    for block, names in (
        (model, ("model_path", "lora_path")),  # the weights are those of the checkpoint
        (model, ("gradient_checkpointing", "cuda_graphs")),
        (train, ("video_cfg", "enable_offload", "num_processes", "max_restarts", "step_deadline_s", "python")),
        (train, ("assets_path", "seeds_path")),
        (train["init_params"], ("data_path",)),
        (tree["actor"]["optim"], ("total_training_steps",)),  # a run may be made longer
    ):
        for name in names:
            block.pop(name, None)
    actor = {name: tree["actor"][name] for name in ("model", "optim", "seed", "global_batch_size")}
    parts = [
        tree["algorithm"],
        train,
        actor,
        tree["rollout"]["sampling_params"],
        [tree["runner"][name] for name in ("seed", "max_staleness", "weight_sync_interval")],
        tree["compat"],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers of this run depend on."""
    names = ("rlinf", "torch", "numpy", "mujoco", "metaworld")
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
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


def _numbered(root: Path) -> list[Path]:
    """The checkpoint folders below `root`, by step."""
    found = [(int(m.group(1)), p) for p in root.glob("global_step_*") if (m := NAME.search(p.name))]
    return [p for _, p in sorted(found)]
