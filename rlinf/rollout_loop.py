"""The rollout loop: observation -> action -> observation, for every stage, by passing futures from worker to worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlinf.data.types import ChunkIndex
from rlinf.placement.plan import Mode, Plan
from rlinf.runtime.cluster import Group


def roll_out(
    env: Group,
    rollout: Group,
    plan: Plan,
    *,
    mode: Mode,
    step: int,
    epochs: int,
    chunks: int,
    finished: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Play `epochs` rollouts of `chunks` chunks; returns futures that are done, or fail, at the end.

    Stages overlap because stage 1's predict is queued while stage 0's step runs. `finished` is asked after each chunk
    and may end the epoch early, which evaluations do.
    """
    stages = range(plan.stages)
    to_rollout = [plan.routes("env", "rollout", mode, stage) for stage in stages]
    to_env = [plan.routes("rollout", "env", mode, stage) for stage in stages]
    done = []
    for epoch in range(epochs):
        steps = [env.call("begin", mode=mode, stage=stage, new_step=epoch == 0) for stage in stages]
        for chunk in range(chunks):
            at = ChunkIndex(step, epoch, chunk)
            for stage in stages:
                actions = rollout.map("predict", steps[stage], to_rollout[stage], mode=mode, stage=stage, at=at)
                steps[stage] = env.map("step", actions, to_env[stage], mode=mode, stage=stage)
            if finished():
                break
        for stage in stages:
            end = ChunkIndex(step, epoch, chunks)
            if mode == "train":
                done += rollout.map("finish", steps[stage], to_rollout[stage], stage=stage, at=end)
            else:
                done += steps[stage]
    return done
