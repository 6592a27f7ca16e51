"""What a served policy says of itself."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.serving.observations import CAMERAS, NAMES
from rlinf.serving.policy import LoadedPolicy
from rlinf.storage.run_folder import read_record
from rlinf.storage.step_checkpoint import step_of
from rlinf.version import __version__


def describe(policy: LoadedPolicy, max_batch: int) -> dict[str, Any]:
    """The metadata that every client receives first."""
    spec, folder = policy.spec, policy.folder
    return {
        "server": "rlinf",
        "version": __version__,
        "recipe": None if folder is None else _run_of(folder),
        "step": None if folder is None else step_of(str(folder)) or None,
        "action_dim": spec.action_dim,
        "horizon": spec.num_action_chunks,
        "cameras": [NAMES[camera][0] for camera in CAMERAS[: spec.num_images]],
        "image_size": spec.image_size,
        "state_dim": spec.state_dim,
        "statistics_sha256": statistics_hash(policy),
        "seed": policy.seed,
        "max_batch": max_batch,
    }


def statistics_hash(policy: LoadedPolicy) -> str | None:
    """SHA-256 of the normalisation statistics in use, as the policy saves them; None for one that saves none."""
    if not isinstance(policy.policy, PretrainedPolicy):
        return None
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        policy.policy.save_extras(Path(folder))
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _run_of(folder: Path) -> str | None:
    """The name of the run that saved a policy, which is its recipe's unless the user chose one; None of others."""
    for parent in folder.absolute().parents[:5]:  # <run>/<name>/checkpoints/global_step_N/actor/model
        with suppress(UserError):  # a damaged run.json
            if (record := read_record(parent)) is not None:
                return record.name
    return None
