"""Keys of `actor.model` that published recipes set and that have no effect here: (key, why, what to use instead)."""

from __future__ import annotations

from typing import Any

_SIZE = "the network's sizes follow from actor.model.size and the checkpoint"
_DSRL = "steering a frozen policy by its noise (DSRL) is not supported"

NO_EFFECT_MODEL_KEYS: tuple[tuple[str, str, str], ...] = (
    ("actor.model.image_size", _SIZE, "actor.model.size"),
    ("actor.model.vocab_size", _SIZE, "actor.model.size"),
    ("actor.model.hidden_size", _SIZE, "actor.model.size"),
    ("actor.model.add_bias_linear", "the published network decides which layers have a bias", "nothing"),
    ("actor.model.add_qkv_bias", "the published network decides which layers have a bias", "nothing"),
    ("actor.model.attn_implementation", "torch chooses the attention kernel", "nothing"),
    ("actor.model.low_cpu_mem_usage", "weights always go straight to their device", "nothing"),
    ("actor.model.trust_remote_code", "code of a checkpoint is never run", "nothing"),
    ("actor.model.openpi.dsrl_state_dim", _DSRL, "nothing"),
    ("actor.model.openpi.dsrl_action_noise_dim", _DSRL, "nothing"),
    ("actor.model.openpi.dsrl_num_q_heads", _DSRL, "nothing"),
    ("actor.model.openpi.dsrl_agg_q", _DSRL, "nothing"),
    ("actor.model.openpi.dsrl_image_latent_dim", _DSRL, "nothing"),
    ("actor.model.openpi.dsrl_state_latent_dim", _DSRL, "nothing"),
    ("actor.model.openpi.dsrl_hidden_dims", _DSRL, "nothing"),
)
# Policies that earlier versions saved carry these too: the switch is now the class of the policy (compat.policies).
_SAVED_KEYS = ("actor.model.upstream_sampling", "actor.model.openpi.upstream_values")


def drop_old_keys(block: dict[str, Any], path: str = "actor.model") -> dict[str, Any]:
    """The model block of a policy that an earlier version saved, without the keys that have no effect."""
    old = {*(key for key, *_ in NO_EFFECT_MODEL_KEYS), *_SAVED_KEYS}
    kept = {key: value for key, value in block.items() if f"{path}.{key}" not in old}
    return {key: drop_old_keys(v, f"{path}.{key}") if isinstance(v, dict) else v for key, v in kept.items()}
