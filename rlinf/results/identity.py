"""Which policy played: the files its weights and statistics come from, and one digest over them. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from rlinf.config.schema import Config
from rlinf.errors import UserError
from rlinf.storage.step_checkpoint import NAME, Manifest, policy_folder, sha256

Kind = Literal["checkpoint", "random", "expert"]
# Files of a policy folder that change no action: how it was made, and words for people.
_ABOUT = ("sft.json", "README.md", ".gitattributes")


@dataclass(frozen=True)
class PolicyIdentity:
    """Who played an evaluation."""

    kind: Kind
    path: str | None = None  # a checkpoint: the folder or file; None where its weights were never saved
    sha256: str | None = None  # over names and contents of its files
    training_run: str | None = None  # id of the run that trained it


def policy_identity(cfg: Config) -> PolicyIdentity:
    """The policy that an evaluation of `cfg` starts with."""
    if cfg.runner.eval_expert:
        return PolicyIdentity("expert")
    model = cfg.actor.model
    given = [cfg.runner.ckpt_path, model.lora_path, model.model_path]
    named = next((path for path in given if path is not None), None)
    if named is None:
        return PolicyIdentity("random")
    paths = [Path(path).expanduser() for path in dict.fromkeys([model.model_path, model.lora_path]) if path is not None]
    weights = Path(named).expanduser()
    files = (*paths, *([weights] if weights.is_file() else []))
    is_here = all(path.exists() for path in files)  # else only the machines that loaded it have it
    return PolicyIdentity("checkpoint", named, files_hash(files) if is_here else None, _run_of(weights))


def checkpoint_identity(checkpoint: Path) -> PolicyIdentity:
    """The policy of a checkpoint global_step_N that is complete."""
    folder = policy_folder(str(checkpoint))
    assert folder is not None
    return PolicyIdentity("checkpoint", str(checkpoint), files_hash((folder,)), _run_of(checkpoint))


def files_hash(paths: tuple[Path, ...]) -> str:
    """The SHA-256 over the names and contents of policy folders and weight files."""
    digest = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if not files:
            raise UserError(f"{path} holds no policy: it does not exist or is empty")
        for file in files:
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.name not in _ABOUT and not hidden:
                about = file.stat()
                name = file.name if file == path else str(file.relative_to(path))
                digest.update(f"{name}\0{_file_hash(file, about.st_size, about.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@cache
def _file_hash(file: Path, size: int, changed: int) -> str:
    """The digest of a file, computed once while size and time of change stay."""
    return sha256(file)


def _run_of(path: Path) -> str | None:
    """The run that saved the checkpoint which a path is, or lies in."""
    for folder in (path, *path.absolute().parents[:2]):
        if NAME.search(folder.name) and (folder / "manifest.json").is_file():
            return Manifest.parse(folder).run or None
    return None
