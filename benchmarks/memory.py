"""What offload and sharding do to the memory of one GPU, and that they change nothing else.

    python benchmarks/memory.py [--sections shared,fsdp,copy] [--json FILE]

π0 with random weights, whose expert and critic learn, as in the recipes; everything in one run.

    shared  env, rollout and actor in one process: training steps with and without actor.enable_offload
    fsdp    updates of a policy sharded by FSDP2 over one rank, against the same updates of the plain policy
    copy    a rollout with weights of its own (rollout.enable_offload): away, back, and still the same policy

`--size compact` shows on a CPU that it runs: bytes are counted, device memory is not. The command fails when something
that offload and sharding must leave alone has changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory_report import broken, fsdp_line, report, shared_line
from model_cases import Subject, collect_garbage
from model_updates import Rows

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.commands.bench import Recorder
from rlinf.config.derived import make_plan
from rlinf.config.schema import ActorConfig, ClusterConfig, Config, EnvGroupConfig, FsdpConfig
from rlinf.data.arena import Arena
from rlinf.data.layout import Columns, EnvLayout
from rlinf.envs.config import EnvConfig
from rlinf.models.openpi.config import Config as PiConfig
from rlinf.models.openpi.config import OpenPiOptions
from rlinf.placement.grammar import Slot
from rlinf.placement.plan import Plan
from rlinf.runner import Runner
from rlinf.runtime.process_group import ProcessGroup, disconnect, group_of_one
from rlinf.runtime.worker import Process
from rlinf.training.optim import named_tensors
from rlinf.workers.actor import ActorWorker
from rlinf.workers.rollout import RolloutWorker

GIB = 2**30
STEPS = 3  # training steps or updates of each setting; the first allocates, the last one counts
CHUNKS, CHUNK = 4, 5  # policy calls of a rollout, and actions of each
ROWS = {"base": Rows(32, 64)}
FEW_ROWS = Rows(4, 8)  # of the small sizes
Results = dict[str, Any]


@dataclass(frozen=True)
class Gauge:
    """The memory that torch's allocator holds on a device, in GiB; nothing on a CPU."""

    device: torch.device

    def held(self) -> float | None:
        """In tensors, now."""
        return torch.cuda.memory_allocated(self.device) / GIB if self.device.type == "cuda" else None

    def reserved(self) -> float | None:
        """Taken from the driver, now."""
        return torch.cuda.memory_reserved(self.device) / GIB if self.device.type == "cuda" else None

    def start(self) -> None:
        """Look for the largest from here on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> dict[str, float | None]:
        """The largest since then: in tensors, and taken from the driver."""
        if self.device.type != "cuda":
            return {"peak_gib": None, "reserved_gib": None}
        most = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return {"peak_gib": most[0] / GIB, "reserved_gib": most[1] / GIB}

    def seconds(self, call: Callable[[], object]) -> float:
        """Of a call, until the device has done everything."""
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


# ---------------------------------------------------------------------- shared placement
class MeasuredRunner(Runner):
    """A runner that looks at the device's memory around each phase."""

    def __init__(self, cfg: Config, plan: Plan, gauge: Gauge) -> None:
        self.gauge, self.memory = gauge, dict[str, dict[str, float | None]]()
        super().__init__(cfg, plan, watch=Recorder())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        with super().timed(name):
            self.gauge.start()
            before = self.gauge.held()
            yield
            self.memory[name] = {"held_gib": before} | self.gauge.peak()


