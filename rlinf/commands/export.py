"""`rlinf export`: a run's policy as one plain checkpoint, LoRA adapters merged into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlinf.compat.keys import without_old_keys
from rlinf.config.load import load_config
from rlinf.envs.spec import check_setup
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, available_models, find_config
from rlinf.models.files.policy_folder import SETTINGS, saved_settings
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.policy import find_policy
from rlinf.runtime.worker import limit_threads
from rlinf.storage.atomic_folder import atomic_folder, check_output
from rlinf.storage.step_checkpoint import newest_of_run, policy_folder, verify_ckpt_path
from rlinf.typed import convert


def export_policy(checkpoint: Path, output: Path, *, overwrite: bool = False) -> Path:
    """Write the policy of global_step_N, of a run folder's newest or of a policy folder to `output`.

    The output appears only when it is complete.
    """
    check_output(output, "OUTPUT", "policy", overwrite=overwrite, inputs={"CHECKPOINT": checkpoint})
    checkpoint = newest_of_run(str(checkpoint), key="CHECKPOINT") or checkpoint
    verify_ckpt_path(str(checkpoint), key="CHECKPOINT")
    folder = policy_folder(str(checkpoint))
    if folder is None:
        raise UserError(f"CHECKPOINT={checkpoint} is a file; pass the folder global_step_N or its actor/model")
    cfg = stored_settings(folder)
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    assert isinstance(policy, PretrainedPolicy)
    with atomic_folder(output, what=f"OUTPUT={output}") as folder_in_progress:
        policy.export(folder_in_progress)
    return output


def export_rollouts(
    config: str,
    overrides: Sequence[str],
    checkpoint: Path,
    output: Path,
    *,
    episodes: int,
    successes_only: bool,
    overwrite: bool,
) -> Path:
    """Let the policy of a checkpoint play in a config's simulator, and write what it did as a dataset."""
    from rlinf.demos.rollouts import record_rollouts

    check_output(output, "OUTPUT", "dataset", overwrite=overwrite, inputs={"CHECKPOINT": checkpoint})
    cfg = load_config(config, [*overrides, f"runner.ckpt_path={checkpoint}"], purpose="eval")
    check_setup(cfg.env.eval, "env.eval")
    limit_threads(cfg)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = find_policy(cfg.actor.model.model_type).build(cfg.actor.model, device).eval()
    success = record_rollouts(
        cfg, policy, output, episodes=episodes, successes_only=successes_only, overwrite=overwrite
    )
    print(f"success: {success}")
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
