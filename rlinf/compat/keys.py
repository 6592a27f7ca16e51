"""Old key names -> new ones, so that configs written for earlier releases keep working. One table, one warning each."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

RENAMED: dict[str, tuple[str, ...]] = {
    "algorithm.rollout_epoch": ("env.train.rollout_epoch",),
    "algorithm.eval_rollout_epoch": ("env.eval.rollout_epoch",),
    "algorithm.sampling_params": ("rollout.sampling_params",),
    "env.enable_offload": ("env.train.enable_offload", "env.eval.enable_offload"),
    "rollout.generation_backend": ("rollout.backend",),
    "rollout.rollout_backend": ("rollout.backend",),
    "actor.model.OpenPI": ("actor.model.openpi",),
    "rollout.model.OpenPI": ("rollout.model.openpi",),
}
"""Old path -> the paths that take its value; a dict is merged into the new block."""

DROPPED: dict[str, str] = {
    "algorithm.n_chunk_steps": "it is max_steps_per_rollout_epoch / num_action_chunks",
    "algorithm.length_params": "the number of action tokens follows from the model",
    "runner.eval_policy_path": "set runner.ckpt_path",
    "runner.seq_length": "the model knows its own length",
    "runner.max_prompt_length": "set actor.model.max_prompt_length",
    "rollout.unnorm_key": "set actor.model.unnorm_key",
}
"""Old path -> why it is ignored."""

OLD_GROUPS: dict[str, str] = {"training_backend": "hybrid_engines", "env/train": "env", "env/eval": "env"}
"""Old folder of fragments -> its name now: `env/train: NAME` is read as `env@env.train: NAME`."""

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Log `message` the first time `key` is met."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)


def rename_path(path: str) -> tuple[str, ...]:
    """The new names of a key path; the path itself when it is current; none when it is dropped."""
    for old, reason in DROPPED.items():
        if is_below(path, old):
            warn_once(old, f"{old} is ignored: {reason}")
            return ()
    for old, new in RENAMED.items():
        if is_below(path, old):
            warn_once(old, f"{old} is now {' and '.join(new)}")
            return tuple(name + path[len(old) :] for name in new)
    return (path,)


def is_below(path: str, prefix: str) -> bool:
    """Whether a key path is `prefix` or inside its block."""
    return path == prefix or path.startswith(prefix + ".")
