"""Where a step's seconds went: what each rank measured of itself -> `time/...` metrics. Pure functions, torch-free.

A worker measures every call of its methods; waiting for an argument is no part of a call. So a rank's seconds are those
it was busy, and what is missing to the length of a phase is waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlinf.placement.grammar import COMPONENTS
from rlinf.placement.plan import Plan

Seconds = Mapping[str, float]  # method -> seconds of one rank
Busy = Mapping[str, Sequence[Seconds]]  # role -> its ranks

# Method -> the name its seconds are logged under; what is not listed is bookkeeping and counts as busy only.
METHODS: dict[str, dict[str, str]] = {
    "env": {"begin": "bootstrap_step", "step": "env_interact_step", "onload": "onload", "offload": "offload"},
    "rollout": {
        "predict": "predict",
        "finish": "last_values",
        "experience": "send_rollout_trajectories",
        "receive_weights": "sync_model_from_actor",
        "onload": "onload",
        "offload": "offload",
    },
    "actor": {
        "compute_advantages": "compute_adv",
        "update": "run_training",
        "send_weights": "sync_model_to_rollout",
        "onload": "onload",
        "offload": "offload",
    },
}
# Names for the whole of a role's work in the rollout loop.
LOOP: dict[str, tuple[str, tuple[str, ...]]] = {
    "env": ("interact", ("begin", "step")),
    "rollout": ("generate", ("predict", "finish")),
}
STRAGGLER = 1.5  # times the median of its role's ranks
WORTH_OVERLAPPING = 0.05  # of the rollout: what stages must save to be worth their smaller batches
WORTH_NAMING = 0.01  # of the step: what a straggler must cost to be called one


@dataclass(frozen=True)
class Usage:
    """What the workers of a run did in some span of time."""

    busy: Busy
    bytes_moved: int = 0  # between processes


def step_metrics(
    plan: Plan, times: Mapping[str, float], used: Usage, evaluating: Usage | None, *, env_steps: float
) -> dict[str, float]:
    """What a step cost: its phases as the runner saw them, its workers, idle devices, bytes of messages.

    `used` was measured while training, `evaluating` in the evaluation that `times` counts as `eval`.
    """
    out = {f"time/{name}": seconds for name, seconds in times.items()}
    for role in COMPONENTS:
        out |= {f"time/{role}/{name}": seconds for name, seconds in worker_seconds(role, used.busy[role]).items()}
    out |= {} if evaluating is None else evaluation_seconds(evaluating)
    # Rollouts that run beside an update last longer than the wait for them.
    rollout_seconds = max(times["generate_rollouts"], out["time/env/interact"], out["time/rollout/generate"])
    idle = idle_shares(plan, used.busy, times["step"] - times.get("eval", 0.0)).values()
    return out | {
        "time/device_idle_mean": statistics.fmean(idle),
        "time/device_idle_max": max(idle),
        "time/env_steps_per_second": env_steps / rollout_seconds,
        "messages/bytes": float(used.bytes_moved),
    }


def overlap_line(stages: int, metrics: Mapping[str, float]) -> str:
    """What a step's pipeline stages came to, in words: the seconds of its rollout that two sides worked at once."""
    simulators, policy = metrics["time/env/interact"], metrics["time/rollout/generate"]
    rollout = metrics["time/generate_rollouts"]
    overlap = max(0.0, simulators + policy - rollout)
    sides = f"simulators {simulators:.1f} s, policy {policy:.1f} s, both in {rollout:.1f} s"
    if overlap > WORTH_OVERLAPPING * rollout:
        return f"{stages} pipeline stages, chosen because the policy has an accelerator: {sides} of the first rollout"
    return (
        f"{stages} pipeline stages brought little in the first rollout ({sides}): "
        "try rollout.pipeline_stage_num=1, whose batches are larger"
    )


def evaluation_seconds(evaluating: Usage) -> dict[str, float]:
    """What an evaluation cost the workers that play it."""
    return {f"time/{role}/evaluate": max(map(_total, evaluating.busy[role])) for role in LOOP}


def worker_seconds(role: str, ranks: Sequence[Seconds]) -> dict[str, float]:
    """Published name -> seconds of the slowest rank: its methods, the rollout loop, everything; and who that is."""
    out: dict[str, float] = {}
    for method, name in METHODS[role].items():
        if any(method in rank for rank in ranks):
            out[name] = max(rank.get(method, 0.0) for rank in ranks)
    if role in LOOP:
        name, methods = LOOP[role]
        out[name] = max(_total(rank, methods) for rank in ranks)
    totals = [_total(rank) for rank in ranks]
    out["busy"] = max(totals)
    if len(ranks) > 1:
        median = statistics.median_low(totals)  # of two ranks, the faster one
        out["slowest_rank"] = float(totals.index(out["busy"]))
        out["slowest_over_median"] = out["busy"] / median if median > 0 else 1.0
    return out


def idle_shares(plan: Plan, busy: Busy, step_seconds: float) -> dict[tuple[int, int], float]:
    """(node, accelerator) -> the share of the step in which neither policy nor learner worked there; -1 is a CPU."""
    worked: dict[tuple[int, int], float] = {}
    for role in ("rollout", "actor"):
        for slot, rank in zip(plan.slots(role), busy[role], strict=True):
            for device in slot.devices or (-1,):
                place = (slot.node, device)
                worked[place] = worked.get(place, 0.0) + _total(rank)
    return {place: max(0.0, 1.0 - seconds / step_seconds) for place, seconds in worked.items()}


def stragglers(metrics: Mapping[str, float]) -> list[str]:
    """`env[3] (2.1x the median)` for every role with a rank that holds up its fellows, from a step's metrics."""
    named = []
    for role in COMPONENTS:
        over = metrics.get(f"time/{role}/slowest_over_median", 1.0)
        lost = metrics.get(f"time/{role}/busy", 0.0) * (1 - 1 / over)
        if over > STRAGGLER and lost > WORTH_NAMING * metrics["time/step"]:
            named.append(f"{role}[{metrics[f'time/{role}/slowest_rank']:.0f}] ({over:.1f}x the median)")
    return named


def _total(rank: Seconds, methods: Iterable[str] | None = None) -> float:
    """Seconds in `methods`, or in all."""
    return sum(rank.get(method, 0.0) for method in (rank if methods is None else methods))
