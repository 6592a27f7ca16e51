"""Every metric, once: name, unit, meaning, how it is reduced, and what else the guides call it.

Names of release 0.4 (`train/actor/policy_loss`) are canonical; those of the older guides (`actor/loss`) are aliases,
written beside them by `expand`. A name in angle brackets stands for a family: `eval/task/<task>/success_once`.
`python -m rlinf.metrics.names` prints docs/metrics.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last", "slowest rank", "exact"]


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    meaning: str
    reduce: Reduction = "mean"
    aliases: tuple[str, ...] = ()


_TRAIN = (
    Metric("train/actor/policy_loss", "loss", "clipped policy objective (PPO, GRPO)", aliases=("actor/loss",)),
    Metric("train/actor/policy_loss_abs", "loss", "mean absolute value of the policy loss per entry"),
    Metric(
        "train/actor/total_loss",
        "loss",
        "policy + value_coef x value - entropy_bonus x entropy; not divided by gradient accumulation",
        aliases=("train/loss",),
    ),
    Metric("train/actor/ratio", "ratio", "mean probability ratio new / old"),
    Metric("train/actor/ratio_abs", "ratio", "mean distance of the probability ratio from 1"),
    Metric("train/actor/clipped_ratio", "ratio", "mean probability ratio after clipping"),
    Metric(
        "train/actor/dual_cliped_ratio",
        "share",
        "entries whose loss the dual clip bounded, 0 to 1 (spelling of release 0.4)",
        aliases=("train/actor/dual_clipped_ratio",),
    ),
    Metric(
        "train/actor/clip_fraction",
        "share",
        "entries where the clipped branch was taken, 0 to 1",
        aliases=("actor/pg_clipfrac",),
    ),
    Metric("train/actor/approx_kl", "nats", "mean of old - new log-prob", aliases=("actor/approx_kl",)),
    Metric("train/actor/proximal_ratio", "ratio", "mean ratio new / proximal policy (decoupled_actor_critic)"),
    Metric("train/actor/clipped_proximal_ratio", "ratio", "mean of that ratio after clipping (decoupled_actor_critic)"),
    Metric("train/actor/proximal_approx_kl", "nats", "mean of proximal - new log-prob (decoupled_actor_critic)"),
    Metric("train/actor/behav_approx_kl", "nats", "mean of behaviour - proximal log-prob (decoupled_actor_critic)"),
    Metric("train/actor/dual_clip_fraction", "share", "entries the dual clip bounded (decoupled_actor_critic)"),
    Metric(
        "train/actor/behav_clip_fraction",
        "share",
        "entries dropped because proximal / behaviour passed its threshold (decoupled_actor_critic)",
    ),
    Metric(
        "train/actor/entropy_loss",
        "nats",
        "mean policy entropy; 0 where the policy's noise is not learned",
        aliases=("train/entropy_loss",),
    ),
    Metric("train/actor/grad_norm", "norm", "gradient norm before clipping", aliases=("actor/grad_norm",)),
    Metric("train/actor/lr", "1", "learning rate of the policy", "last"),
    Metric(
        "train/actor/logprob_gap",
        "nats",
        "largest distance of old and new log-prob at the first minibatch; 0 but for rounding",
        "max",
    ),
    Metric("train/actor/skipped_steps", "count", "optimiser steps skipped because the gradient was not finite", "sum"),
    Metric("train/actor/optimizer_steps", "count", "optimiser steps taken in this training step", "sum"),
    Metric("train/critic/value_loss", "loss", "clipped Huber loss of the values", aliases=("actor/value_loss",)),
    Metric(
        "train/critic/value_clip_ratio",
        "share",
        "values that moved further than value_clip from the old ones, 0 to 1",
        aliases=("actor/value_clip_ratio",),
    ),
    Metric(
        "train/critic/explained_variance",
        "share",
        "1 - Var(return - value) / Var(return), exact over all micro batches and ranks",
        "exact",
    ),
    Metric("train/critic/lr", "1", "learning rate of the value head", "last"),
    Metric("train/sft/loss", "loss", "supervised loss of the fine-tuning step"),
    Metric("train/sft/grad_norm", "norm", "gradient norm before clipping"),
    Metric("train/sft/lr", "1", "learning rate", "last"),
)

_ROLLOUT = (
    Metric("rollout/rewards", "reward", "mean reward per decision (chunk or action), bootstrap included"),
    Metric("rollout/advantages_mean", "1", "mean advantage of unmasked entries"),
    Metric("rollout/advantages_max", "1", "largest advantage", "max"),
    Metric("rollout/advantages_min", "1", "smallest advantage", "min"),
    Metric("rollout/returns_mean", "reward", "mean return target of the critic (GAE)"),
    Metric("rollout/returns_max", "reward", "largest return target", "max"),
    Metric("rollout/returns_min", "reward", "smallest return target", "min"),
    Metric("rollout/valid_fraction", "share", "entries that count in the loss after masks and reward filter, 0 to 1"),
    Metric("rollout/prefixes_on_device", "share", "frozen prefixes that the update finds on the device, 0 to 1"),
    Metric("rollout/prefixes_on_host", "share", "frozen prefixes that it copies from host memory; others are computed"),
    Metric("rollout/staleness", "updates", "updates that the weights which acted lacked (runner.max_staleness)"),
    Metric("rollout/groups_kept", "share", "groups that passed the reward filter, 0 to 1"),
)


def _episode_rows(prefix: str, whose: str) -> tuple[Metric, ...]:
    return (
        Metric(f"{prefix}/success_once", "share", f"{whose} that succeeded at any step"),
        Metric(f"{prefix}/success_at_end", "share", f"{whose} that were successful at their last step"),
        Metric(
            f"{prefix}/fail_once", "share", f"{whose} that failed at any step (where one can fail: CALVIN, official)"
        ),
        Metric(f"{prefix}/fail_at_end", "share", f"{whose} that were failed at their last step (as fail_once)"),
        Metric(f"{prefix}/return", "reward", f"mean sum of rewards of {whose}"),
        Metric(f"{prefix}/reward", "reward", f"mean reward per step of {whose}"),
        Metric(f"{prefix}/episode_len", "steps", f"mean steps of {whose} until their first end"),
        Metric(f"{prefix}/num_trajectories", "count", f"number of {whose}", "sum"),
        Metric(
            f"{prefix}/avg_len",
            "subtasks",
            f"mean subtasks solved in a row by {whose} (CALVIN)",
            aliases=(f"{prefix}/avg_num_subtasks",),
        ),
        *(
            Metric(f"{prefix}/success_len_{k}", "share", f"{whose} that solved at least {k} subtasks in a row (CALVIN)")
            for k in range(1, 6)
        ),
        Metric(f"{prefix}/group/<group>/success_once", "share", f"success_once of {whose} in a group of tasks"),
        Metric(f"{prefix}/group_average", "share", f"mean over the groups of tasks of {whose}, if none shares a task"),
        Metric(f"{prefix}/task/<task>/success_once", "share", f"success_once of one task's {whose}"),
        Metric(f"{prefix}/task/<task>/success_at_end", "share", f"success_at_end of one task's {whose}"),
        Metric(f"{prefix}/task/<task>/return", "reward", f"return of one task's {whose}"),
        Metric(f"{prefix}/task/<task>/episode_len", "steps", f"episode_len of one task's {whose}"),
        Metric(f"{prefix}/task/<task>/num_trajectories", "count", f"number of one task's {whose}", "sum"),
        Metric(f"{prefix}/extra/<name>", "1", f"mean of a simulator's own quantity over {whose}"),
    )


_ENV = (
    *_episode_rows("env", "training episodes that ended in this step"),
    Metric("env/steps", "steps", "simulator steps taken", "sum"),
    Metric("env/restarts", "count", "simulator processes restarted since the run began", "sum"),
    Metric("env/tasks_built", "count", "simulator tasks loaded into memory by training rollouts", "sum"),
)

_EVAL = (
    *_episode_rows("eval", "evaluation episodes"),
    Metric("eval/success_low", "share", "lower end of the 95 % Wilson interval of success_once"),
    Metric("eval/success_high", "share", "upper end of the 95 % Wilson interval of success_once"),
)


def _worker_rows(role: str) -> tuple[Metric, ...]:
    return (
        _timer(f"{role}/onload", f"{role} workers coming back to their devices"),
        _timer(f"{role}/offload", f"{role} workers leaving their devices to others"),
        _timer(f"{role}/busy", f"all calls of an {role} worker while training, waiting excluded"),
        Metric(
            f"time/{role}/slowest_rank",
            "rank",
            f"the {role} rank that was busy longest, where there are several",
            "exact",
        ),
        Metric(
            f"time/{role}/slowest_over_median",
            "ratio",
            f"its busy time over the median of the {role} ranks; above 1.5 the console names a straggler",
            "exact",
        ),
    )


def _timer(name: str, meaning: str, *aliases: str) -> Metric:
    return Metric(f"time/{name}", "s", meaning, "slowest rank", aliases)


_TIME = (
    _timer("step", "whole training step, evaluation included, saving not"),
    _timer("sync_weights", "weights from actor to rollout"),
    _timer("offload", "components leaving their devices and coming back"),
    _timer("generate_rollouts", "the rollout loop: simulators and policy"),
    _timer("cal_adv_and_returns", "masks, advantages, returns"),
    _timer("actor_training", "all update epochs"),
    _timer("eval", "evaluation"),
    _timer("save", "writing the checkpoint of the step before, logged with this one"),
    _timer("env/interact", "env workers in the rollout loop: starting episodes and stepping"),
    _timer("env/env_interact_step", "executing chunks of actions"),
    _timer(
        "env/bootstrap_step", "the observations rollouts start from, resets included", "time/env/env/bootstrap_step"
    ),
    _timer("env/evaluate", "env workers in the evaluation"),
    _timer(
        "rollout/generate", "rollout workers in the rollout loop: acting and valuing", "time/rollout/rollout/generate"
    ),
    _timer("rollout/predict", "the policy acts, replay inputs stored"),
    _timer("rollout/last_values", "values of the observations rollouts end with"),
    _timer(
        "rollout/send_rollout_trajectories",
        "experience made ready for the actor; next to nothing where it is read in place",
        "time/env/env/send_rollout_trajectories",
    ),
    _timer("rollout/sync_model_from_actor", "taking the actor's weights"),
    _timer("rollout/evaluate", "rollout workers in the evaluation"),
    _timer("actor/sync_model_to_rollout", "sending the weights", "time/actor/actor/sync_model_to_rollout"),
    _timer("actor/compute_adv", "taking the experience; masks, advantages, returns", "time/actor/actor/compute_adv"),
    _timer("actor/run_training", "all update epochs"),
    *(row for role in ("env", "rollout", "actor") for row in _worker_rows(role)),
    Metric(
        "time/device_idle_mean", "share", "time of a step in which neither policy nor learner used a device", "mean"
    ),
    Metric("time/device_idle_max", "share", "the same for the device that idled most", "max"),
    Metric("time/env_steps_per_second", "steps/s", "simulator steps per second of the rollout loop", "last"),
)

_BYTES = (
    Metric("messages/bytes", "bytes", "what workers passed to workers of other processes in this step", "sum"),
    Metric(
        "sync/bytes",
        "bytes",
        "parameters sent to rollout ranks with a copy of their own, each counted once; 0 where all are shared",
        "sum",
    ),
    Metric("offload/bytes", "bytes", "weights and optimiser state moved between devices and hosts, both ways", "sum"),
)

_SYSTEM = (
    Metric("system/cpu", "share", "processors of the driver's machine at work since the last step, by whomever"),
    Metric("system/host_memory", "bytes", "memory of the driver's machine in use, caches not counted", "last"),
    Metric(
        "system/device_memory", "bytes", "in use on its fullest NVIDIA device at the end of the step, else 0", "max"
    ),
    Metric("system/disk_free", "bytes", "left on the disk of the run's folder", "last"),
)

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Training": _TRAIN,
    "Rollout": _ROLLOUT,
    "Environment": _ENV,
    "Evaluation": _EVAL,
    "Time": _TIME,
    "Bytes": _BYTES,
    "System": _SYSTEM,
}
METRICS: dict[str, Metric] = {metric.name: metric for rows in GROUPS.values() for metric in rows}
CANONICAL: dict[str, str] = {alias: metric.name for metric in METRICS.values() for alias in metric.aliases}
"""Alias -> canonical name."""

_FAMILIES = [
    (re.compile(re.sub(r"<\w+>", "[^/]+", metric.name)), metric) for metric in METRICS.values() if "<" in metric.name
]


@cache
def find_metric(name: str) -> Metric:
    """The row that documents `name`; families match any one path component in place of `<...>`."""
    if name in METRICS and "<" not in name:
        return METRICS[name]
    for pattern, metric in _FAMILIES:
        if pattern.fullmatch(name):
            return metric
    if name in CANONICAL:
        raise ValueError(f"metric {name!r} is an alias and is added by itself; log {CANONICAL[name]!r}")
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise ValueError(f"metric {name!r} is not in rlinf/metrics/names.py; nearest is {near!r}")


def episode_metric(name: str) -> Metric | None:
    """The row of `env/<name>` and `eval/<name>`, where there is one."""
    rows = [f"{prefix}/{name}" for prefix in ("env", "eval")]
    return find_metric(rows[1]) if all(_is_documented(row) for row in rows) else None


def guide_name(name: str) -> str:
    """What the guides call an episode metric: its alias where it has one."""
    row = episode_metric(name)
    return row.aliases[0].removeprefix("eval/") if row is not None and row.aliases else name


def _is_documented(name: str) -> bool:
    return ("<" not in name and name in METRICS) or any(pattern.fullmatch(name) for pattern, _ in _FAMILIES)


def expand(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` followed by their aliases; refuses a name that no row documents."""
    aliases = {alias: value for name, value in metrics.items() for alias in find_metric(name).aliases}
    return {**metrics, **aliases}


