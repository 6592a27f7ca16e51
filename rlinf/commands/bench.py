"""`rlinf bench`: a few training steps, where their time goes, and the bottleneck in one line with what to try."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlinf.commands import jobs
from rlinf.commands.run_folders import in_folder
from rlinf.config.derived import make_plan, micro_batch_size
from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.spec import env_spec
from rlinf.metrics.phases import stragglers
from rlinf.metrics.run_log import Player
from rlinf.placement.grammar import COMPONENTS
from rlinf.placement.plan import Plan

PHASES = ("sync_weights", "offload", "generate_rollouts", "cal_adv_and_returns", "actor_training")
OFFLOAD = {"env": "env.train.enable_offload", "rollout": "rollout.enable_offload", "actor": "actor.enable_offload"}
WORTH_HIDING = 0.1  # of the rollout: work that a second stage would put behind the other side's


@dataclass(frozen=True)
class Bottleneck:
    """What to change first."""

    role: str  # env, rollout, actor, weight sync, offload or runtime
    share: float  # of the step
    line: str


class Recorder:
    """Keeps each step's metrics instead of showing them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def start(self, first_step: int, total_steps: int) -> None:
        self.steps.clear()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def evaluated(self, step: int, records: Sequence[EpisodeRecord], player: Player) -> None:
        pass

    def saved(self, step: int, checkpoint: Path) -> None:
        pass

    def warn(self, message: str) -> None:
        print(f"warning: {message}")

    def close(self) -> None:
        pass


def run_bench(cfg: Config, *, steps: int = 3, warmup: int = 2, output: Path | None = None) -> Bottleneck:
    """Train `warmup` + `steps` steps that leave nothing behind; prints (and writes) the medians of the latter."""
    cfg, plan = with_weights(cfg), make_plan(cfg)
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder:
        rows = measure(bench_config(cfg, steps + warmup, folder), plan)[warmup:]
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0] if all(name in r for r in rows)}
    found = find_bottleneck(cfg, plan, median)
    print("\n".join(table(plan, median, len(rows))))
    print(f"bottleneck: {found.line}")
    if output is not None:
        run = {"config": cfg.runner.logger.experiment_name, "mode": plan.mode, "processes": len(plan.processes)}
        result = {**run, "bottleneck": asdict(found), "median": median, "steps": rows}
        output.write_text(json.dumps(result, indent=1) + "\n")
    return found


def with_weights(cfg: Config) -> Config:
    """The same run, from random weights where the checkpoint that it names is not there; says so."""
    model = cfg.actor.model

    def missing(path: str | None) -> bool:
        return path is not None and not Path(path).expanduser().exists()

    if missing(model.model_path):
        print(f"actor.model.model_path={model.model_path} is not there: measured with random weights")
        model = replace(model, model_path=None)
    if model.is_lora and missing(model.lora_path):
        print(f"actor.model.lora_path={model.lora_path} is not there: measured with new adapters")
        model = replace(model, lora_path=None)
    return replace(cfg, actor=replace(cfg.actor, model=model))


def bench_config(cfg: Config, steps: int, folder: str) -> Config:
    """The same run without checkpoints, evaluations and dashboards."""
    cfg = in_folder(cfg, folder)
    logger = replace(cfg.runner.logger, logger_backends=[])
    runner = replace(
        cfg.runner,
        max_epochs=steps,
        max_steps=-1,
        save_interval=-1,
        save_last=False,
        val_check_interval=-1,
        resume_dir=None,
        logger=logger,
    )
    return replace(cfg, runner=runner)


def measure(cfg: Config, plan: Plan) -> list[dict[str, float]]:
    """The metrics of every step."""
    recorder = Recorder()
    runner = jobs.make_runner(cfg, plan, recorder)
    try:
        jobs.train_to_the_end(runner)
    finally:
        runner.close()
    return recorder.steps


