"""What `rlinf plan` prints: device map, what travels, batch arithmetic, memory estimate."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from rlinf.commands.device_map import Row, actor_shards, device_rows, parameter_bytes, sample_bytes, traffic_rows
from rlinf.commands.units import bytes_text, count_text, plural
from rlinf.compat.cache_size import cache_bytes_per_sample
from rlinf.config.check import policy_spec
from rlinf.config.derived import chunks_per_rollout, micro_batch_size, rollout_size, total_steps
from rlinf.config.schema import Config
from rlinf.envs.config import EnvConfig
from rlinf.envs.routing import num_processes, tasks_per_process
from rlinf.envs.spec import env_options, env_spec, num_trials
from rlinf.models.config import PolicySpec
from rlinf.placement.plan import Plan

WIDTH = 96  # of a row's text


def describe_plan(cfg: Config, plan: Plan) -> str:
    """The plan as text, four short tables."""
    spec = policy_spec(cfg)
    sections = (
        (f"devices ({plan.mode}, {plural(len(plan.processes), 'process')})", device_rows(cfg, plan)),
        ("between processes", traffic_rows(cfg, plan)),
        ("batch arithmetic", _batch_rows(cfg, plan, spec)),
        ("memory estimate", _memory_rows(cfg, plan, spec)),
    )
    env, model = cfg.env.eval if cfg.runner.only_eval else cfg.env.train, cfg.actor.model
    lines = [f"{cfg.runner.logger.experiment_name}: {model.model_type} {model.size} on {env_spec(env).suite}"]
    for title, rows in sections:
        lines += ["", title, *(f"  {name:<22}{text}" for name, text in rows)]
    return "\n".join(lines)


def _batch_rows(cfg: Config, plan: Plan, spec: PolicySpec) -> Iterator[Row]:
    """How envs become samples and samples become optimiser steps."""
    train, actor, size = cfg.env.train, cfg.actor, rollout_size(cfg)
    batches, ranks = size // actor.global_batch_size, len(plan.actor)
    groups = f", groups of {train.group_size}" if train.group_size > 1 else ""
    if not cfg.runner.only_eval:
        each = plan.num_envs("env")
        shares = f"{plural(len(plan.env), 'rank')} x {plural(plan.stages, 'stage')} x {each}"
        yield ("envs", f"{train.total_num_envs} = {shares}{groups}")
        yield from _task_rows(train)
        yield (
            "samples per step",
            f"{size} = {plural(chunks_per_rollout(cfg), 'chunk')} x {plural(train.total_num_envs, 'env')} x "
            f"{plural(train.rollout_epoch, 'rollout')}; {size * spec.num_action_chunks} actions",
        )
        micro = micro_batch_size(cfg, ranks)
        count = plural(actor.global_batch_size // ranks // micro, "micro batch")
        yield ("global batch", f"{actor.global_batch_size} = {plural(ranks, 'rank')} x {count} x {micro}")
        epochs = cfg.algorithm.update_epoch
        yield (
            "optimiser steps",
            f"{batches * epochs} per training step = {plural(batches, 'batch')} x {plural(epochs, 'update epoch')}",
        )
        yield ("training steps", f"{total_steps(cfg)}")
    if cfg.runner.only_eval or cfg.runner.val_check_interval > 0:
        played = env_spec(cfg.env.eval, "env.eval")
        trials = num_trials(cfg.env.eval, played)
        shares = f" = {len(played.tasks)} tasks x {trials // len(played.tasks)}" if played.balanced else ""
        every = (
            "" if cfg.runner.only_eval else f", every {plural(cfg.runner.val_check_interval, 'step')} and at the end"
        )
        yield ("evaluation", f"{plural(trials, 'trial')}{shares} in {plural(plan.eval_envs.num_envs, 'env')}{every}")
        if cfg.runner.only_eval:
            yield from _task_rows(cfg.env.eval)


def _task_rows(env: EnvConfig) -> Iterator[Row]:
    """The tasks of a list, and the share of the episodes that each gets, in lines of at most WIDTH."""
    spec = env_spec(env)
    if not spec.balanced:
        return
    weights = {task: env.task_weights.get(task, 1.0) for task in spec.tasks}
    equal, total = len(set(weights.values())) == 1, sum(weights.values())
    named = [t if equal else f"{t} (weight {weights[t]:g}, {weights[t] / total:.0%})" for t in spec.tasks]
    shares = " in equal shares" if equal else ""
    lines = wrap(f"{len(named)}{shares}: {', '.join(named)}", WIDTH, break_on_hyphens=False)
    yield from (("" if n else "tasks", line) for n, line in enumerate(lines))


def _memory_rows(cfg: Config, plan: Plan, spec: PolicySpec) -> Iterator[Row]:
    """Weights, optimiser, replay arena and prefix cache; activations depend on the kernels and are not counted."""
    model = cfg.actor.model
    total, trainable = sum(model.num_parameters().values()), model.num_trainable_parameters()
    half, shards = parameter_bytes(cfg) == 2, actor_shards(cfg, plan)
    weights = total * parameter_bytes(cfg)
    yield ("weights", f"{bytes_text(weights)} ({count_text(total)} parameters in {'bf16' if half else 'fp32'})")
    if cfg.runner.only_eval:
        return
    # gradient and two moments in fp32, and fp32 masters of bf16 weights
    adam = trainable * (16 if half else 12) // shards
    yield (
        "optimiser",
        f"{bytes_text(adam)} per actor rank (gradients, moments{', masters' if half else ''} of "
        f"{count_text(trainable)} trainable parameters{f', {shards} shards' if shards > 1 else ''})",
    )
    samples = rollout_size(cfg) // len(plan.rollout)
    row = sample_bytes(spec)
    yield ("replay arena", f"{bytes_text(samples * row)} per rollout rank ({samples} samples x {bytes_text(row)})")
    height, width = env_spec(cfg.env.train).image_size
    frames = plan.num_envs("env") * plan.stages * (1 + env_spec(cfg.env.train).num_wrist_images)
    yield ("camera images", f"{bytes_text(frames * height * width * 3)} per env rank ({frames} of {height} x {width})")
    yield from _loaded_tasks_row(cfg, plan)
    need = samples * cache_bytes_per_sample(model, cfg.compat)
    if need and plan.keeps_prefixes:
        yield ("prefix cache", f"{bytes_text(need)} per rollout rank: {', '.join(_tiers(cfg, need))}")
    replay = samples * row
    if not plan.rollout_copies:
        rest = "prefix cache, activations" if need and plan.keeps_prefixes else "activations"
        yield ("total", f"{bytes_text(weights + adam + replay)} per rank, without {rest} and simulators")
    else:
        yield ("total, actor", f"{bytes_text(weights // shards + adam)} per rank, without activations")
        yield ("total, rollout", f"{bytes_text(weights + replay)} per rank, without activations")


def _tiers(cfg: Config, need: int) -> Iterator[str]:
    """Where the prefixes of a rollout are kept, and what becomes of the rest."""
    for value, place, part in (
        (cfg.rollout.prefix_cache_bytes, "device", "what is free after activations"),
        (cfg.rollout.prefix_cache_host_bytes, "pinned host memory", "half of what is free, beside a GPU"),
    ):
        if value:
            yield f"{place} ({part if value == 'auto' else bytes_text(value)})"
    fixed = [v for v in (cfg.rollout.prefix_cache_bytes, cfg.rollout.prefix_cache_host_bytes) if v != "auto"]
    if len(fixed) < 2 or sum(fixed) < need:
        yield "the rest is computed again"


def _loaded_tasks_row(cfg: Config, plan: Plan) -> Iterator[Row]:
    """Host memory of the tasks that simulator processes keep, where the simulator does."""
    train, spec = cfg.env.train, env_spec(cfg.env.train)
    if not spec.loaded_task_bytes:
        return
    envs = plan.num_envs("env")
    processes = num_processes(train, spec, envs) * plan.stages
    each = env_options(train).max_loaded_tasks or tasks_per_process(train, spec, envs)
    need = bytes_text(processes * each * spec.loaded_task_bytes)
    where = f"{each} of {plural(len(spec.tasks), 'task')} in each of {plural(processes, 'simulator process')}"
    yield ("loaded tasks", f"up to {need} of host memory per env rank ({where})")
