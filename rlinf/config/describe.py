"""What `rlinf plan` prints: device map, batch arithmetic, memory estimate."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlinf.config.check import policy_spec, rollout_size
from rlinf.config.schema import Config
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.models.config import PolicySpec
from rlinf.runtime.placement import COMPONENTS, Plan

Row = tuple[str, str]


def describe_plan(cfg: Config, plan: Plan) -> str:
    """The plan as text, three short tables."""
    spec = policy_spec(cfg)
    sections = (
        (f"devices ({plan.mode})", _device_rows(cfg, plan)),
        ("batch arithmetic", _batch_rows(cfg, plan, spec)),
        ("memory estimate", _memory_rows(cfg, plan, spec)),
    )
    env, model = cfg.env.eval if cfg.runner.only_eval else cfg.env.train, cfg.actor.model
    lines = [f"{cfg.runner.logger.experiment_name}: {model.model_type} {model.size} on {env_spec(env).suite}"]
    for title, rows in sections:
        lines += ["", title, *(f"  {name:<22}{text}" for name, text in rows)]
    return "\n".join(lines)


def _device_rows(cfg: Config, plan: Plan) -> Iterator[Row]:
    """One row per accelerator or CPU node, with the process ranks on it."""
    users: dict[tuple[int, int], list[str]] = {}
    for component in COMPONENTS:
        for rank, slot in enumerate(plan.slots(component)):
            for device in slot.devices or (-1,):
                users.setdefault((slot.node, device), []).append(f"{component}[{rank}]")
    for (node, device), names in sorted(users.items()):
        yield (f"node {node} " + ("cpu" if device < 0 else f"gpu {device}"), " ".join(names))
    env = cfg.env.eval if cfg.runner.only_eval else cfg.env.train
    envs = plan.num_envs("env", "eval" if cfg.runner.only_eval else "train")
    processes = min(envs, env.num_processes or os.cpu_count() or 1)
    yield ("simulators", f"{_n(processes, 'process')} per env rank and stage, for its {_n(envs, 'env')}")
    if plan.shares("rollout", "actor"):
        yield ("weight sync", "none: rollout and actor share a process and its parameters")
    else:
        yield ("weight sync", f"actor -> rollout, every {_n(cfg.runner.weight_sync_interval, 'step')}")
    if plan.offload:
        yield ("offload", ", ".join(sorted(plan.offload)))


def _batch_rows(cfg: Config, plan: Plan, spec: PolicySpec) -> Iterator[Row]:
    """How envs become samples and samples become optimiser steps."""
    train, actor, size = cfg.env.train, cfg.actor, rollout_size(cfg)
    chunks = train.max_steps_per_rollout_epoch // spec.num_action_chunks
    batches, ranks = size // actor.global_batch_size, len(plan.actor)
    groups = f", groups of {train.group_size}" if train.group_size > 1 else ""
    if not cfg.runner.only_eval:
        each = plan.num_envs("env")
        yield (
            "envs",
            f"{train.total_num_envs} = {_n(len(plan.env), 'rank')} x {_n(plan.stages, 'stage')} x {each}{groups}",
        )
        yield (
            "samples per step",
            f"{size} = {_n(chunks, 'chunk')} x {_n(train.total_num_envs, 'env')} x "
            f"{_n(train.rollout_epoch, 'rollout')}; {size * spec.num_action_chunks} actions",
        )
        micro = _n(actor.global_batch_size // ranks // actor.micro_batch_size, "micro batch")
        yield (
            "global batch",
            f"{actor.global_batch_size} = {_n(ranks, 'rank')} x {micro} x {actor.micro_batch_size}",
        )
        epochs = cfg.algorithm.update_epoch
        yield (
            "optimiser steps",
            f"{batches * epochs} per training step = {_n(batches, 'batch')} x {_n(epochs, 'update epoch')}",
        )
        steps = cfg.runner.max_epochs if cfg.runner.max_steps < 0 else min(cfg.runner.max_epochs, cfg.runner.max_steps)
        yield ("training steps", f"{steps}")
    if cfg.runner.only_eval or cfg.runner.val_check_interval > 0:
        trials = len(eval_trials(cfg.env.eval, env_spec(cfg.env.eval, "env.eval")))
        every = "" if cfg.runner.only_eval else f", every {_n(cfg.runner.val_check_interval, 'step')} and at the end"
        yield ("evaluation", f"{_n(trials, 'trial')} in {_n(cfg.env.eval.total_num_envs, 'env')}{every}")


def _memory_rows(cfg: Config, plan: Plan, spec: PolicySpec) -> Iterator[Row]:
    """Weights, optimiser, replay arena and prefix cache; activations depend on the kernels and are not counted."""
    model = cfg.actor.model
    total, trainable = sum(model.num_parameters().values()), model.num_trainable_parameters()
    half = model.precision in ("bf16", "bf16-mixed") or (model.precision is None and model.size == "base")
    shards = (
        1
        if "no_shard" in (cfg.actor.fsdp_config.strategy, cfg.actor.fsdp_config.sharding_strategy)
        else len(plan.actor)
    )
    weights = total * (2 if half else 4)
    yield ("weights", f"{_bytes(weights)} ({_count(total)} parameters in {'bf16' if half else 'fp32'})")
    if cfg.runner.only_eval:
        return
    # gradient and two moments in fp32, and fp32 masters of bf16 weights
    adam = trainable * (16 if half else 12) // shards
    yield (
        "optimiser",
        f"{_bytes(adam)} per actor rank (gradients, moments{', masters' if half else ''} of {_count(trainable)} "
        f"trainable parameters{f', {shards} shards' if shards > 1 else ''})",
    )
    samples = rollout_size(cfg) // len(plan.rollout)
    row = sample_bytes(spec)
    yield ("replay arena", f"{_bytes(samples * row)} per rollout rank ({samples} samples x {_bytes(row)})")
    height, width = env_spec(cfg.env.train).image_size
    frames = plan.num_envs("env") * plan.stages * (1 + env_spec(cfg.env.train).num_wrist_images)
    yield ("camera images", f"{_bytes(frames * height * width * 3)} per env rank ({frames} of {height} x {width})")
    need, budget = samples * model.cache_bytes_per_sample(), cfg.rollout.prefix_cache_bytes // len(plan.rollout)
    if need and budget:
        kept = "all is kept" if need <= budget else f"{budget / need:.0%} of it is kept, the rest computed again"
        yield ("prefix cache", f"up to {_bytes(need)} per rollout rank, budget {_bytes(budget)}: {kept}")
    replay = samples * row + min(need, budget)
    if plan.shares("rollout", "actor"):
        yield ("total", f"{_bytes(weights + adam + replay)} per rank, without activations and simulators")
    else:
        yield ("total, actor", f"{_bytes(weights // shards + adam)} per rank, without activations")
        yield ("total, rollout", f"{_bytes(weights + replay)} per rank, without activations")


def sample_bytes(spec: PolicySpec) -> int:
    """One sample in the arena: uint8 images at the model's size, actions, log-probs, state, rewards, flags, values."""
    images = spec.num_images * spec.image_size**2 * 3
    numbers = 2 * spec.num_action_chunks * spec.action_dim + spec.state_dim + spec.num_action_chunks
    return images + 4 * (numbers + 2 * spec.values_per_chunk) + 3 * spec.num_action_chunks


def _n(count: int, thing: str) -> str:
    """2, "batch" -> 2 batches."""
    plural = "es" if thing.endswith(("ss", "tch")) else "s"
    return f"{count} {thing}" + ("" if count == 1 else plural)


def _bytes(number: float) -> str:
    """1536 -> 1.5 kB; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _count(number: float) -> str:
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} B"
