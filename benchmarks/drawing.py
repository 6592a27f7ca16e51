"""MetaWorld images per second: ways of drawing what several processes see, in one run, and what a frame is made of.

    python benchmarks/drawing.py [--processes 16] [--render exact] [--size 480] [--images 4] [--busy]

Each process draws `--images` scenes of different tasks and has their pixels, as a simulator process does after a chunk.
- a context per task: every task has a GL context, framebuffer and shadow map of its own (how it was done)
- one by one: the tasks share one canvas, and every image is fetched before the next is drawn
- on a sheet: the tasks share one canvas, and all images are fetched at once (how it is done where a GPU draws)
- on a sheet, by 1, 2, 4 ... processes: what drawing processes fed by others could reach
Times are those of an image over all processes (elapsed time / images of all) and of a core per image. Every way's
pixels are compared with images drawn alone. Then one process draws with parts of the picture left out. With --busy
this process keeps the GPU at matrix products meanwhile, as a policy does in another pipeline stage.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier, Event

TASKS = ("handle-press-side-v3", "hammer-v3", "assembly-v3", "door-open-v3")
WAYS = ("a context per task", "one by one", "on a sheet")
PARTS = ("all of it", "shadow map of 256", "no shadows", "one sample", "no reflections", "fast")


@dataclass(frozen=True)
class Job:
    """What one process draws."""

    way: str
    part: str
    render: str
    size: int
    images: int
    seconds: float


def scenes(job: Job) -> tuple[Callable[[], list], Callable[[], list]]:
    """A function that draws the images of a process in the job's way, and one that draws each of them alone."""
    from rlinf.simulators.metaworld import Options
    from rlinf.simulators.opengl import choose_backend

    choose_backend("auto")
    import mujoco

    from rlinf.simulators.metaworld.renderer import Canvas, Renderer
    from rlinf.simulators.metaworld.world import TaskWorld

    options = Options(image_size=job.size, render="fast" if job.part == "fast" else job.render)
    worlds = [TaskWorld(TASKS[i % len(TASKS)], options) for i in range(job.images)]
    for i, world in enumerate(worlds):
        world.reset(i)
        if job.part == "shadow map of 256":
            world.model.vis.quality.shadowsize = 256
        if job.part == "one sample":
            world.model.vis.quality.offsamples = 0
    across = 1
    while job.way == "on a sheet" and across**2 < job.images:
        across += 1

    def renderers(canvases: Sequence[Canvas]) -> list[Renderer]:
        made = [Renderer(w.model, options, c) for w, c in zip(worlds, canvases, strict=True)]
        for renderer in made:
            for name, flag in (("no shadows", "mjRND_SHADOW"), ("no reflections", "mjRND_REFLECTION")):
                if job.part == name:
                    renderer._scene.flags[getattr(mujoco.mjtRndFlag, flag)] = False
        return made

    def canvas(across: int) -> Canvas:
        return Canvas(options, worlds[0].model.vis, across)

    apart = renderers([canvas(1) for _ in worlds])
    chosen = apart if job.way == "a context per task" else renderers([canvas(across)] * len(worlds))

    def draw() -> list:
        if job.way == "one by one":
            return [r.draw(w.data)() for r, w in zip(chosen, worlds, strict=True)]
        return [fetch() for fetch in [r.draw(w.data) for r, w in zip(chosen, worlds, strict=True)]]

    return draw, lambda: [r.draw(w.data)() for r, w in zip(apart, worlds, strict=True)]


def work(job: Job, ready: Barrier, results: multiprocessing.SimpleQueue) -> None:
    """One process: draw for a while; results are the images drawn, the seconds, and the share of equal pixels."""
    import numpy as np

    draw, alone = scenes(job)
    wanted = [image.copy() for image in alone()]
    equal = float(np.mean([one == other for one, other in zip(wanted, draw(), strict=True)]))
    ready.wait()
    count, start, cpu = 0, time.monotonic(), time.process_time()
    while (spent := time.monotonic() - start) < job.seconds:
        draw()
        count += job.images
    results.put((count / spent, 1e3 * (time.process_time() - cpu) / count, equal))
    sys.stdout.flush()
    os._exit(0)  # GL libraries print tracebacks from their destructors


def measure(job: Job, processes: int) -> tuple[float, float, float]:
    """Milliseconds per image over all processes, those of a CPU, and the smallest share of equal pixels."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(processes), context.SimpleQueue()
    started = [context.Process(target=work, args=(job, ready, results)) for _ in range(processes)]
    for process in started:
        process.start()
    rates, cpu, equal = zip(*(results.get() for _ in started), strict=True)
    for process in started:
        process.join()
    return 1e3 / sum(rates), sum(cpu) / processes, min(equal)


def occupy(stop: Event) -> None:
    """Keep the GPU at work."""
    import torch

    a = torch.randn(2048, 2048, device="cuda")
    while not stop.is_set():
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--render", default="exact")
    parser.add_argument("--size", type=int, default=480)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--busy", action="store_true", help="with a GPU at work")
    args = parser.parse_args(arguments)
    stop = threading.Event()
    if args.busy:
        threading.Thread(target=occupy, args=(stop,)).start()

    def line(name: str, processes: int, way: str, part: str = PARTS[0], beside: float = 0.0) -> float:
        job = Job(way, part, args.render, args.size, args.images, args.seconds)
        spent, cpu, equal = measure(job, processes)
        ratio = f"{beside / spent:6.2f}x" if beside else " " * 7
        times = f"{spent:9.2f} ms {ratio} ({cpu:7.2f} ms of a core)"
        print(f"{name:34s}{processes:4d} processes{times}  {equal:.4%} of the pixels equal", flush=True)
        return spent

    try:
        text = f"{args.render} {args.size}, {args.images} images a process{', the GPU at work' if args.busy else ''}"
        print(f"{text}: ms per image over all processes")
        first = line(WAYS[0], args.processes, WAYS[0])
        for way in WAYS[1:]:
            line(way, args.processes, way, beside=first)
        fewer = [2**i for i in range(args.processes.bit_length()) if 2**i < args.processes]
        for processes in fewer:
            line(WAYS[2], processes, WAYS[2], beside=first)
        for part in PARTS[1:] if args.render == "exact" else ():
            line(f"one process, {part}", 1, WAYS[2], part)
    finally:
        stop.set()


if __name__ == "__main__":
    main(sys.argv[1:])
