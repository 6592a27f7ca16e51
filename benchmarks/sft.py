"""Imitation as `rlinf sft` does it, and collecting its demonstrations as `rlinf collect` does.

    python benchmarks/sft.py [--collect] [--precision bf16 fp32] [--json FILE] [key=value ...]

Trains the small π0 (26 M parameters, 112 pixels) on as many frames as 1000 episodes of MT50 have, with `train_sft`
itself: batches, draws, both passes, clipping, the optimiser's step, logging and reading of metrics. It prints samples
per second of the steps after the warm-up, each beside the same loop without recorded passes
(actor.model.cuda_graphs=false), and how far their losses lie apart. The frames are synthetic; with --collect the
scripted experts play them first, in processes of their own, and that is timed too.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.demos.writer import DatasetWriter, encode_images
from rlinf.envs.routing import usable_cores
from rlinf.envs.spec import env_spec
from rlinf.simulators.contract import EnvSpec
from rlinf.simulators.metaworld.tasks import task_table
from rlinf.training.sft import READ_EVERY, train_sft

RECIPE = "metaworld_50_ppo_openpi"
FRAMES = 86  # a mean episode of MT50
DISTINCT = 24  # synthetic episodes that differ in their images
COLLECT = (
    "import sys; from rlinf.commands import jobs; from rlinf.config.load import load_config; "
    f"jobs.collect(load_config({RECIPE!r}, sys.argv[1:], purpose='collect'))"
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--size", default="small")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--episodes", type=int, default=20, help="of each task")
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--steps", type=int, default=300, help="measured")
    parser.add_argument("--warmup", type=int, default=100, help=f"a multiple of {READ_EVERY}")
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument("--collect", action="store_true", help="let the experts play the episodes, and time it")
    parser.add_argument("--profile", action="store_true", help="list the kernels of the recorded loop")
    parser.add_argument("--data", type=Path, help="where the dataset is kept; used again if it is there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rlinf-sft-") as folder:
        work = Path(folder)
        data = given.data or work / "demos"
        if not data.exists():
            result["data"] = collect(data, given) if given.collect else synthesize(data, given)
        result["sft"] = [measure(data, work, given, precision) for precision in given.precision]
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1))


def settings(given: argparse.Namespace) -> list[str]:
    """Of the recipe, for collecting and for imitation."""
    return [
        f"actor.model.size={given.size}",
        "actor.model.openpi.train_expert_only=false",
        f"env.train.init_params.image_size={given.image_size}",
        "env.train.init_params.render=fast",
    ]


def collect(data: Path, given: argparse.Namespace) -> dict[str, float]:
    """Demonstrations by the scripted experts, as `rlinf collect` makes them, in a process of their own."""
    tasks = list(load_spec(given).tasks)[: given.tasks]
    own = [f"collect.output={data}", f"collect.episodes_per_task={given.episodes}", "collect.max_steps=400"]
    own += [
        f"collect.tasks=[{','.join(tasks)}]",
        *(text for text in given.overrides if text.startswith(("env.", "collect."))),
    ]
    begun, spent = time.perf_counter(), cpu_seconds()
    subprocess.run([sys.executable, "-c", COLLECT, *settings(given), *own], check=True, stdout=subprocess.DEVNULL)
    wall, cpu = time.perf_counter() - begun, cpu_seconds() - spent
    info = json.loads((data / "meta/info.json").read_text())
    tried = sum(t["attempts"] for t in json.loads((data / "meta/collect.json").read_text())["tasks"].values())
    print(
        f"collected {info['total_episodes']} of {tried} episodes, {info['total_frames']} frames, in {wall:.1f} s: "
        f"{cpu / wall:.1f} of {usable_cores()} cores at work, "
        f"{1000 * cpu / info['total_frames']:.1f} ms of a core a frame"
    )
    return {"episodes": info["total_episodes"], "frames": info["total_frames"], "seconds": wall, "core_seconds": cpu}


def synthesize(data: Path, given: argparse.Namespace) -> dict[str, float]:
    """A dataset of the same shape: soft pictures with a moving square, one sentence for each task."""
    spec, rng, begun = load_spec(given), np.random.default_rng(0), time.perf_counter()
    sentences = list(task_table()["descriptions"].values())[: given.tasks]
    pictures = [encode_images(images) for images in synthetic_images(spec, rng)]
    with DatasetWriter(data, spec) as writer:
        for number in range(given.episodes * given.tasks):
            writer.add(
                images=pictures[number % DISTINCT],
                states=rng.standard_normal((FRAMES, spec.state_dim)).astype(np.float32),
                actions=rng.uniform(-1, 1, (FRAMES, spec.action_dim)).astype(np.float32),
                critic_states=rng.standard_normal((FRAMES, spec.critic_state_dim)).astype(np.float32),
                task=sentences[number % len(sentences)],
            )
    seconds, episodes = time.perf_counter() - begun, given.episodes * given.tasks
    print(f"made {episodes} synthetic episodes, {episodes * FRAMES} frames, in {seconds:.1f} s")
    return {"episodes": episodes, "frames": episodes * FRAMES, "seconds": seconds}


def synthetic_images(spec: EnvSpec, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Episodes u8 [T, H, W, 3]."""
    height, width = spec.image_size
    y, x = np.mgrid[:height, :width]
    for _ in range(DISTINCT):
        a, b = rng.uniform(0.5, 2.0, 2)
        ground = np.stack((a * y, b * x, x + y), -1).astype(np.uint8)
        images = np.repeat(ground[None], FRAMES, 0)
        for t, image in enumerate(images):
            at = int(t * (height - 8) / FRAMES)
            image[at : at + 8, at : at + 8] = rng.integers(0, 256, 3)
        yield images


