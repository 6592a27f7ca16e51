"""Rollouts of MetaWorld and a small π0: two pipeline stages against one, with cores of their own for both sides.

    python benchmarks/pipeline.py [--repeats 5] [--device cuda]

The simulators are held to some cores and the training process, which runs the policy, to another: with one stage each
side waits for the other, with two they take turns on different halves of the envs. Denoising steps are chosen so that
both sides take about as long when they overlap, which the printed shares show. Beside it: the best one-stage rollout
with every core free to everyone. Settings are measured in turn, in one run; the medians of the turns' times and ratios
count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command does: threads that spin take others' cores

import torch

from rlinf.commands.bench import Recorder
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.rollout_loop import roll_out
from rlinf.runner import Runner

RECIPES = {"metaworld": "quickstart", "toy": "toy_ppo_compact"}
AT_LEAST = {"cpu": 1.6, "cuda": 1.5}
HORIZON = 50  # actions π0 denoises at once
TRIED = (2, 10)  # denoising steps, to find out what one costs


@dataclass
class Setting:
    """One way to roll out, and what it took."""

    name: str
    runner: Runner
    simulators: list[int]  # process ids
    held: bool  # simulators and policy on cores of their own
    threads: int = 1
    seconds: list[float] = field(default_factory=list)
    env: list[float] = field(default_factory=list)
    policy: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def share(self, side: Sequence[float]) -> float:
        """Of the rollout in which that side was at work."""
        return statistics.median(side) / self.median


@dataclass(frozen=True)
class Cores:
    """Who may run where."""

    policy: set[int]
    simulators: set[int]

    @classmethod
    def of_this_machine(cls, device: str) -> Cores:
        """A core for the training process (two with a GPU, which keeps one spinning), the others for the simulators."""
        cores, count = sorted(os.sched_getaffinity(0)), {"cpu": 1, "cuda": 2}[device]
        return cls(set(cores[:count]), set(cores[count:] or cores))

    @property
    def all(self) -> set[int]:
        return self.policy | self.simulators


def hold(pid: int, cores: set[int]) -> None:
    """Let a process and all its threads run on these cores only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def children() -> set[int]:
    """Process ids of this process's children."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        if parent == os.getpid():
            found.add(int(stat.parent.name))
    return found


@contextmanager
def started(
    args: argparse.Namespace, *, stages: int, processes: int, denoise: int, threads: int = 1
) -> Iterator[tuple[Runner, list[int]]]:
    """A runner whose simulators run, after its first rollout; and their process ids."""
    gpus = 1 if args.device == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"actor.model.size={'small' if args.device == 'cuda' else 'compact'}",
            f"actor.model.num_steps={denoise}",
            f"actor.model.num_action_chunks={args.chunk}",
            f"actor.model.openpi.action_horizon={HORIZON}",
            f"env.train.total_num_envs={args.envs}",
            f"env.train.num_processes={processes}",
            f"env.train.max_episode_steps={args.chunk * args.chunks}",
            f"env.train.max_steps_per_rollout_epoch={args.chunk * args.chunks}",
            "env.train.auto_reset=true",
            f"actor.micro_batch_size={args.envs}",
            f"actor.global_batch_size={args.envs}",
            f"rollout.pipeline_stage_num={stages}",
            f"cluster.torch_threads={threads}",
            f"runner.logger.log_path={folder}",
        ]
        cfg = load_config(RECIPES[args.env], settings, devices=[gpus])
        before = children()
        runner = Runner(cfg, make_plan(cfg, [gpus]), watch=Recorder())
        try:
            play(runner, 0)
            yield runner, sorted(children() - before)
        finally:
            runner.close()


def play(runner: Runner, step: int) -> tuple[float, float, float]:
    """One rollout: its seconds, those the simulators took and those the policy took."""
    cfg = runner.cfg
    chunks = cfg.env.train.max_steps_per_rollout_epoch // cfg.actor.model.num_action_chunks
    runner.usage()
    with runner.timed("rollout"):
        runner.cluster.get(
            roll_out(runner.env, runner.rollout, runner.plan, mode="train", step=step, epochs=1, chunks=chunks)
        )
    busy = runner.usage().busy
    return runner.times.pop("rollout"), sum(busy["env"][0].values()), sum(busy["rollout"][0].values())


def balanced_steps(args: argparse.Namespace, cores: Cores) -> int:
    """Denoising steps with which the policy takes as long as the simulators."""
    env, policy = [], []
    for denoise in TRIED:
        with started(args, stages=2, processes=len(cores.simulators), denoise=denoise) as (runner, simulators):
            setting = Setting("", runner, simulators, held=True)
            for step in (1, 2):
                measure(setting, cores, step)
            env += setting.env
            policy.append(min(setting.policy))
    one = (policy[1] - policy[0]) / (TRIED[1] - TRIED[0])
    return min(max(1, round(TRIED[0] + (min(env) - policy[0]) / max(one, 1e-9))), 50)


def measure(setting: Setting, cores: Cores, step: int) -> None:
    """Put everybody on their cores and play one rollout."""
    torch.set_num_threads(setting.threads)  # of its matrix library; its own threads follow cluster.torch_threads
    for pid in setting.simulators:
        hold(pid, cores.simulators if setting.held else cores.all)
    hold(os.getpid(), cores.policy if setting.held else cores.all)
    for times, seconds in zip((setting.seconds, setting.env, setting.policy), play(setting.runner, step), strict=True):
        times.append(seconds)


def run(args: argparse.Namespace) -> list[Setting]:
    """Every setting, measured in turn; the first two are one and two stages on cores of their own."""
    cores = Cores.of_this_machine(args.device)
    try:
        denoise = args.denoise or balanced_steps(args, cores)
        size = "small" if args.device == "cuda" else "compact"
        load = " ".join(f"{x:.1f}" for x in os.getloadavg())
        print(f"{args.env}, {args.envs} envs, {args.chunks} chunks of {args.chunk} actions")
        print(f"{size} π0, H={HORIZON}, N={denoise}, torch {torch.__version__} on {args.device}")
        held = f"held: policy on {len(cores.policy)}, simulators on {len(cores.simulators)}"
        print(f"{len(cores.all)} cores, load {load}; {held}")
        with ExitStack() as stack:

            def start(name: str, *, stages: int, held: bool, threads: int = 1) -> Setting:
                processes = len(cores.simulators if held else cores.all)
                enter = started(args, stages=stages, processes=processes, denoise=denoise, threads=threads)
                return Setting(name, *stack.enter_context(enter), held=held, threads=threads)

            settings = [start("one stage, held", stages=1, held=True), start("two stages, held", stages=2, held=True)]
            for threads in sorted({1, 2, len(cores.all)} if args.device == "cpu" else {1}):
                settings.append(
                    start(f"one stage, all cores, torch threads {threads}", stages=1, held=False, threads=threads)
                )
            for step in range(1, args.repeats + 1):
                for setting in settings:
                    measure(setting, cores, step)
    finally:
        hold(os.getpid(), cores.all)
    return settings


def speedup(slow: Setting, fast: Setting) -> float:
    """Median over the turns, so that a machine which grows slower or faster meanwhile does not matter."""
    return statistics.median(a / b for a, b in zip(slow.seconds, fast.seconds, strict=True))


def report(settings: Sequence[Setting], env_steps: int, at_least: float) -> float:
    """Print the table and the ratio, which is returned."""
    print(f"{'':42}{'rollout s':>10}{'env':>7}{'policy':>8}{'env-steps/s':>13}")
    for s in settings:
        rate = env_steps / s.median
        print(f"{s.name:42}{s.median:>10.3f}{s.share(s.env):>7.0%}{s.share(s.policy):>8.0%}{rate:>13.0f}")
    one, two, *free = settings
    best, ratio = min(free, key=lambda s: s.median), speedup(one, two)
    print(f"two stages are {ratio:.2f}x as fast as one (at least {at_least}x)")
    print(f"and {speedup(best, two):.2f}x as fast as the best of one stage on all cores")
    return ratio


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=sorted(RECIPES), default="metaworld", help="toy costs nothing to simulate")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--envs", type=int, help="default 48, with cuda 32 per simulator core")
    parser.add_argument("--chunk", type=int, help="actions executed per call; default 5, with cuda 25")
    parser.add_argument("--chunks", type=int, help="per rollout; default 16, with cuda 12")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--denoise", type=int, default=0, help="denoising steps; 0 balances simulators and policy")
    parser.add_argument("--at-least", type=float, help="fail below this ratio")
    args = parser.parse_args(arguments)
    args.envs = args.envs or {"cpu": 48, "cuda": 32 * len(Cores.of_this_machine("cuda").simulators)}[args.device]
    args.chunk = args.chunk or {"cpu": 5, "cuda": 25}[args.device]
    args.chunks = args.chunks or {"cpu": 16, "cuda": 12}[args.device]
    args.at_least = AT_LEAST[args.device] if args.at_least is None else args.at_least
    return args


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if report(run(args), args.envs * args.chunks * args.chunk, args.at_least) < args.at_least:
        raise SystemExit("slower than promised")


if __name__ == "__main__":
    main(sys.argv[1:])