def toy_run(size: str, *, offload: bool) -> Config:
    """Training on the toy, which costs nothing: rewards that differ, so that there is something to learn."""
    rows = ROWS.get(size, FEW_ROWS)
    options = OpenPiOptions(
        config_name="pi0_metaworld", action_horizon=CHUNK, state_dim=2, train_expert_only=True, detach_critic_input=True
    )
    train = EnvConfig(
        total_num_envs=rows.global_batch // CHUNKS,
        auto_reset=True,
        max_steps_per_rollout_epoch=CHUNKS * CHUNK,
        max_episode_steps=CHUNKS * CHUNK,
        num_processes=1,
        init_params={"radius": 0.7},
    )
    return Config(
        cluster=ClusterConfig(component_placement={"actor,env,rollout": 0}),
        env=EnvGroupConfig(train=train),
        actor=ActorConfig(
            model=PiConfig(
                size=size, num_action_chunks=CHUNK, action_dim=2, num_steps=5, add_value_head=True, openpi=options
            ),
            micro_batch_size=rows.micro_batch,
            global_batch_size=rows.global_batch,
            max_nonfinite_steps=1,
            enable_offload=offload,
        ),
    )


def train(size: str, gauge: Gauge, *, offload: bool) -> Results:
    """A few training steps: their metrics, and memory, bytes and seconds of the last."""
    cfg = toy_run(size, offload=offload)
    plan = make_plan(cfg, [1 if gauge.device.type == "cuda" else 0])
    runner = MeasuredRunner(cfg, plan, gauge)
    try:
        metrics = []
        for step in range(STEPS):
            runner.times = {}
            metrics.append(runner.step(step))
        times, memory = runner.times, runner.memory
    finally:
        runner.close()
    moved = [step.pop("offload/bytes") for step in metrics]
    return {
        "offload": offload,
        "mode": plan.mode,
        "rollout": memory["generate_rollouts"],
        "update": memory["actor_training"],
        "offload_bytes": moved[-1],
        "offload_s": times.get("offload", 0.0),
        "rollout_s": times["generate_rollouts"],
        "update_s": times["actor_training"],
        "sync_bytes": sum(step["sync/bytes"] for step in metrics),
        "metrics": metrics,
    }


def measure_shared(size: str, gauge: Gauge) -> Results:
    """Without offload, with it, and without it again: kernels that add in any order differ by themselves."""
    rows = []
    for offload in (False, True, False):
        rows.append(train(size, gauge, offload=offload))
        collect_garbage()
        say(shared_line(rows[-1]))
    off, on, again = (row["metrics"] for row in rows)
    cfg = toy_run(size, offload=True).actor.model
    return {
        "steps": STEPS,
        "trainable": cfg.num_trainable_parameters(),
        "runs": rows[:2],
        "difference": largest_gap(off, on),
        "difference_by_itself": largest_gap(off, again),
    }


