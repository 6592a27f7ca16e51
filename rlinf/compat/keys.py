"""Keys of published configs that have another name here, or no effect: one table each. Torch-free.

A file that sets such a key loads all the same. What it says is read under the new name, or left out, and said once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rlinf.typed import Count

logger = logging.getLogger(__name__)

RENAMED: dict[str, tuple[str, ...]] = {
    "algorithm.rollout_epoch": ("env.train.rollout_epoch",),
    "algorithm.eval_rollout_epoch": ("env.eval.rollout_epoch",),
    "algorithm.sampling_params": ("rollout.sampling_params",),
    "env.enable_offload": ("env.train.enable_offload", "env.eval.enable_offload"),
    "algorithm.staleness_threshold": ("runner.max_staleness",),
    "video_cfg": ("env.train.video_cfg",),
    "actor.model.OpenPI": ("actor.model.openpi",),
    "rollout.model.OpenPI": ("rollout.model.openpi",),
}
"""Old path -> the paths that take its value; a dict is merged into the new block."""

OLD_GROUPS: dict[str, str] = {"training_backend": "hybrid_engines", "env/train": "env", "env/eval": "env"}
"""Old folder of fragments -> its name now: `env/train: NAME` is read as `env@env.train: NAME`."""


Flag = bool | None
Text = str | None
Number = Count | None
Block = dict[str, Any] | None
Dtype = Literal["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"] | None
KlPenalty = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"] | None
LossMean = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None


class NoEffect(NamedTuple):
    """A published key that nothing here reads."""

    key: str  # `{a,b}` stands for either; a block stands for all keys in it
    why: str  # and what to use instead, where there is something
    kind: Any = Any  # annotation of the values that published files may give it
    only: tuple[Any, ...] = ()  # values it may have; empty for all of that kind


def _model_keys(why: str, kind: Any, *names: str) -> tuple[NoEffect, ...]:
    return tuple(NoEffect(f"{{actor,rollout}}.model.{name}", why, kind) for name in names)


SIZES = "the network's sizes follow from size and the checkpoint"
DSRL = "steering a frozen policy by its noise (DSRL) is not supported"
NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect("algorithm.n_chunk_steps", "it is max_steps_per_rollout_epoch / num_action_chunks", Number),
    NoEffect("algorithm.length_params", "the number of action tokens follows from the model", Block),
    NoEffect("algorithm.kl_beta", "there is no reference policy", only=(0,)),
    NoEffect("algorithm.kl_penalty", "there is no reference policy", KlPenalty),
    NoEffect(
        "algorithm.loss_agg_func", "losses are means over unmasked entries, each trajectory weighing the same", LossMean
    ),
    NoEffect("runner.eval_policy_path", "set runner.ckpt_path", Text),
    NoEffect("runner.seq_length", "the model knows its own length", Number),
    NoEffect("runner.max_prompt_length", "set actor.model.max_prompt_length", Number),
    NoEffect("runner.overlap_env_bootstrap", "rollout.pipeline_stage_num overlaps simulators and policy", Flag),
    NoEffect("env.{train,eval}.is_eval", "env.eval always plays held-out ids", Flag),
    NoEffect(
        "env.{train,eval}.use_fixed_reset_state_ids",
        "a group shares its drawn id either way: new in every rollout epoch of training, a fixed list in evaluation",
        Flag,
    ),
    NoEffect("env.{train,eval}.policy_setup", "set actor.model.policy_setup", Text),
    NoEffect("env.{train,eval}.init_params.num_envs", "total_num_envs counts the environments", only=(None, 1)),
    NoEffect(
        "env.{train,eval}.init_params.max_episode_steps", "set env.train.max_episode_steps and env.eval's", Number
    ),
    NoEffect("env.{train,eval}.init_params.obs_mode", "images show the robot cut out", only=("rgb+segmentation",)),
    NoEffect("env.{train,eval}.init_params.render_mode", "nothing is shown on a screen", Text),
    NoEffect("env.{train,eval}.init_params.use_multiple_plates", "id: MultiPlate-v1 has two plates", only=(False,)),
    NoEffect("rollout.unnorm_key", "set actor.model.unnorm_key", Text),
    NoEffect("rollout.{backend,generation_backend,rollout_backend}", "policies are plain torch", Text),
    NoEffect("rollout.recompute_logprobs", "rollout and update compute the same log-probs", Flag),
    NoEffect("rollout.sampling_params.top_p", "actions are drawn from all bins, or the top_k", only=(1,)),
    NoEffect("rollout.sampling_params.repetition_penalty", "actions are drawn from all bins, or the top_k", only=(1,)),
    NoEffect("rollout.sampling_params.max_new_tokens", "the model knows how many tokens an action has", Number),
    *_model_keys(SIZES, Number | list[Count], "image_size"),
    *_model_keys(SIZES, Number, "vocab_size", "hidden_size"),
    *_model_keys("the published network decides which layers have a bias", Flag, "add_bias_linear", "add_qkv_bias"),
    *_model_keys("model_type names the model", Text, "model_name"),
    *_model_keys("torch chooses the attention kernel", Attention, "attn_implementation"),
    *_model_keys("weights always go straight to their device", Flag, "low_cpu_mem_usage"),
    *_model_keys("code of a checkpoint is never run", Flag, "trust_remote_code"),
    *_model_keys(DSRL, Number, *(f"openpi.dsrl_{name}" for name in ("state_dim", "action_noise_dim", "num_q_heads"))),
    *_model_keys(DSRL, Number, "openpi.dsrl_image_latent_dim", "openpi.dsrl_state_latent_dim"),
    *_model_keys(DSRL, list[Count] | None, "openpi.dsrl_hidden_dims"),
    *_model_keys(DSRL, Literal["mean", "min", "max"] | None, "openpi.dsrl_agg_q"),
    NoEffect("actor.training_backend", "there is no other", only=("fsdp",)),
    NoEffect("actor.fsdp_config.forward_prefetch", "FSDP2 overlaps gathering and computing by itself", Flag),
    NoEffect("actor.fsdp_config.limit_all_gathers", "FSDP2 bounds the memory of gathered weights by itself", Flag),
    NoEffect("actor.fsdp_config.backward_prefetch", "FSDP2 prefetches in the backward pass by itself", Text),
    NoEffect("actor.fsdp_config.use_orig_params", "parameters keep their names and shapes", Flag),
    NoEffect("actor.fsdp_config.use_liger_kernel", "networks bring their own fused kernels", Flag),
    NoEffect(
        "actor.fsdp_config.mixed_precision.param_dtype",
        "the network computes in actor.model.precision, and bf16 weights have fp32 masters",
        Dtype,
    ),
    NoEffect("actor.fsdp_config.mixed_precision.buffer_dtype", "buffers keep their own", Dtype),
    NoEffect(
        "actor.fsdp_config.amp_autocast.enabled",
        "updates must score actions as rollouts did: set actor.model.precision=bf16",
        only=(False,),
    ),
    NoEffect("actor.fsdp_config.amp_autocast", "actor.model.precision says what the network computes in", Block),
    NoEffect("actor.fsdp_config.grad_scaler.enabled", "bf16 and fp32 need no loss scaling", only=(False,)),
    NoEffect("actor.fsdp_config.grad_scaler", "bf16 and fp32 need no loss scaling", Block),
    NoEffect("reward.use_reward_model", "rewards come from the simulator", only=(False,)),
    NoEffect("reward", "rewards come from the simulator", Block),
    NoEffect(
        "critic.use_critic_model", "the critic is a head of the policy: actor.model.add_value_head", only=(False,)
    ),
    NoEffect("critic", "the critic is a head of the policy: actor.model.add_value_head", Block),
    NoEffect("weight_syncer", "trainable parameters travel in place where rollout and actor do not share them", Block),
)

SAVED_SWITCHES = ("actor.model.upstream_sampling", "actor.model.openpi.upstream_values")
"""Keys of policies that earlier versions saved; the class of the policy says this now (compat/policies.py)."""

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Log `message` the first time `key` is met."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)


def no_effect_paths() -> Iterator[tuple[str, NoEffect]]:
    """Every path of the table, alternatives written out; those inside a block come before it."""
    for row in NO_EFFECT:
        for path in expanded(row.key):
            yield path, row


def expanded(key: str) -> list[str]:
    """A key of the tables with its alternatives written out: `a.{b,c}` is a.b and a.c."""
    choice = re.search(r"\{(.*)\}", key)
    return [key.replace(choice[0], part) for part in choice[1].split(",")] if choice else [key]


def without_old_keys(block: dict[str, Any], path: str = "actor.model") -> dict[str, Any]:
    """The model block of a policy that an earlier version saved, without the keys that have no effect."""
    old = {*(key for key, _ in no_effect_paths()), *SAVED_SWITCHES}
    kept = {key: value for key, value in block.items() if f"{path}.{key}" not in old}
    return {key: without_old_keys(v, f"{path}.{key}") if isinstance(v, dict) else v for key, v in kept.items()}


def rename_path(path: str) -> tuple[str, ...]:
    """The new names of a key path; the path itself when it is current."""
    for old, new in RENAMED.items():
        if is_below(path, old):
            warn_once(old, f"{old} is now {' and '.join(new)}")
            return tuple(name + path[len(old) :] for name in new)
    return (path,)


def is_below(path: str, prefix: str) -> bool:
    """Whether a key path is `prefix` or inside its block."""
    return path == prefix or path.startswith(prefix + ".")
