"""MetaWorld images per second from several processes at once: fetched one by one, against a sheet of them at a time.

    python benchmarks/drawing.py [--processes 14] [--busy]

Each process draws one task at 64 pixels, 16 images at a time, as a simulator process with 16 scenes does after a chunk.
With --busy this process keeps the GPU at matrix products meanwhile, as a policy does in another pipeline stage. The
share of a sheet's pixels that equal an image drawn alone is printed too. In software, where no turn is waited for,
images are drawn one by one by default.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier, Event

TASK, IMAGES, ACROSS = "handle-press-side-v3", 16, 8


def draw(across: int, seconds: float, ready: Barrier, results: multiprocessing.SimpleQueue) -> None:
    """One process: draw sets of images for a while; results are ms per image and the share of equal pixels."""
    import numpy as np

    from rlinf.simulators.metaworld import Options
    from rlinf.simulators.opengl import choose_backend

    choose_backend("auto")
    from rlinf.simulators.metaworld.renderer import Renderer
    from rlinf.simulators.metaworld.world import TaskWorld

    options = Options(task_suite_name=TASK, image_size=64, render="fast")
    world = TaskWorld(TASK, options)
    world.reset(0)
    renderer = Renderer(world.model, options, across)

    def images() -> list[np.ndarray]:
        return [fetch() for fetch in [renderer.draw(world.data) for _ in range(IMAGES)]]

    equal = float(np.mean([image == world.draw()() for image in images()]))
    ready.wait()
    sets, start = 0, time.monotonic()
    while (spent := time.monotonic() - start) < seconds:
        images()
        sets += 1
    results.put((1e3 * spent / (sets * IMAGES), equal))
    renderer.close()
    world.close()


def measure(across: int, args: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds per image of a process beside the others, median; and the smallest share of equal pixels."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(args.processes), context.SimpleQueue()
    stop = context.Event()
    load = threading.Thread(target=occupy, args=(stop,))
    if args.busy:
        load.start()
    try:
        processes = [
            context.Process(target=draw, args=(across, args.seconds, ready, results)) for _ in range(args.processes)
        ]
        for process in processes:
            process.start()
        times, equal = zip(*(results.get() for _ in processes), strict=True)
        for process in processes:
            process.join()
    finally:
        stop.set()
    return statistics.median(times), min(equal)


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
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--busy", action="store_true", help="with a GPU at work")
    args = parser.parse_args(arguments)
    (one, _), (many, equal) = measure(1, args), measure(ACROSS, args)
    print(f"{args.processes} processes{', the GPU at work' if args.busy else ''}: ms per image")
    print(f"one by one {one:.2f}, {IMAGES} at a time {many:.2f}: {one / many:.2f}x; {equal:.4%} of the pixels equal")


if __name__ == "__main__":
    main(sys.argv[1:])
