"""What follows from the keys: the plan of a run, and the counts that several parts of the code need. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.config.schema import Config
from rlinf.data.layout import EnvLayout
from rlinf.envs.spec import env_spec, num_trials
from rlinf.errors import UserError
from rlinf.placement.grammar import COMPONENTS, KEY, Slot, place_components
from rlinf.placement.plan import Mode, Plan


def visible_accelerators() -> int:
    """GPUs this process may use, counted without torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([d for d in listed.split(",") if d.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def chunks_per_rollout(cfg: Config, mode: Mode = "train") -> int:
    """Policy calls per env in one rollout."""
    env = cfg.env.train if mode == "train" else cfg.env.eval
    return env.max_steps_per_rollout_epoch // cfg.actor.model.num_action_chunks


def rollout_size(cfg: Config) -> int:
    """Samples (chunks of all envs) of one training step over all ranks."""
    train = cfg.env.train
    return chunks_per_rollout(cfg) * train.total_num_envs * train.rollout_epoch


def total_steps(cfg: Config) -> int:
    """Training steps of the run."""
    runner = cfg.runner
    return min(runner.max_epochs, runner.max_steps) if runner.max_steps >= 0 else runner.max_epochs


def num_eval_envs(cfg: Config) -> int:
    """Envs of an evaluation; where there are fewer trials than env.eval.total_num_envs, the others are not started."""
    env = cfg.env.eval
    return min(env.total_num_envs, num_trials(env, env_spec(env, "env.eval")))


def make_plan(cfg: Config, devices: Sequence[int] | None = None) -> Plan:
    """Place every component; `devices` is the accelerators per node, by default those of this machine on every node."""
    if devices is None:
        devices = [cfg.cluster.virtual_devices or visible_accelerators()] * cfg.cluster.num_nodes
    if len(devices) != cfg.cluster.num_nodes:
        raise UserError(f"cluster.num_nodes={cfg.cluster.num_nodes}, but {len(devices)} nodes are present")
    stages = cfg.rollout.pipeline_stage_num
    slots = place_components(cfg.cluster.component_placement, devices, cfg.cluster.node_groups)
    plan = Plan(
        env=slots["env"],
        rollout=slots["rollout"],
        actor=slots["actor"],
        train_envs=EnvLayout(cfg.env.train.total_num_envs, stages, cfg.env.train.group_size),
        eval_envs=EnvLayout(num_eval_envs(cfg), stages),
        one_process=_one_process(cfg, slots),
    )
    wanted = {
        "env": cfg.env.train.enable_offload,
        "rollout": cfg.rollout.enable_offload,
        "actor": cfg.actor.enable_offload,
    }
    offload = frozenset(a for a in COMPONENTS if wanted[a] and any(plan.overlaps(a, b) for b in COMPONENTS if b != a))
    in_turn = cfg.runner.max_staleness == 0  # else all components work at the same time
    return replace(plan, offload=offload if in_turn else frozenset())


def _one_process(cfg: Config, slots: Mapping[str, tuple[Slot, ...]]) -> bool:
    """Whether threads of one process on one accelerator can carry the plan out, and are wanted."""
    used = {(s.node, device) for c in COMPONENTS for s in slots[c] for device in s.devices}
    enough = len(slots["actor"]) == 1 and cfg.cluster.num_nodes == 1 and len(used) <= 1
    if cfg.cluster.backend == "local" and not enough:
        raise UserError(
            f"cluster.backend=local runs one actor rank on one accelerator, but {KEY} names {len(slots['actor'])} "
            f"actor ranks, {len(used)} accelerators and cluster.num_nodes={cfg.cluster.num_nodes}; use auto or ray"
        )
    return enough and cfg.cluster.backend != "ray"
