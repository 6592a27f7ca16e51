"""`rlinf export`: a run's policy as one plain checkpoint, LoRA adapters merged into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlinf.config.load import load_config
from rlinf.envs.spec import check_setup
from rlinf.errors import UserError
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.policy import find_policy
from rlinf.runtime.worker import limit_threads
from rlinf.serving.policy import find_folder, stored_settings
from rlinf.storage.atomic_folder import atomic_folder, check_output

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_policy(checkpoint: Path, output: Path, *, precision: str | None = None, overwrite: bool = False) -> Path:
    """Write the policy of global_step_N, of a run folder's newest or of a policy folder to `output`.

    The output appears only when it is complete. `precision` is that of the stored weights; None keeps theirs.
    """
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"--precision={precision} must be one of {', '.join(PRECISIONS)}")
    check_output(output, "OUTPUT", "policy", overwrite=overwrite, inputs={"CHECKPOINT": checkpoint})
    cfg = stored_settings(find_folder(checkpoint, key="CHECKPOINT"))
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    assert isinstance(policy, PretrainedPolicy)
    with atomic_folder(output, what=f"OUTPUT={output}") as folder_in_progress:
        policy.export(folder_in_progress, dtype=None if precision is None else PRECISIONS[precision])
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