def largest_gap(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """Between the metrics of two runs, over all steps."""
    assert [step.keys() for step in one] == [step.keys() for step in other]
    return max(abs(a[name] - b[name]) for a, b in zip(one, other, strict=True) for name in a)


# ---------------------------------------------------------------------- FSDP2 on one rank
@dataclass(frozen=True)
class Strategy:
    """One way to hold the policy while it learns."""

    name: str
    shards: bool = True
    checkpointing: bool = False
    fsdp: FsdpConfig = field(default_factory=lambda: FsdpConfig(strategy="fsdp2"))


STRATEGIES = (
    Strategy("plain", shards=False),
    Strategy("FSDP2"),
    Strategy("FSDP2, gradient checkpointing", checkpointing=True),
    Strategy("FSDP2, cpu_offload", fsdp=FsdpConfig(strategy="fsdp2", cpu_offload=True, offload_pin_memory=True)),
)
Weights = dict[str, torch.Tensor]


def measure_fsdp(size: str, gauge: Gauge) -> list[Results]:
    """The same updates with each strategy, from equal weights and the same experience."""
    rows, table = ROWS.get(size, FEW_ROWS), []
    group, arena = group_of_one(gauge.device), Arena(1, Columns(1), CHUNK)
    plain: tuple[Weights, Weights] = {}, {}
    try:
        for strategy in STRATEGIES:
            before = gauge.held()  # what the strategies before this one have left
            torch.manual_seed(0)  # Subject wakes the critic with torch's own generator
            subject = Subject.build("pi0", size, gauge.device, gradient_checkpointing=strategy.checkpointing)
            if not strategy.shards:
                arena = experience(subject, rows)
            worker = make_actor(subject, rows, arena, strategy, group if strategy.shards else ProcessGroup())
            row, start, after = update(worker, gauge)
            if not strategy.shards:
                plain = after
                row["moved"] = distance(start, after[0])
            else:
                row |= {"fp32_gap": distance(plain[0], after[0]), "weight_gap": distance(plain[1], after[1])}
            table.append({"strategy": strategy.name, "start_gib": before} | row)
            say(fsdp_line(table[-1]))
            del subject, worker, start, after
            collect_garbage()
    finally:
        disconnect()
    return table


def experience(subject: Subject, rows: Rows) -> Arena:
    """A global batch of what the policy itself did; prefixes are not kept, so that updates use the whole network."""
    chunks, columns = rows.global_batch // rows.micro_batch, rows.micro_batch
    arena = Arena(chunks, Columns(columns), subject.cfg.num_action_chunks)
    arena.valid.fill_(True)
    for t in range(chunks):
        arena.write_output(t, 0, 0, subject.act(subject.observe(columns, seed=t), "train", chunk=t))
    subject.recorder.clear()
    arena.rewards.normal_(generator=torch.Generator().manual_seed(0))
    return arena


def make_actor(subject: Subject, rows: Rows, arena: Arena, strategy: Strategy, group: ProcessGroup) -> ActorWorker:
    """The actor of a run on one device that already holds policy and experience."""
    actor = ActorConfig(
        model=subject.cfg,
        micro_batch_size=rows.micro_batch,
        global_batch_size=rows.global_batch,
        max_nonfinite_steps=1,
        fsdp_config=strategy.fsdp,
    )
    here = (Slot(0, ()),)
    envs = EnvLayout(rows.micro_batch)
    plan = Plan(here, here, here, envs, envs)
    process = Process(subject.device, {"actor": group})
    process.shared("policy", lambda: subject.policy)
    process.shared("arena-0", lambda: arena)
    worker = ActorWorker(Config(algorithm=AlgorithmConfig(logprob_type="token_level"), actor=actor), plan, 0, process)
    worker.setup()
    worker.compute_advantages(arena.trajectory())
    return worker


def update(worker: ActorWorker, gauge: Gauge) -> tuple[Results, Weights, tuple[Weights, Weights]]:
    """Optimiser steps; numbers, what was stepped before them, and after them what was stepped and the policy's own."""
    start = on_host(dict(named_tensors(worker.optimizer)))
    gauge.start()
    seconds = [gauge.seconds(partial(worker.update, step, STEPS)) for step in range(STEPS)]
    row = {"update_s": statistics.median(seconds[1:])} | gauge.peak() | {"held_gib": gauge.held()}
    after = dict(named_tensors(worker.optimizer)), dict(worker.policy.trainable_parameters())
    return row, start, (on_host(after[0]), on_host(after[1]))


def on_host(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Copies in fp32 that cost the device nothing."""
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}


def distance(one: Weights, other: Weights) -> dict[str, float]:
    """The largest and the mean difference."""
    assert one.keys() == other.keys()
    apart = [(one[name] - other[name]).abs() for name in one]
    numbers = sum(x.numel() for x in apart)
    return {
        "max": max(float(x.max()) for x in apart),
        "mean": sum(float(x.sum(dtype=torch.float64)) for x in apart) / numbers,
    }


# ---------------------------------------------------------------------- a rollout's own weights
def measure_copy(size: str, gauge: Gauge) -> Results:
    """Away and back twice: the second time host memory is pinned already."""
    rows = ROWS.get(size, FEW_ROWS)
    subject = Subject.build("pi0", size, gauge.device, gradient_checkpointing=False)
    cfg = Config(actor=ActorConfig(model=subject.cfg))
    here, elsewhere = (Slot(0, (0,)),), (Slot(0, (1,)),)
    envs = EnvLayout(rows.micro_batch)
    plan = Plan(here, here, elsewhere, envs, envs, frozenset({"rollout"}), one_process=False)
    process = Process(gauge.device)
    process.shared("policy", lambda: subject.policy)
    worker = RolloutWorker(cfg, plan, 0, process)
    worker.setup()
    obs = subject.observe(rows.micro_batch)
    want = answers(subject, obs)
    found: Results = {"parameter_bytes": sum(p.nbytes for p in subject.policy.parameters())}
    found |= {"before_gib": gauge.held(), "before_reserved_gib": gauge.reserved()}
    found["first_offload_s"] = gauge.seconds(worker.offload)
    found["first_onload_s"] = gauge.seconds(worker.onload)
    found["first_equal"] = same(want, answers(subject, obs))
    moved: list[int] = []
    found["offload_s"] = gauge.seconds(lambda: moved.append(worker.offload()))
    found |= {"away_gib": gauge.held(), "away_reserved_gib": gauge.reserved()}
    found["onload_s"] = gauge.seconds(lambda: moved.append(worker.onload()))
    found |= {"back_gib": gauge.held(), "back_reserved_gib": gauge.reserved()}
    found |= {"offload_bytes": moved[0], "onload_bytes": moved[1]}
    found |= {f"{way}_gb_per_s": found[f"{way}_bytes"] / found[f"{way}_s"] / 1e9 for way in ("offload", "onload")}
    found["equal"] = same(want, answers(subject, obs))
    return found


def answers(subject: Subject, obs: Any) -> list[torch.Tensor]:
    """Actions, log-probs and values with the same noise each time, on the host."""
    out = subject.act(obs, "train")
    return [x.cpu().clone() for x in (out.actions, out.logprobs, out.values) if x is not None]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether they are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------- the run
SECTIONS: dict[str, Callable[[str, Gauge], Any]] = {
    "shared": measure_shared,
    "fsdp": measure_fsdp,
    "copy": measure_copy,
}


def run(size: str, sections: Sequence[str], file: Path | None) -> Results:
    """Every section asked for; one that fails is reported and the rest go on."""
    cuda = torch.cuda.is_available()
    gauge = Gauge(torch.device("cuda", 0) if cuda else torch.device("cpu"))
    name = torch.cuda.get_device_name(gauge.device) if cuda else "CPU"
    results: Results = {"device": name, "torch": torch.__version__, "size": size, "errors": {}}
    begin = time.perf_counter()
    for section in sections:
        start = time.perf_counter()
        try:
            results[section] = SECTIONS[section](size, gauge)
        except Exception as error:  # the other numbers must not be lost
            traceback.print_exc()
            results["errors"][section] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        collect_garbage()
        say(f"{section}: {time.perf_counter() - start:.1f} s")
        results["seconds"] = time.perf_counter() - begin
        if file is not None:
            file.write_text(json.dumps(results, indent=1) + "\n")
    return results


def say(text: str) -> None:
    """A line of progress, so that a run that is cut short still shows what it found."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("base", "small", "compact"), default="base")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="any of " + ", ".join(SECTIONS))
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(arguments)
    sections = args.sections.split(",")
    if unknown := [section for section in sections if section not in SECTIONS]:
        parser.error(f"--sections {unknown[0]}: known are {', '.join(SECTIONS)}")
    if args.size == "base" and not torch.cuda.is_available():
        parser.error("--size base needs a GPU; on a CPU use --size compact")
    warnings.filterwarnings("ignore", message=".*starts from random weights")
    results = run(args.size, sections, args.json)
    print(f"\n{report(results)}")
    if failed := broken(results):
        raise SystemExit(f"not as promised: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