def table(plan: Plan, median: Mapping[str, float], steps: int) -> Iterator[str]:
    """Phases as the runner saw them, and below each what its workers did meanwhile."""
    whole = median["time/step"]
    inside = {
        "sync_weights": ("actor/sync_model_to_rollout", "rollout/sync_model_from_actor"),
        "offload": tuple(f"{role}/{method}" for role in COMPONENTS for method in ("onload", "offload")),
        "generate_rollouts": ("env/interact", "rollout/generate"),
        "cal_adv_and_returns": ("rollout/send_rollout_trajectories", "actor/compute_adv"),
        "actor_training": ("actor/run_training",),
    }
    yield f"{'median of ' + str(steps) + ' steps':<44}{'seconds':>9}{'of step':>9}"
    yield _row("step", whole, whole)
    for phase in (name for name in PHASES if f"time/{name}" in median):
        yield _row(f"  {phase}", median[f"time/{phase}"], whole)
        for name in (n for n in inside[phase] if f"time/{n}" in median):
            ranks = len(plan.slots(name.partition("/")[0]))
            slowest = f" (slowest of {ranks} ranks)" if ranks > 1 else ""
            yield _row(f"    {name}{slowest}", median[f"time/{name}"], whole)
    idle, idlest = median["time/device_idle_mean"], median["time/device_idle_max"]
    yield f"devices idle {idle:.0%} of the step" + (f", one of them {idlest:.0%}" if idlest > idle + 0.005 else "")
    yield f"{median['time/env_steps_per_second']:.0f} env steps/s in the rollout"
    yield f"{median['messages/bytes'] / 1e6:.1f} MB per step between processes"
    for rank in stragglers(median):
        yield f"straggler: {rank}"


def find_bottleneck(cfg: Config, plan: Plan, median: Mapping[str, float]) -> Bottleneck:
    """The component that the step waits for longest, who waits with it, and what to try."""
    env, policy = median["time/env/interact"], median["time/rollout/generate"]
    rollout = max(median["time/generate_rollouts"], env, policy)  # beside updates, the phase is what was left to wait
    hidden = min(env, policy) if plan.stages > 1 else 0.0
    seconds = {
        "env": env,
        "rollout": policy,
        "actor": median["time/cal_adv_and_returns"] + median["time/actor_training"],
        "weight sync": median.get("time/sync_weights", 0.0),
        "offload": median.get("time/offload", 0.0),
        "runtime": max(0.0, rollout - (env + policy - hidden)),
    }
    role = max(seconds, key=lambda name: seconds[name])
    share = seconds[role] / median["time/step"]
    waiting = {
        "env": f"policy waits {_share(1 - policy / rollout)} of the rollout",
        "rollout": f"simulators wait {_share(1 - env / rollout)} of the rollout",
        "actor": f"rollout takes {_share(rollout / median['time/step'])}",
        "weight sync": f"{median['sync/bytes'] / 1e6:.1f} MB are sent",
        "offload": f"{median['offload/bytes'] / 1e6:.1f} MB are moved",
        "runtime": f"{median['messages/bytes'] / 1e6:.1f} MB travel per step",
    }[role]
    tips = " / ".join(advice(cfg, plan, role, worth_hiding=min(env, policy) > WORTH_HIDING * rollout))
    return Bottleneck(role, share, f"{role}: {_share(share)} of the step; {waiting}; try {tips}")


def advice(cfg: Config, plan: Plan, role: str, *, worth_hiding: bool) -> Iterator[str]:
    """Settings that would shorten the bottleneck."""
    each = plan.num_envs("env")
    if role in ("env", "rollout", "runtime") and worth_hiding and plan.stages == 1:
        ranks = max(len(plan.env), len(plan.rollout), len(plan.actor))
        if cfg.env.train.total_num_envs % (2 * ranks * cfg.env.train.group_size) == 0:
            yield "rollout.pipeline_stage_num=2"
    if role == "env":
        cores = (os.cpu_count() or 1) // max(1, sum(slot.node == 0 for slot in plan.env))
        wanted = min(each, max(1, cores))
        if not env_spec(cfg.env.train).batched and 0 < cfg.env.train.num_processes < wanted:
            yield f"env.train.num_processes={wanted}"
        else:
            yield "more env ranks or CPU cores, or smaller images"
    if role == "rollout":
        yield "more rollout ranks (cluster.component_placement)"
    if role == "actor":
        share, micro = cfg.actor.global_batch_size // len(plan.actor), micro_batch_size(cfg, len(plan.actor))
        if share % (2 * micro) == 0:
            yield f"actor.micro_batch_size={2 * micro} where memory allows"
        yield "more actor ranks (cluster.component_placement)"
    if role == "weight sync":
        yield f"runner.weight_sync_interval={2 * cfg.runner.weight_sync_interval}"
        yield "rollout and actor on the same accelerators"
    if role == "offload":
        yield " / ".join(f"{key}=false" for component, key in OFFLOAD.items() if component in plan.offload)
    if role == "runtime":
        yield "components of equal rank in the same place, which share a process"


def _row(name: str, seconds: float, whole: float) -> str:
    return f"{name:<44}{seconds:>9.3f}{_share(seconds / whole):>9}"


def _share(part: float) -> str:
    return f"{100 * max(0.0, part):.0f} %"
