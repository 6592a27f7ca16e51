"""`rlinf bench --sweep`: short runs that change one setting at a time, within a time limit; the best, as overrides."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.derived import make_plan, micro_batch_size, rollout_size
from rlinf.config.schema import Config
from rlinf.envs.spec import env_spec
from rlinf.errors import UserError


@dataclass(frozen=True)
class Timing:
    """Seconds of one rollout epoch, and of one pass of the update over its samples."""

    rollout: float
    update: float

    def step(self, cfg: Config) -> float:
        """Seconds that a whole training step of the recipe would take."""
        return cfg.env.train.rollout_epoch * (self.rollout + cfg.algorithm.update_epoch * self.update)


Trial = Callable[[list[str]], Timing | str]  # from overrides to times, or to why there are none


def run_sweep(config: str, overrides: Sequence[str], cfg: Config, *, minutes: float) -> list[str]:
    """Search with real runs, each in a process of its own; prints a line for each and returns the best overrides."""
    short = short_run(cfg)
    print(f"each line is a short run ({' '.join(short)}); `step` is what the whole recipe would take")
    return search(cfg, lambda extra: _trial(config, [*overrides, *short, *extra]), seconds=60.0 * minutes)


def short_run(cfg: Config) -> list[str]:
    """Overrides for one rollout epoch and one pass over it, with a global batch that divides it."""
    samples = rollout_size(cfg) // cfg.env.train.rollout_epoch
    batch = math.gcd(cfg.actor.global_batch_size, samples)
    return ["env.train.rollout_epoch=1", "algorithm.update_epoch=1", f"actor.global_batch_size={batch}"]


def search(cfg: Config, trial: Trial, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> list[str]:
    """Try every value of every setting, keep what is faster; a setting's best stays while the next is tried.

    Ends where the next run, as long as the longest so far, would pass the limit.
    """
    begun, longest, best = clock(), 0.0, list[str]()

    def measure(extra: list[str]) -> float:
        nonlocal longest
        started = clock()
        timing = trial(extra)
        longest = max(longest, clock() - started)
        name = " ".join(extra) or "as it is"
        if isinstance(timing, str):
            print(f"  {name}: failed ({timing})")
            return math.inf
        whole = timing.step(cfg)
        print(f"  {name}: step {whole:.1f} s (rollout epoch {timing.rollout:.2f} s, update {timing.update:.2f} s)")
        return whole

    first = fastest = measure(best)
    if math.isinf(first):
        raise UserError("the recipe as it is cannot be measured, so there is nothing to compare with")
    for key, values in settings(cfg):
        kept = list(best)
        for value in values:
            if clock() - begun + longest > seconds:
                print(f"time is up before {key}={value}; give --minutes more")
                return _report(best, first, fastest)
            extra = [*kept, f"{key}={value}"]
            found = measure(extra)
            if found < fastest:
                best, fastest = extra, found
    return _report(best, first, fastest)


def settings(cfg: Config) -> Iterator[tuple[str, list[int]]]:
    """What is tried: each key with its other possible values, the likeliest gain first."""
    plan, train = make_plan(cfg), cfg.env.train
    ranks = max(len(plan.env), len(plan.rollout))
    other = 1 if plan.stages > 1 else 2
    if train.total_num_envs % (other * ranks * train.group_size) == 0:
        yield "rollout.pipeline_stage_num", [other]
    if not env_spec(train).batched:
        cores = max(1, (os.cpu_count() or 1) // len(plan.env))
        counts = {n for n in (cores // 2, cores, 2 * cores) if 1 <= n <= plan.num_envs("env")}
        yield "env.train.num_processes", sorted(counts - {train.num_processes})
    share, micro = cfg.actor.global_batch_size // len(plan.actor), micro_batch_size(cfg, len(plan.actor))
    yield "actor.micro_batch_size", [n for n in (2 * micro, 4 * micro, micro // 2) if n and share % n == 0]
    if cfg.actor.model.cache_bytes_per_sample() and plan.keeps_prefixes:
        yield "rollout.prefix_cache_host_bytes", [0]


def _trial(config: str, overrides: list[str]) -> Timing | str:
    """One measured step after one that warms up."""
    with tempfile.TemporaryDirectory(prefix="rlinf-sweep-") as folder:
        result = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "rlinf", "bench", config, *overrides, "--steps", "1", "--warmup", "1"]
        done = subprocess.run([*command, "--json", str(result)], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not result.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return lines[-1][:160] if lines else f"exit status {done.returncode}"
        median = json.loads(result.read_text())["median"]
    return Timing(median["time/generate_rollouts"], median["time/actor_training"])


def _report(best: list[str], first: float, fastest: float) -> list[str]:
    if best:
        print(f"best: {fastest:.1f} s a step instead of {first:.1f} s; paste: {' '.join(best)}")
    else:
        print("best: as it is")
    return best
