"""Rules that involve several keys. Each failure is one line: key, value, rule and the nearest values that work."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rlinf.algorithms.registry import ADVANTAGES, LOSSES
from rlinf.config.derived import (
    acts_with_old_weights,
    chunks_per_rollout,
    divisors,
    largest_divisor,
    make_plan,
    micro_batch_size,
    rollout_size,
    visible_accelerators,
)
from rlinf.config.schema import Config
from rlinf.envs.config import NO_SIMULATOR, EnvConfig
from rlinf.envs.spec import drops_rotation, env_spec, ids_of_task, suite_names, unread_keys
from rlinf.errors import UserError, where_to_get
from rlinf.models.config import PolicySpec, is_placeholder
from rlinf.placement.grammar import COMPONENTS, KEY
from rlinf.placement.plan import Plan
from rlinf.storage.step_checkpoint import verify_ckpt_path

logger = logging.getLogger(__name__)

Purpose = Literal["train", "eval", "sft", "collect", "plan", "bench", "quickstart", "doctor"]


def check_config(cfg: Config, purpose: Purpose = "train", devices: Sequence[int] | None = None) -> None:
    """Refuse what cannot run, before anything starts. Only what `purpose` will use is checked."""
    if cfg.env.train.env_type == NO_SIMULATOR:
        if purpose == "sft":
            _check_imitation(cfg, devices)
        return
    policy = policy_spec(cfg)
    for line in (*unread_keys(cfg.env.train, "env.train"), *unread_keys(cfg.env.eval, "env.eval")):
        logger.warning("%s", line)
    _check_runner(cfg, purpose)
    if purpose == "collect":
        _check_ids("env.train", cfg.env.train, "demo")
        return
    if purpose == "doctor":  # no network is built
        check_fit("env.train", cfg.env.train, policy)
        check_fit("env.eval", cfg.env.eval, policy)
        return
    training = purpose in ("train", "plan", "bench", "quickstart") and not cfg.runner.only_eval
    if training or purpose == "sft":
        check_fit("env.train", cfg.env.train, policy)
    if purpose == "sft":
        _check_imitation(cfg, devices)
        return
    plan = make_plan(cfg, devices)
    if training:
        _check_ids("env.train", cfg.env.train, "train")
        _check_envs("env.train", cfg.env.train, plan, policy, groups=True)
        _check_algorithm(cfg, policy)
        _check_batches(cfg, plan, policy)
        _check_sharding(cfg, plan)
        _check_staleness(cfg, plan)
    if cfg.runner.only_eval or cfg.runner.val_check_interval > 0 or purpose == "quickstart":
        check_fit("env.eval", cfg.env.eval, policy)
        _check_envs("env.eval", cfg.env.eval, plan, policy, groups=False)
        _check_trials(cfg.env.eval)
    if not cfg.runner.eval_expert:
        _check_weights(cfg, purpose)
        if purpose != "plan":
            computing = (*plan.rollout, *plan.actor) if training else plan.rollout
            real = cfg.cluster.virtual_devices == 0
            _check_precision(cfg, has_gpu=real and all(slot.devices for slot in computing))


def _check_imitation(cfg: Config, devices: Sequence[int] | None) -> None:
    """What `rlinf sft` needs beside a dataset."""
    if cfg.sft.eval_interval and cfg.env.train.env_type == NO_SIMULATOR:
        raise UserError(
            f"sft.eval_interval={cfg.sft.eval_interval} must be 0: episodes are played in a simulator, and the config "
            "has no env.train block"
        )
    _check_weights(cfg, "sft")
    gpus = visible_accelerators() if devices is None else sum(devices)
    _check_precision(cfg, has_gpu=gpus > 0)


def policy_spec(cfg: Config) -> PolicySpec:
    """What the configured policy promises."""
    try:
        return cfg.actor.model.spec()
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_runner(cfg: Config, purpose: Purpose) -> None:
    """How long a run trains, and what it may do beside training."""
    runner = cfg.runner
    training = purpose in ("train", "plan", "quickstart") and not runner.only_eval
    if training and runner.max_steps > runner.max_epochs:
        raise UserError(
            f"runner.max_steps={runner.max_steps} is above runner.max_epochs={runner.max_epochs}, where training would "
            f"end: set runner.max_epochs={runner.max_steps} to train that long, or runner.max_steps=-1 to train "
            f"{runner.max_epochs} steps"
        )
    if runner.only_eval and runner.resume_dir is not None and runner.ckpt_path is None:
        raise UserError(
            f"runner.resume_dir={runner.resume_dir} continues a training run; evaluate a checkpoint with "
            "runner.ckpt_path=<...>/global_step_N"
        )
    name = runner.logger.experiment_name
    if "/" in name or name in ("", ".", "..") or not name.isprintable():
        raise UserError(
            f"runner.logger.experiment_name={name!r} must name a folder below runner.logger.log_path, without a slash, "
            "such as my-run"
        )


def _check_weights(cfg: Config, purpose: Purpose) -> None:
    """Weights must be there where they are needed; small sizes may start from random ones."""
    model, key = cfg.actor.model, "actor.model.model_path"
    if model.is_lora:
        model.num_parameters()  # refuses ranks and targets that cannot be
    elif model.lora_path is not None:
        logger.warning("actor.model.lora_path=%s is not read: actor.model.is_lora is false", model.lora_path)
    if purpose in ("plan", "bench", "quickstart"):  # nothing need be loaded, or what is loaded will be made on the way
        return
    if cfg.runner.ckpt_path is not None:
        verify_ckpt_path(cfg.runner.ckpt_path)
    for name, path in ((key, model.model_path), ("actor.model.lora_path", model.lora_path if model.is_lora else None)):
        if is_placeholder(path):
            raise UserError(f"{name}={path!r} is a placeholder; set it to the folder of the downloaded checkpoint")
    given = f"runner.ckpt_path={cfg.runner.ckpt_path}" if cfg.runner.ckpt_path else f"{key}={model.model_path}"
    if cfg.runner.eval_random and (cfg.runner.ckpt_path or model.model_path):
        raise UserError(f"--random (runner.eval_random=true) evaluates random weights, but {given}; leave one out")
    if model.model_path is None:
        if model.size == "base" and purpose != "sft":
            raise UserError(
                f"{key} is not set; size base needs a checkpoint folder (actor.model.size=compact starts without one)"
            )
        from_nothing = purpose != "sft" and cfg.runner.resume_dir is None and cfg.runner.ckpt_path is None
        if from_nothing and cfg.runner.only_eval and not cfg.runner.eval_random:
            raise UserError(
                f"an evaluation needs a policy: set runner.ckpt_path=<...>/global_step_N or {key}=<folder>; "
                "`rlinf eval --random` (runner.eval_random=true) evaluates random weights"
            )
        if from_nothing:
            logger.warning("%s is not set: the policy starts from random weights", key)
    elif not Path(model.model_path).expanduser().exists():
        raise UserError(f"{key}={model.model_path!r} does not exist{where_to_get(model.model_path, key)}")
    if model.is_lora and model.lora_path is not None and not Path(model.lora_path).expanduser().exists():
        hub = where_to_get(model.lora_path, "actor.model.lora_path")
        raise UserError(f"actor.model.lora_path={model.lora_path!r} does not exist{hub}")


def _check_precision(cfg: Config, *, has_gpu: bool) -> None:
    """Some CPUs die in bf16 arithmetic, without a message."""
    model = cfg.actor.model
    if model.stored_precision == "bf16" and not has_gpu:
        given = f"null, which is bf16 for size {model.size}," if model.precision is None else model.precision
        raise UserError(
            f"actor.model.precision={given} needs a GPU, and this run has none for its policy; "
            "set actor.model.precision=fp32"
        )


def check_fit(path: str, env: EnvConfig, policy: PolicySpec) -> None:
    """The simulator must offer what the policy reads and take what it gives."""
    spec = env_spec(env, path)
    if policy.action_dim != spec.action_dim and not drops_rotation(spec, policy):
        raise UserError(
            f"actor.model.action_dim={policy.action_dim} must be {spec.action_dim} for {path} ({spec.suite})"
        )
    cameras = 1 + spec.num_wrist_images
    if policy.num_images > cameras:
        raise UserError(
            f"{policy.images_key}={policy.num_images} must be at most {cameras}, the cameras of {path} ({spec.suite})"
        )
    if policy.state_dim > spec.state_dim:
        raise UserError(
            f"{policy.state_key}={policy.state_dim} must be at most {spec.state_dim}, the state columns of {path} "
            f"({spec.suite})"
        )
    if policy.critic_state_dim not in (0, spec.critic_input_dim):
        raise UserError(
            f"{path}: suite {spec.suite} has a privileged state of {spec.critic_input_dim} columns, "
            f"the critic reads {policy.critic_state_dim}"
        )


def _check_envs(path: str, env: EnvConfig, plan: Plan, policy: PolicySpec, *, groups: bool) -> None:
    """Training envs split evenly over ranks and stages with groups whole; chunks fit rollouts and episodes.

    Evaluations spread any number of envs, `groups` False, as evenly as they can.
    """
    total, chunk, group = env.total_num_envs, policy.num_action_chunks, env.group_size
    ranks = {c: len(plan.slots(c)) for c in COMPONENTS} if groups else {}
    stages = {c: 1 if c == "actor" else plan.stages for c in ranks}  # it learns from all of them at once
    unit = math.lcm(*(ranks[c] * stages[c] for c in ranks)) * group
    for component, count in ranks.items():
        parts, each = count * stages[component], "" if component == "actor" else " and stage"
        if total % parts:
            product = f"x stages = {count} x {plan.stages} = {parts}" if each else f"= {parts}"
            raise UserError(
                f"{path}.total_num_envs={total} must divide by {component} ranks {product}; {_nearest(total, unit)}"
            )
        if total // parts % group:
            raise UserError(
                f"{path}.total_num_envs={total} gives {total // parts} envs per {component} rank{each}, which must "
                f"divide by group_size={group}; {_nearest(total, unit)}"
            )
    for key, steps in (
        ("max_steps_per_rollout_epoch", env.max_steps_per_rollout_epoch),
        ("max_episode_steps", env.max_episode_steps),
    ):
        if steps % chunk:
            raise UserError(
                f"{path}.{key}={steps} must divide by actor.model.num_action_chunks={chunk}; {_nearest(steps, chunk)}"
            )


def _check_algorithm(cfg: Config, policy: PolicySpec) -> None:
    """Estimator, loss, groups and critic fit together."""
    algorithm, train = cfg.algorithm, cfg.env.train
    try:
        estimator, loss = ADVANTAGES.traits(algorithm.adv_type), LOSSES.traits(algorithm.loss_type)
    except UserError as error:
        raise UserError(f"algorithm.{error}") from error
    if not policy.has_logprob:
        raise UserError(f"{cfg.actor.model.without_logprob()} gives no log-probs and cannot be trained by RL")
    if algorithm.group_size != train.group_size:
        raise UserError(
            f"algorithm.group_size={algorithm.group_size} must equal env.train.group_size={train.group_size}"
        )
    if estimator.compares_groups:
        if algorithm.group_size <= 1:
            raise UserError(
                f"algorithm.group_size={algorithm.group_size} must be at least 2 for adv_type {algorithm.adv_type}, "
                "which compares group members"
            )
        if train.auto_reset:
            raise UserError(
                f"env.train.auto_reset=True must be false for adv_type {algorithm.adv_type}: a group plays one episode "
                "each"
            )
    for key, value, traits in (("loss_type", algorithm.loss_type, loss), ("adv_type", algorithm.adv_type, estimator)):
        if traits.uses_critic and not policy.has_value:
            raise UserError(
                f"actor.model.add_value_head=False must be true for algorithm.{key}={value}, which needs a critic"
            )
    rewards = 1 if algorithm.reward_type == "chunk_level" else policy.num_action_chunks
    if rewards > 1 and algorithm.logprob_type == "chunk_level":
        raise UserError(
            f"algorithm.logprob_type=chunk_level must be action_level or token_level with "
            f"algorithm.reward_type={algorithm.reward_type}, which has {rewards} advantages a chunk; or set "
            "algorithm.reward_type=chunk_level"
        )
    if estimator.uses_critic and policy.values_per_chunk != rewards:
        raise UserError(
            f"algorithm.reward_type={algorithm.reward_type} pays {rewards} reward(s) a chunk, but the critic gives "
            f"{policy.values_per_chunk} value(s) (actor.model.value_type={cfg.actor.model.value_type}): they must match"
        )
    if cfg.actor.optim.critic_warmup_steps > 0 and not loss.uses_critic:
        raise UserError(
            f"actor.optim.critic_warmup_steps={cfg.actor.optim.critic_warmup_steps} must be 0 for "
            f"algorithm.loss_type={algorithm.loss_type}, which has no critic"
        )
    if not train.auto_reset and train.max_steps_per_rollout_epoch < train.max_episode_steps:
        logger.warning(
            "env.train.max_steps_per_rollout_epoch=%d ends rollouts before max_episode_steps=%d without auto_reset: "
            "episodes that are cut are in no env/ metric, so that env/success_once is too high",
            train.max_steps_per_rollout_epoch,
            train.max_episode_steps,
        )
    if algorithm.filter_rewards and algorithm.rewards_lower_bound > algorithm.rewards_upper_bound:
        raise UserError(
            f"algorithm.rewards_lower_bound={algorithm.rewards_lower_bound} must not exceed "
            f"rewards_upper_bound={algorithm.rewards_upper_bound}"
        )


def _check_batches(cfg: Config, plan: Plan, policy: PolicySpec) -> None:
    """Global batches fill the rollout, and every rank's share of one is cut into equal micro batches."""
    micro, batch, ranks = cfg.actor.micro_batch_size, cfg.actor.global_batch_size, len(plan.actor)
    size, train = rollout_size(cfg), cfg.env.train
    if batch % ranks:
        rule = f"must divide by actor ranks = {ranks}"
    elif size % batch:
        rule = (
            f"must divide the rollout of {size} samples (chunks x envs x rollout_epoch = {chunks_per_rollout(cfg)} x "
            f"{train.total_num_envs} x {train.rollout_epoch})"
        )
    elif not _has_micro_batches(batch // ranks, micro):
        rule = f"gives {batch // ranks} samples per actor rank, which fill no micro batches of {micro} or a little less"
    else:
        fitting = micro_batch_size(cfg, ranks)
        if fitting != micro:
            logger.warning(
                "actor.micro_batch_size=%d -> %d: global_batch_size=%d gives %d samples to each of %d actor ranks",
                *(micro, fitting, batch, batch // ranks, ranks),
            )
        return
    sizes = sorted(
        b for b in divisors(chunks_per_rollout(cfg), train.total_num_envs, train.rollout_epoch) if b % ranks == 0
    )
    around = [b for b in reversed(sizes) if b < batch], [b for b in sizes if b > batch]
    near = [b for side in around for b in [next((b for b in side if _has_micro_batches(b // ranks, micro)), 0)] if b]
    nearest = f"nearest {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}" if near else "none does"
    raise UserError(f"actor.global_batch_size={batch} {rule}; {nearest}")


def _has_micro_batches(share: int, micro: int) -> bool:
    """Whether a rank's samples can be cut into micro batches of at least half the wanted size, or fit into one."""
    return 2 * largest_divisor(share, at_most=micro) >= min(share, micro)


def _check_sharding(cfg: Config, plan: Plan) -> None:
    """What the actor's ranks cannot do."""
    fsdp, key = cfg.actor.fsdp_config, "actor.fsdp_config"
    if not fsdp.shards:
        if fsdp.cpu_offload:
            raise UserError(f"{key}.cpu_offload=True offloads shards: set {key}.strategy=fsdp2, or cpu_offload=false")
        return
    if fsdp.sharding_strategy == "hybrid_shard" and len({slot.node for slot in plan.actor}) > 1:
        raise UserError(f"{key}.sharding_strategy=hybrid_shard works on one node; use full_shard, or no_shard")
    places = [(slot.node, slot.devices) for slot in plan.actor if slot.devices]
    if cfg.cluster.virtual_devices == 0 and len(set(places)) < len(places):
        raise UserError(
            f"{KEY} puts several actor ranks on one accelerator, where {key}.strategy={fsdp.strategy} cannot shard; "
            f"place one on each, or set {key}.strategy=no_shard"
        )


def _check_staleness(cfg: Config, plan: Plan) -> None:
    """Rollouts beside updates need a loss that knows their age."""
    staleness = cfg.runner.max_staleness
    if staleness > 0 and cfg.runner.weight_sync_interval != 1:
        raise UserError(
            f"runner.weight_sync_interval={cfg.runner.weight_sync_interval} must be 1 with "
            f"runner.max_staleness={staleness}, which bounds the age of weights itself"
        )
    loss = LOSSES.traits(cfg.algorithm.loss_type)
    if acts_with_old_weights(cfg, plan) and not loss.clips_around_update_start:
        name, value, without = "max_staleness", staleness, 0
        if not staleness:
            name, value, without = "weight_sync_interval", cfg.runner.weight_sync_interval, 1
        logger.warning(
            "runner.%s=%d learns from experience of older weights, for which algorithm.loss_type=%s does not correct; "
            "decoupled_actor_critic (with a critic) does, and runner.%s=%d avoids it",
            *(name, value, cfg.algorithm.loss_type, name, without),
        )


def _check_ids(path: str, env: EnvConfig, split: str) -> None:
    """Test sets have no ids to learn from, nor has a task of theirs in a list."""
    spec = env_spec(env, path)
    if env.reset_ids:
        raise UserError(f"{path}.reset_ids has no effect on training; env.eval.reset_ids names the trials to play")
    if spec.balanced:
        lacking = [task for task in spec.tasks if not ids_of_task(spec, split, task)]
        if lacking:
            key = "task_suite_name" if len(suite_names(env)) > 1 else "task_weights"
            raise UserError(
                f"{path}.{key}: {lacking[0]} has no reset ids of its own to learn from ({split}) with these settings; "
                "what is only held out belongs in env.eval"
            )
    if env.task_weights and env.use_ordered_reset_state_ids:
        raise UserError(
            f"{path}.task_weights needs {path}.use_ordered_reset_state_ids=false: ids in order take every task in turn"
        )
    if not spec.reset_ids[split]:
        raise UserError(
            f"{path}.init_params: suite {spec.suite} has only held-out reset ids with these settings, none to learn "
            f"from ({split}); they belong in env.eval"
        )


def _check_trials(env: EnvConfig) -> None:
    spec = env_spec(env, "env.eval")
    held_out, tasks = len(spec.reset_ids["eval"]), len(spec.tasks)
    if len(set(env.reset_ids)) < len(env.reset_ids):
        raise UserError("env.eval.reset_ids names an id twice; a trial is played once")
    if other := [reset_id for reset_id in env.reset_ids if reset_id not in spec.reset_ids["eval"]]:
        raise UserError(
            f"env.eval.reset_ids: {other[0]} is not held out in suite {spec.suite}; its {held_out} held-out ids begin "
            f"with {spec.reset_ids['eval'][0]}"
        )
    if env.num_trials > held_out:
        raise UserError(
            f"env.eval.num_trials={env.num_trials} must be -1 (all), 0 (derived) or at most {held_out}, "
            "the held-out ids of the suite"
        )
    if len(suite_names(env)) > 1 and env.num_trials > 0 and env.num_trials % tasks:
        raise UserError(
            f"env.eval.num_trials={env.num_trials} must divide by {tasks}, the tasks of the list, which are played "
            f"equally often; {_nearest(env.num_trials, tasks)}"
        )
    if env.task_weights:
        logger.warning("env.eval.task_weights has no effect: an evaluation plays every task equally often")


def _nearest(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"nearest are {below} and {above}" if below else f"nearest is {above}"
