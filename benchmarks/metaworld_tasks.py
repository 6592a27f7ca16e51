"""MetaWorld env-steps/s of a suite of many tasks against its tasks alone, and the tasks built in each rollout.

    python benchmarks/metaworld_tasks.py [--suite metaworld_50] [--envs 64] [--processes 16] [--render fast]
                                         [--size 480] [--tasks 10] [--epochs 4]

One VecEnv plays rollouts of the whole suite, then rollouts in which every env plays the same task, for some tasks of
the suite (--tasks 0: all). A rollout is a reset and 20 chunks of 5 random actions. Nothing is built in the rollouts
that count: of the suite those from the third on, of a task all but its first. Fails when the suite takes more than
1.15 times the mean of its tasks, or builds tasks from its third rollout on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlinf.data.noise import generator
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec, ids_of_task
from rlinf.envs.vec import VecEnv

CHUNK, CHUNKS, AT_MOST = 5, 20, 1.15
WARM_UP = 2  # rollouts of the suite that may build tasks


class OneTask:
    """Chooses reset ids of a single task for every env and episode."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    def pick(self, env_id: int, number: int) -> int:
        """The reset id of an env's episode."""
        return self.ids[int(generator(0, "reset", 0, env_id, number).integers(len(self.ids)))]


@dataclass(frozen=True)
class Played:
    """What one rollout took."""

    seconds: float
    core_seconds: float  # of the simulator processes: tells work from waiting where other jobs run too
    built: int  # tasks


def core_seconds(env: VecEnv) -> float:
    """Time of a core that the simulator processes have used."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13] for pid in env._fleet.pids()]
    return sum(int(user) + int(system) for user, system in ticks) / os.sysconf("SC_CLK_TCK")


def rollout(env: VecEnv, actions: torch.Generator) -> Played:
    """Play one rollout."""
    start, cores, built = time.perf_counter(), core_seconds(env), env.num_tasks_built
    env.reset()
    for _ in range(CHUNKS):
        env.chunk_step(torch.rand(env.num_envs, CHUNK, 4, generator=actions) * 2 - 1)
    return Played(time.perf_counter() - start, core_seconds(env) - cores, env.num_tasks_built - built)


def mean(played: Sequence[Played]) -> tuple[float, float]:
    """Mean seconds of these rollouts, elapsed and of a core."""
    return statistics.mean(p.seconds for p in played), statistics.mean(p.core_seconds for p in played)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="metaworld_50")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--render", default="fast")
    parser.add_argument("--size", type=int, default=480)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=4, help="rollouts that count, of the suite and of each task")
    args = parser.parse_args()
    cfg = EnvConfig(
        env_type="metaworld",
        task_suite_name=args.suite,
        total_num_envs=args.envs,
        num_processes=args.processes,
        max_episode_steps=CHUNK * CHUNKS,
        ignore_terminations=True,
        init_params={"image_size": args.size, "render": args.render},
    )
    spec, actions = env_spec(cfg), torch.Generator().manual_seed(0)
    env = VecEnv(cfg, spec, env_ids=range(args.envs), mode="train", chunk_size=CHUNK, seed=0)
    steps = args.envs * CHUNK * CHUNKS
    chosen = spec.tasks[:: max(1, len(spec.tasks) // args.tasks)] if args.tasks else spec.tasks
    try:
        env.reset()  # processes start
        together = [rollout(env, actions) for _ in range(WARM_UP - 1 + args.epochs)]
        for number, one in enumerate(together, 2):
            rate = f"{steps / one.seconds:8.0f} env-steps/s, {1e3 * one.core_seconds / steps:.2f} ms of a core each"
            print(f"{args.suite + f', rollout {number}':40s}{rate}, {one.built} tasks built", flush=True)
        counted = together[WARM_UP - 1 :]
        alone: list[Played] = []
        for task in chosen:
            env._ids = OneTask(ids_of_task(spec, "train", task))
            env.reset()
            alone += (played := [rollout(env, actions) for _ in range(args.epochs)])
            seconds, cores = mean(played)
            print(
                f"{task + ' alone':40s}{steps / seconds:8.0f} env-steps/s, {1e3 * cores / steps:.2f} ms of a core each"
            )
    finally:
        env.close()
    ratio, work = (one / other for one, other in zip(mean(counted), mean(alone), strict=True))
    built = sum(one.built for one in counted)
    print(f"{args.render} {args.size}, {args.envs} envs in {args.processes} processes, {len(chosen)} tasks alone:")
    print(f"the suite takes {ratio:.2f}x their mean time (at most {AT_MOST}x) and {work:.2f}x the time of a core;")
    print(f"{built} tasks built from rollout 3 on (0)")
    if ratio > AT_MOST or built:
        raise SystemExit("slower than promised" if ratio > AT_MOST else "tasks were built after warm-up")


if __name__ == "__main__":
    main()
