"""MetaWorld env-steps/s: the published way of stepping against ours, in one run, with the same number of processes.

    python benchmarks/metaworld_env.py [--processes 2] [--seconds 10]

Baseline: MetaWorld's own class in one process per env, an image of 480 x 480 at MuJoCo's default quality after every
step, sent back through a pipe. Ours: VecEnv with as many processes and envs, images at the end of each chunk of 5.
Resets are outside the measurement on both sides.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec
from rlinf.envs.vec import VecEnv
from rlinf.simulators.opengl import choose_backend

TASK, CHUNK, EPISODE = "button-press-topdown-v3", 5, 100
AT_LEAST = {"exact 480": 3.5, "fast 224": 15.0}


def published_env(pipe: Connection) -> None:
    """One env as published: step, render, flip, send the picture; every step."""
    from metaworld import ALL_V3_ENVIRONMENTS

    env = ALL_V3_ENVIRONMENTS[TASK](render_mode="rgb_array", camera_id=2)
    env._set_task_called, env._freeze_rand_vec = True, False
    env.model.cam_pos[2] = (0.75, 0.075, 0.7)
    while (action := pipe.recv()) is not None:
        if isinstance(action, str):
            env.reset()
            pipe.send(env.render()[::-1, ::-1])
            continue
        obs, _, _, _, info = env.step(action)
        pipe.send((obs[:4].astype(np.float32), env.render()[::-1, ::-1], info["success"]))
    os._exit(0)


def measure_published(processes: int, seconds: float) -> float:
    """Env-steps/s of `processes` envs that step together."""
    context = mp.get_context("spawn")
    pipes = []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        context.Process(target=published_env, args=(theirs,), daemon=True).start()
        pipes.append(ours)
    rng = np.random.default_rng(0)
    steps, spent = 0, 0.0
    while spent < seconds:
        for pipe in pipes:
            pipe.send("reset")
        for pipe in pipes:
            pipe.recv()
        start = time.perf_counter()
        for _ in range(2 * CHUNK):
            for pipe in pipes:
                pipe.send(rng.uniform(-1, 1, 4).astype(np.float32))
            for pipe in pipes:
                pipe.recv()
            steps += processes
        spent += time.perf_counter() - start
    for pipe in pipes:
        pipe.send(None)
    return steps / spent


def measure_ours(processes: int, seconds: float, image_size: int, render: str) -> float:
    """Env-steps/s of VecEnv with as many envs and processes."""
    cfg = EnvConfig(
        env_type="metaworld",
        task_suite_name=TASK,
        total_num_envs=processes,
        num_processes=processes,
        max_episode_steps=EPISODE,
        ignore_terminations=True,
        init_params={"image_size": image_size, "render": render},
    )
    env = VecEnv(cfg, env_spec(cfg), env_ids=range(processes), mode="train", chunk_size=CHUNK, seed=0)
    generator = torch.Generator().manual_seed(0)
    steps, spent = 0, 0.0
    try:
        while spent < seconds:
            env.reset()
            start = time.perf_counter()
            for _ in range(EPISODE // CHUNK):
                env.chunk_step(torch.rand(processes, CHUNK, 4, generator=generator) * 2 - 1)
                steps += processes * CHUNK
            spent += time.perf_counter() - start
    finally:
        env.close()
    return steps / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time per setting")
    args = parser.parse_args()
    backend = choose_backend("auto")
    print(f"{TASK}, {args.processes} processes, one env each, chunk {CHUNK}, GL {backend}, {os.cpu_count()} cores")
    baseline = measure_published(args.processes, args.seconds)
    print(f"{'published: every step, 480, default quality':50s} {baseline:8.1f} env-steps/s")
    too_slow = []
    for name, size, render in (("exact 480", 480, "exact"), ("fast 224", 224, "fast")):
        rate = measure_ours(args.processes, args.seconds, size, render)
        text = f"ours: once per chunk, {size}, {render}"
        print(f"{text:50s} {rate:8.1f} env-steps/s   {rate / baseline:6.1f}x (at least {AT_LEAST[name]}x)")
        if rate < AT_LEAST[name] * baseline:
            too_slow.append(name)
    if too_slow:
        raise SystemExit(f"slower than promised: {', '.join(too_slow)}")


if __name__ == "__main__":
    main()
