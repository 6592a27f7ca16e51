"""A whole training step of a published recipe on one GPU, from random weights where its checkpoint is not there.

    python benchmarks/end_to_end.py [RECIPE] [--steps 1] [--warmup 1] [--film] [--trace] [--plain] [--json FILE]
                                    [key=value ...]

Everything is as the recipe says but the placement, on accelerator 0, and the film, which is off without --film. Of the
measured steps it prints the median seconds of each phase, how the step compares with the sum of its parts (simulators,
policy and update, each counted while it works), samples per second of the update, how much of the device's arithmetic
the step uses (MFU), how many tasks the simulators built, and the most memory that was held.

--trace takes one more step with every kernel traced, and prints the share of a step in which no kernel of this process
runs; tracing makes the step longer, so the seconds with kernels are also compared with a step that was not traced.
--plain also measures an eighth of the step the plain way: one stage, kernels launched one by one, every prefix computed
again in every pass of the update.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from model_floors import phases_of

from rlinf.commands.bench import Recorder, bench_config, measure, table, with_weights
from rlinf.config.derived import chunks_per_rollout, make_plan, rollout_size
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.models.openpi.config import Config as PiConfig
from rlinf.placement.plan import Plan

PLACEMENT = "cluster.component_placement={'actor,env,rollout': '0'}"
NO_FILM = "env.train.video_cfg.save_video=false"
PARTS = {"simulators": "time/env/interact", "policy": "time/rollout/generate", "update": "time/actor/run_training"}
PLAIN = (
    "rollout.pipeline_stage_num=1",
    "actor.model.cuda_graphs=false",
    "rollout.prefix_cache_bytes=0",
    "rollout.prefix_cache_host_bytes=0",
)
PLAIN_SHARE = 8  # of a step is measured the plain way
PROMPT_TOKENS = 20  # of a task's description, about
Metrics = dict[str, float]


class Tracer(Recorder):
    """Traces the kernels of the last of `steps` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.last, self.begun = steps, 0.0
        self.seconds = self.busy = 0.0  # of the traced step, and those with a kernel
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def log(self, step: int, metrics: Metrics) -> None:
        super().log(step, metrics)
        if step == self.last - 1:
            self.profile.start()
            self.begun = time.perf_counter()
        elif step == self.last:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.begun
            self.profile.stop()
            self.busy = busy_seconds(self.profile)


def busy_seconds(profile: torch.profiler.profile) -> float:
    """Seconds in which at least one traced kernel or copy ran."""
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.duration_ns() > 0]
    return covered(spans) / 1e9


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="metaworld_50_ppo_openpi")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--film", action="store_true", help="record videos as the recipe says")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_intermixed_args()  # settings may follow options
    if given.trace and not torch.cuda.is_available():
        parser.error("--trace needs a GPU")
    overrides = [PLACEMENT, *([] if given.film else [NO_FILM]), *given.overrides]
    begun = time.time()
    cfg, plan, steps, tracer = take_steps(given.recipe, overrides, given.warmup + given.steps, trace=given.trace)
    median = medians(steps[given.warmup : given.warmup + given.steps])
    print("\n".join(table(plan, median, given.steps)))
    lines = findings(cfg, median)
    if tracer is not None:
        idle, traced = 1 - tracer.busy / median["time/step"], 1 - tracer.busy / tracer.seconds
        lines.append(
            f"kernels of this process run for {tracer.busy:.1f} s: none runs in {idle:.1%} of the step "
            f"(in {traced:.1%} of the {tracer.seconds:.1f} s that the step takes while it is traced)"
        )
    if given.plain:
        _, _, plain, _ = take_steps(given.recipe, [*overrides, *PLAIN, *share_of_step(cfg, PLAIN_SHARE)], 2)
        lines.append(beside_plain(median, plain[-1]))
    for line in lines:
        print(line)
    print(f"{time.time() - begun:.0f} s in all, {plan.stages} stages")
    if given.json is not None:
        result = {"recipe": given.recipe, "overrides": overrides, "findings": lines, "steps": steps}
        given.json.write_text(json.dumps(result, indent=1))


