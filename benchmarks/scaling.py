"""Env-steps/s with 1, 2, 4, 8 env workers, and what a call of a worker costs beside its work.

    python benchmarks/scaling.py [--env toy] [--workers 1,2,4,8] [--backend local,ray]

`local` is one env worker (a thread of this process) with that many simulator processes; `ray` is that many env workers,
each a Ray actor with one simulator process. Every simulator process has the same number of envs, so the work grows with
the workers. A worker that does nothing when called shows what a call costs: alone, as the middle of many, and with the
observations of its envs as the answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.placement.plan import Plan
from rlinf.runtime.cluster import Cluster, Group, make_cluster
from rlinf.workers.env import EnvWorker

RECIPES = {"toy": "toy_ppo_compact", "metaworld": "quickstart"}
CALLS = 100


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    backend: str
    workers: int
    cores: int
    steps_per_second: float
    call_ms: float
    queued_ms: float
    observation_ms: float

    def __str__(self) -> str:
        rates = f"{self.steps_per_second:>13.0f}{self.steps_per_second / self.cores:>10.0f}"
        costs = f"{self.call_ms:>10.3f}{self.queued_ms:>10.3f}{self.observation_ms:>13.3f}"
        return f"{self.backend:<8}{self.workers:>8}{self.cores:>7}{rates}{costs}"


HEADER = (
    f"{'':<15}{'':>8}{'env-steps/s':>13}{'':>10}{'ms a call':>10}\n{'backend':<8}{'workers':>8}{'cores':>7}"
    f"{'in all':>13}{'per core':>10}{'alone':>10}{'queued':>10}{'observation':>13}"
)


def config(env: str, backend: str, workers: int, envs_each: int, folder: str) -> Config:
    """A recipe of that simulator with as many env workers, or simulator processes of one."""
    envs = envs_each * workers
    ranks = f"0:0-{workers - 1}" if backend == "ray" else "0"
    settings = [
        f"cluster.backend={backend}",
        f"cluster.component_placement={{env: '{ranks}', rollout: 0, actor: 0}}",
        f"env.train.total_num_envs={envs}",
        f"env.train.num_processes={1 if backend == 'ray' else workers}",
        "env.train.auto_reset=true",
        f"actor.micro_batch_size={envs}",
        f"actor.global_batch_size={envs}",
        f"runner.logger.log_path={folder}",
    ]
    return load_config(RECIPES[env], settings, devices=[0])


def measure(env: str, backend: str, workers: int, *, envs_each: int, chunks: int, repeats: int) -> Row:
    """Start the workers, step them with random actions, call them without work."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = config(env, backend, workers, envs_each, folder)
        plan = make_plan(cfg, [0])
        cluster = make_cluster(cfg, plan)
        try:
            group = cluster.launch(EnvWorker, "env")
            cluster.get(group.call("begin", mode="train", stage=0))
            seconds = [rollout_seconds(cluster, group, cfg, plan, chunks) for _ in range(repeats)]
            steps = workers * envs_each * chunks * cfg.actor.model.num_action_chunks
            return Row(
                backend,
                workers,
                min(workers, len(os.sched_getaffinity(0))),
                steps / statistics.median(seconds),
                call_ms=1000 * median_seconds(lambda: cluster.get([group.one(0, "drain_counts")])),
                queued_ms=1000
                * timed(lambda: cluster.get([group.one(0, "drain_counts") for _ in range(CALLS)]))
                / CALLS,
                observation_ms=1000
                * median_seconds(lambda: cluster.get([group.one(0, "begin", mode="train", stage=0)])),
            )
        finally:
            cluster.shutdown()


def rollout_seconds(cluster: Cluster, group: Group, cfg: Config, plan: Plan, chunks: int) -> float:
    """Chunks of random actions, all issued at once, as the rollout loop does."""
    shape = (plan.num_envs("env"), cfg.actor.model.num_action_chunks, cfg.actor.model.action_dim)
    generator = torch.Generator().manual_seed(0)
    actions = [torch.rand(shape, generator=generator) * 2 - 1 for _ in range(chunks)]  # f32 [B, C, A]

    def play() -> None:
        cluster.get([f for chunk in actions for f in group.call("step", chunk, mode="train", stage=0)][-len(group) :])

    return timed(play)


def median_seconds(call: Callable[[], object]) -> float:
    """Of many calls one after another."""
    return statistics.median(timed(call) for _ in range(CALLS))


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=sorted(RECIPES), default="metaworld")
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--backend", type=lambda text: text.split(","), default=["local", "ray"])
    parser.add_argument("--envs", type=int, default=4, help="per worker")
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{args.env}, {args.envs} envs per worker, {args.chunks} chunks; {os.cpu_count()} cores, load {load}")
    print(HEADER)
    for backend in args.backend:
        for workers in args.workers:
            row = measure(args.env, backend, workers, envs_each=args.envs, chunks=args.chunks, repeats=args.repeats)
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
