"""AsyncRunner: rollouts run while the actor learns, with weights at most `runner.max_staleness` updates old.

Rollout k + s (s = max_staleness) is queued before update k begins, with the weights of update k - 1. Nothing depends on
which side is faster, so a run is as repeatable as a synchronous one. No rollout runs past an evaluation or a planned
checkpoint: both see the weights and the episodes of their step, and a run resumed from it is exact. What SIGTERM saves
in between has envs that rollouts ahead have moved on; its weights are exact.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from rlinf.config.schema import Config, RunnerConfig
from rlinf.metrics.phases import Usage
from rlinf.metrics.run_log import RunListener
from rlinf.placement.plan import Plan
from rlinf.runner import Runner


@dataclass(frozen=True)
class Rollout:
    """Futures of a rollout under way. All of its calls are queued before those of the next, so none waits for that."""

    updates: int  # of the weights it acts with
    played: list[Any]
    experience: list[list[Any]]  # by actor rank
    episodes: list[Any]
    counts: list[Any]
    seconds: dict[str, list[Any]]  # by role


class AsyncRunner(Runner):
    """The synchronous runner with rollouts ahead of their updates."""

    def __init__(self, cfg: Config, plan: Plan, *, watch: RunListener) -> None:
        super().__init__(cfg, plan, watch=watch)
        self.ahead: deque[Rollout] = deque()
        self.seconds: dict[str, list[Any]] = {}  # by role, of the rollout last used; futures

    def step(self, step: int) -> dict[str, float]:
        """Queue rollouts ahead, and take the update from the experience of the oldest."""
        barrier = next_barrier(step, self.cfg.runner, self.total_steps)
        while len(self.ahead) <= self.cfg.runner.max_staleness and step + len(self.ahead) < barrier:
            self.sync()
            self.ahead.append(self._begin(step + len(self.ahead), updates=step))
        rollout = self.ahead.popleft()
        with self.timed("generate_rollouts"):  # only what the actor waits for
            self.cluster.get(rollout.played)
        metrics = self.learn(step, rollout.experience)
        self.seconds = rollout.seconds
        metrics["rollout/staleness"] = float(step - rollout.updates)
        return metrics | self.rollout_metrics(rollout.counts, rollout.episodes)

    def sync(self) -> None:
        """As in Runner, after the rollouts under way: copies receive weights between rollouts only."""
        if self.ahead and self.copies_behind:
            with self.timed("generate_rollouts"):
                self.cluster.get(self.ahead[-1].played)
        super().sync()

    def usage(self) -> Usage:
        """As in Runner, for the rollout that this step used: those that are under way are not waited for."""
        if not self.seconds and not self.ahead:
            return super().usage()
        busy: dict[str, list[dict[str, float]]] = {
            role: [{} for _ in self.plan.slots(role)] for role in ("env", "rollout")
        }
        busy |= {role: self.cluster.get(futures) for role, futures in self.seconds.items()}
        busy["actor"] = self.cluster.get(self.actor.call("drain_seconds"))
        self.seconds = {}
        return Usage(busy, self.cluster.drain_bytes())

    def _begin(self, step: int, *, updates: int) -> Rollout:
        return Rollout(
            updates=updates,
            played=self.begin_rollout(step),
            experience=self.experience(),
            episodes=self.env.call("drain_episodes"),
            counts=self.env.call("drain_counts"),
            seconds={"env": self.env.call("drain_seconds"), "rollout": self.rollout.call("drain_seconds")},
        )


def next_barrier(step: int, runner: RunnerConfig, total_steps: int) -> int:
    """The first step after `step` that follows an evaluation or a checkpoint, or the end of the run."""
    intervals = (runner.val_check_interval, runner.save_interval)
    return min([total_steps, *((step // i + 1) * i for i in intervals if i > 0)])
