"""What follows from the keys: the plan of a run, and the counts that several parts of the code need. Torch-free."""

from __future__ import annotations

import math
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


def micro_batch_size(cfg: Config, ranks: int) -> int:
    """Samples per forward on each of so many actor ranks: actor.micro_batch_size, or the next smaller divisor of a
    rank's share of the global batch."""
    share = max(1, cfg.actor.global_batch_size // ranks)  # an evaluation does not care for batches
    return largest_divisor(share, at_most=cfg.actor.micro_batch_size)


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of `number` up to a bound."""
    return max(d for d in divisors(number) if d <= at_most)


def divisors(*factors: int) -> set[int]:
    """Every divisor of the product of `factors`."""
    found = {1}
    for number in factors:
        small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
        found = {a * b for a in found for d in small for b in (d, number // d)}
    return found


def total_steps(cfg: Config) -> int:
    """Training steps of the run."""
    runner = cfg.runner
    return min(runner.max_epochs, runner.max_steps) if runner.max_steps >= 0 else runner.max_epochs


def acts_with_old_weights(cfg: Config, plan: Plan) -> bool:
    """Whether some rollouts act with other weights than those that their update starts from."""
    return cfg.runner.max_staleness > 0 or (cfg.runner.weight_sync_interval > 1 and len(plan.rollout_copies) > 0)


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
    slots = place_components(cfg.cluster.component_placement, devices, cfg.cluster.node_groups)
    stages = _pipeline_stages(cfg, slots)
    plan = Plan(
        env=slots["env"],
        rollout=slots["rollout"],
        actor=slots["actor"],
        train_envs=EnvLayout(cfg.env.train.total_num_envs, stages, cfg.env.train.group_size),
        eval_envs=EnvLayout(num_eval_envs(cfg), stages),
        one_process=_one_process(cfg, slots),
        actors_apart=_rolls_out_beside_updates(cfg),
    )
    wanted = {
        "env": cfg.env.train.enable_offload,
        "rollout": cfg.rollout.enable_offload,
        "actor": cfg.actor.enable_offload,
    }
    offload = frozenset(a for a in COMPONENTS if wanted[a] and any(plan.overlaps(a, b) for b in COMPONENTS if b != a))
    return replace(plan, offload=frozenset() if plan.actors_apart else offload)  # all work at the same time


def _pipeline_stages(cfg: Config, slots: Mapping[str, tuple[Slot, ...]]) -> int:
    """Shares of the envs that are simulated in turn: as configured, or two where they can overlap with the policy."""
    wanted, train = cfg.rollout.pipeline_stage_num, cfg.env.train
    if wanted != "auto":
        return wanted
    accelerated = not cfg.cluster.virtual_devices and all(slot.devices for slot in slots["rollout"])
    if cfg.runner.only_eval or cfg.compat is not None or not accelerated or env_spec(train).batched:
        return 1
    halves = 2 * math.lcm(len(slots["env"]), len(slots["rollout"])) * train.group_size
    return 2 if train.total_num_envs % halves == 0 else 1


def _rolls_out_beside_updates(cfg: Config) -> bool:
    return cfg.runner.max_staleness > 0 and not cfg.runner.only_eval


def _one_process(cfg: Config, slots: Mapping[str, tuple[Slot, ...]]) -> bool:
    """Whether threads of one process on one accelerator can carry the plan out, and are wanted."""
    used = {(s.node, device) for c in COMPONENTS for s in slots[c] for device in s.devices}
    beside = _rolls_out_beside_updates(cfg)
    enough = len(slots["actor"]) == 1 and cfg.cluster.num_nodes == 1 and len(used) <= 1 and not beside
    if cfg.cluster.backend == "local" and beside:
        raise UserError(
            f"cluster.backend=local rolls out and learns in turn; runner.max_staleness={cfg.runner.max_staleness} "
            "needs auto or ray"
        )
    if cfg.cluster.backend == "local" and not enough:
        raise UserError(
            f"cluster.backend=local runs one actor rank on one accelerator, but {KEY} names {len(slots['actor'])} "
            f"actor ranks, {len(used)} accelerators and cluster.num_nodes={cfg.cluster.num_nodes}; use auto or ray"
        )
    return enough and cfg.cluster.backend != "ray"