def task_metric(task: str, name: str) -> str:
    """`task/<task>/<name>`, to go behind env/ or eval/; a slash in the task name becomes a dash, or it would split."""
    return f"task/{task.replace('/', '-')}/{name}"


_HEADER = """# Metrics

Printed by `python -m rlinf.metrics.names`; edit `rlinf/metrics/names.py`, not this file.

Every line of `metrics.jsonl` and every logger backend holds the canonical name and, with the same value, its aliases:
the names of older guides. `actor/loss` is the policy loss, as those guides describe it; `train/loss` is the total.
`rollout/returns_mean` is the critic's target (a discounted return); the return of whole episodes is `env/return`.
A run logs the rows that apply to it: no critic, no `train/critic/...`; no evaluation in a step, no `eval/...`; one
task, no `.../task/...`; no notion of failure in the simulator, no `.../fail_once`. A run that only evaluates logs one
line, at the checkpoint's step, to every backend.

Reduction says how the values of micro batches and ranks become one number. A mean is weighted by the number of unmasked
entries (or episodes) behind each value; a timer sums within a rank and shows the slowest rank. Timers of workers count
calls, not waiting for their arguments. `<task>` and `<group>` stand for one path component. Values that are not finite
are `null` in `metrics.jsonl`. Apart from `time/...`, `system/...` and `sync/bytes`, a resumed run logs what an
uninterrupted one logs.
"""


def markdown() -> str:
    """docs/metrics.md, whole."""
    lines = [_HEADER]
    for group, rows in GROUPS.items():
        lines += [f"## {group}", "", "| name | unit | reduction | meaning | aliases |", "|---|---|---|---|---|"]
        for row in rows:
            aliases = ", ".join(f"`{alias}`" for alias in row.aliases)
            lines.append(
                f"| `{row.name}` | {row.unit} | {row.reduce} | {row.meaning} | {aliases} |".replace("|  |", "| |")
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