def load_spec(given: argparse.Namespace) -> EnvSpec:
    """The simulator's shapes."""
    return env_spec(load_config(RECIPE, settings(given), purpose="collect").env.train)


def measure(data: Path, work: Path, given: argparse.Namespace, precision: str) -> dict[str, Any]:
    """The loop with recorded passes and without, in one precision; prints both."""
    found: dict[str, Any] = {"precision": precision}
    for recorded in (True, False):
        own = [f"sft.dataset={data}", f"sft.output={work}/{precision}-{recorded}", f"sft.batch_size={given.batch}"]
        own += [f"sft.steps={given.warmup + given.steps}", "sft.lr=3.0e-4", "sft.eval_interval=0"]
        own += [f"actor.model.precision={precision}", f"actor.model.cuda_graphs={str(recorded).lower()}"]
        cfg = load_config(RECIPE, [*settings(given), *own, *given.overrides], purpose="sft")
        rate, losses, told = timed(cfg, given)
        name = "recorded" if recorded else "plain"
        found[name] = {"samples_per_s": rate, "loss": losses, "seconds": told["seconds"]}
        print(
            f"{precision} {name:8s} {rate:9.0f} samples/s  {1000 * given.batch / rate:7.2f} ms a step  "
            f"{told['seconds']:.0f} s in all  {told['images']}"
        )
    found["ratio"] = found["recorded"]["samples_per_s"] / found["plain"]["samples_per_s"]
    pairs = zip(found["recorded"]["loss"], found["plain"]["loss"], strict=True)
    found["loss_gap"] = max(abs(a - b) / b for a, b in pairs)
    print(
        f"{precision} recorded is {found['ratio']:.2f}x plain; losses of {READ_EVERY} steps differ by at most "
        f"{100 * found['loss_gap']:.2f} %"
    )
    if given.profile and torch.cuda.is_available():
        found["kernels"] = kernels(cfg, given)
    return found


def timed(cfg: Config, given: argparse.Namespace) -> tuple[float, list[float], dict[str, Any]]:
    """Samples/s of the steps after the warm-up, mean losses of READ_EVERY steps, and what the training told."""
    clock: dict[int, float] = {}
    losses: list[float] = []
    lines: list[str] = []

    def on_step(step: int, metrics: dict[str, float]) -> None:
        """Called once the device has finished the last step whose metrics were read: every READ_EVERY steps."""
        if step in (given.warmup, given.warmup + given.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            clock[step] = time.perf_counter()
        losses.append(metrics["train/sft/loss"])

    begun = time.perf_counter()
    train_sft(cfg, on_progress=lines.append, on_step=on_step)
    seconds = clock[given.warmup + given.steps] - clock[given.warmup]
    means = [statistics.fmean(losses[i : i + READ_EVERY]) for i in range(0, len(losses), READ_EVERY)]
    told = {"seconds": time.perf_counter() - begun, "images": next(line for line in lines if line.startswith("images"))}
    return given.batch * given.steps / seconds, means, told


def kernels(cfg: Config, given: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the most expensive kernels in a recorded step; prints them and their sum."""
    from dataclasses import replace

    model = replace(cfg.actor.model, cuda_graphs=True)
    sft = replace(cfg.sft, output=f"{cfg.sft.output}-profile", steps=2 * READ_EVERY)
    cfg = replace(cfg, actor=replace(cfg.actor, model=model), sft=sft)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == READ_EVERY:
            profiler.start()
        if step == 2 * READ_EVERY:
            profiler.stop()

    train_sft(cfg, on_progress=lambda line: None, on_step=on_step)
    spent = {e.key: e.self_device_time_total / 1000 / READ_EVERY for e in profiler.key_averages()}
    most = sorted(spent.items(), key=lambda item: -item[1])[:14]
    print(f"kernels take {sum(spent.values()):.2f} ms a step:")
    for name, milliseconds in most:
        print(f"  {milliseconds:7.3f} ms  {name[:100]}")
    return dict(most)


def cpu_seconds() -> float:
    """Of the processes that this one has started and awaited, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