def take_steps(
    recipe: str, overrides: Sequence[str], steps: int, *, trace: bool = False
) -> tuple[Config, Plan, list[Metrics], Tracer | None]:
    """Train that many steps, and one that is traced after them; returns what was measured of each."""
    cfg = with_weights(load_config(recipe, overrides, purpose="bench"))
    plan, tracer = make_plan(cfg), Tracer(steps + 1) if trace else None
    with tempfile.TemporaryDirectory(prefix="rlinf-end-to-end-") as folder:
        measured = measure(bench_config(cfg, steps + trace, folder), plan, tracer)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next run finds the device as this one did
    return cfg, plan, measured, tracer


def medians(steps: Sequence[Metrics]) -> Metrics:
    """The median of every metric that all steps have."""
    return {name: statistics.median(step[name] for step in steps) for name in steps[0] if all(name in s for s in steps)}


def share_of_step(cfg: Config, parts: int) -> list[str]:
    """Settings for a step of so many times fewer rollouts, with batches smaller by as much."""
    rollouts, batch = cfg.env.train.rollout_epoch, cfg.actor.global_batch_size
    if rollouts % parts or batch % parts:
        raise SystemExit(f"--plain measures a step in {parts} parts: rollouts {rollouts} and batch {batch} must divide")
    return [f"env.train.rollout_epoch={rollouts // parts}", f"actor.global_batch_size={batch // parts}"]


def beside_plain(median: Metrics, plain: Metrics) -> str:
    """How the plain way's phases compare."""
    times = {
        name: (PLAIN_SHARE * plain[metric], median[metric]) for name, metric in {"step": "time/step", **PARTS}.items()
    }
    shown = ", ".join(f"{name} {slow:.1f} s ({slow / fast:.2f}x)" for name, (slow, fast) in times.items())
    return f"the plain way, {PLAIN_SHARE} times an eighth of the step: {shown}"


def findings(cfg: Config, median: Metrics) -> list[str]:
    """What the step comes to, in lines."""
    parts = {name: median[metric] for name, metric in PARTS.items()}
    whole, samples = median["time/step"], rollout_size(cfg) * cfg.algorithm.update_epoch
    lines = [
        f"sum of the parts {sum(parts.values()):.1f} s ({', '.join(f'{n} {s:.1f}' for n, s in parts.items())}); "
        f"the step takes {whole / sum(parts.values()):.2f}x of it",
        f"update {samples / parts['update']:.0f} samples/s ({samples} samples)",
        f"tasks built {median.get('env/tasks_built', 0.0):.0f}",
    ]
    if torch.cuda.is_available():
        lines.append(f"most memory held on the device {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    flops = step_flops(cfg)
    if flops is not None and torch.cuda.is_available():
        rate = gemm_flops()
        lines.append(
            f"{flops / 1e12:.0f} TFLOP of products and attention: {flops / whole / rate:.1%} of what the device's "
            f"matrix products reach ({rate / 1e12:.0f} TFLOP/s)"
        )
    return lines


def step_flops(cfg: Config) -> float | None:
    """FLOPs that a step needs where every prefix is computed once: acting, values of last observations, updates.

    A sample's update is one forward and two backward passes of the denoising step that it trains (of all steps where
    their log-probabilities are joint). Counted for π0 and π0.5 alone, behind a frozen language model.
    """
    model, train = cfg.actor.model, cfg.env.train
    if not isinstance(model, PiConfig):
        return None
    rows = train.total_num_envs * train.rollout_epoch * chunks_per_rollout(cfg)
    phases = {phase.name: phase.flops for phase in phases_of(model, rows=1, prompt=PROMPT_TOKENS)}
    trained = 1.0 if model.openpi.joint_logprob else 1.0 / model.denoise_steps
    updates = rollout_size(cfg) * cfg.algorithm.update_epoch * 3 * phases["denoise"] * trained
    return rows * sum(phases.values()) + updates


def gemm_flops(side: int = 8192, repeats: int = 20) -> float:
    """FLOPs per second of a large bf16 matrix product, random values."""
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        a @ b
    start.record()
    for _ in range(repeats):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return repeats * 2 * side**3 / (start.elapsed_time(end) / 1000)


if __name__ == "__main__":
    main()
