"""`rlinf export`: a run's policy as one plain checkpoint, LoRA adapters merged into the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rlinf.compat.keys import without_old_keys
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, available_models, find_config
from rlinf.models.files.policy_folder import SETTINGS, saved_settings
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.policy import find_policy
from rlinf.storage.atomic_folder import atomic_folder
from rlinf.storage.step_checkpoint import policy_folder, verify_ckpt_path
from rlinf.typed import convert


def export_policy(checkpoint: Path, output: Path) -> Path:
    """Write the policy of global_step_N (or of a policy folder) to `output`, which appears only when it is complete."""
    verify_ckpt_path(str(checkpoint), key="CHECKPOINT")
    folder = policy_folder(str(checkpoint))
    if folder is None:
        raise UserError(f"CHECKPOINT={checkpoint} is a file; pass the folder global_step_N or its actor/model")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"OUTPUT={output} exists; choose another folder")
    if output.resolve() == Path.cwd():
        raise UserError(f"OUTPUT={output} is the current folder; name one inside it")
    cfg = stored_settings(folder)
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    assert isinstance(policy, PretrainedPolicy)
    try:
        with atomic_folder(output, what=f"OUTPUT={output}") as folder_in_progress:
            policy.export(folder_in_progress)
    except OSError as error:
        raise UserError(f"OUTPUT={output} cannot be written: {error.strerror}") from error
    return output


def stored_settings(folder: Path) -> ModelConfig:
    """The model block that the policy in `folder` was built with, pointing at that folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json, so it is no policy that rlinf saved")
    tree = saved_settings(folder)
    if "model_type" not in tree:
        raise UserError(f"{path} has no entry {SETTINGS!r}: only policies that rlinf saved can be exported")
    if tree["model_type"] not in available_models():
        available = ", ".join(available_models())
        raise UserError(f"{path}: {SETTINGS}.model_type={tree['model_type']} is unknown; available: {available}")
    cfg = convert(find_config(tree["model_type"]), without_old_keys(tree), SETTINGS, lambda _: str(path))
    return replace(cfg, model_path=str(folder))
