"""CALVIN env-steps/s: the published way of stepping against ours, in one run, with the same number of processes.

    python benchmarks/calvin_env.py [--processes 2] [--seconds 10]

Needs CALVIN_PATH. Baseline: one process per env; after every step both cameras are drawn (200 and 84 pixels, published
meshes, TinyRenderer) and sent through a pipe together with states and contacts, and the parent judges the task. Its
physics and images are ours, which are calvin_env's bit for bit. Ours: VecEnv with as many processes and envs, images at
the end of each chunk of 5. Resets are outside the measurement on both sides. The baseline is measured before and after
ours, and the faster one counts: other work on the machine must not flatter us.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec
from rlinf.envs.vec import VecEnv
from rlinf.simulators.calvin import Options
from rlinf.simulators.calvin.assets import check_folder, find_folder
from rlinf.simulators.calvin.starts import start_of
from rlinf.simulators.calvin.tasks import solved

CHUNK, EPISODE = 5, 60
SETTINGS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("once per chunk, 200 and 84, exact", {}, 3.5),
    ("once per chunk, 200 and 84, fast", {"render": "fast"}, 7.0),
    ("once per chunk, 64 and 64, fast", {"render": "fast", "image_size": 64, "wrist_image_size": 64}, 7.0),
)


def published_env(pipe: Connection) -> None:
    """One env as published: step, draw, collect everything, send it; every step."""
    from rlinf.simulators.calvin.world import World

    world = World(find_folder(None), Options(renderer="tiny"))
    while (message := pipe.recv()) is not None:
        if isinstance(message, int):
            start = start_of(message)
            world.reset(start.scene, start.robot_obs, start.scene_obs)
        else:
            world.step(message)
        pipe.send((world.static_image(), world.wrist_image(), world.robot_obs(), world.scene_obs(), world.facts()))
    os._exit(0)


def measure_published(processes: int, seconds: float, ids: list[int]) -> float:
    """Env-steps/s of `processes` envs that step together."""
    context = mp.get_context("spawn")
    pipes = []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        context.Process(target=published_env, args=(theirs,), daemon=True).start()
        pipes.append(ours)
    rng = np.random.default_rng(0)
    steps, spent, episode = 0, 0.0, 0
    while spent < seconds:
        started = [ids[(episode + i) % len(ids)] for i in range(processes)]
        episode += processes
        for pipe, reset_id in zip(pipes, started, strict=True):
            pipe.send(reset_id)
        before = [pipe.recv()[-1] for pipe in pipes]
        tasks = [start_of(reset_id).tasks[0] for reset_id in started]
        start = time.perf_counter()
        for _ in range(2 * CHUNK):
            for pipe in pipes:
                pipe.send(random_actions(rng, 1)[0])
            for pipe, task, facts in zip(pipes, tasks, before, strict=True):
                solved(task, facts, pipe.recv()[-1])
            steps += processes
        spent += time.perf_counter() - start
    for pipe in pipes:
        pipe.send(None)
    return steps / spent


def random_actions(rng: np.random.Generator, count: int) -> np.ndarray:
    """f32 [count, 7] with a gripper that is open or closed."""
    actions = rng.uniform(-1, 1, (count, 7)).astype(np.float32)
    actions[:, 6] = np.sign(actions[:, 6])
    return actions


def measure_ours(cfg: EnvConfig, processes: int, seconds: float) -> float:
    """Env-steps/s of VecEnv with as many envs and processes."""
    env = VecEnv(cfg, env_spec(cfg), env_ids=range(processes), mode="train", chunk_size=CHUNK, seed=0)
    rng = np.random.default_rng(0)
    steps, spent = 0, 0.0
    try:
        while spent < seconds:
            env.reset()
            start = time.perf_counter()
            for _ in range(EPISODE // CHUNK):
                actions = random_actions(rng, processes * CHUNK).reshape(processes, CHUNK, 7)
                env.chunk_step(torch.from_numpy(actions))
                steps += processes * CHUNK
            spent += time.perf_counter() - start
    finally:
        env.close()
    return steps / spent


def config(processes: int, init_params: dict[str, Any]) -> EnvConfig:
    return EnvConfig(
        env_type="calvin",
        task_suite_name="calvin_d",
        total_num_envs=processes,
        num_processes=processes,
        max_episode_steps=EPISODE,
        ignore_terminations=True,
        init_params={"renderer": "tiny"} | init_params,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time per setting")
    args = parser.parse_args()
    check_folder(find_folder(None), "D")
    print(f"calvin_d, {args.processes} processes, one env each, chunk {CHUNK}, TinyRenderer, {os.cpu_count()} cores")
    ids = list(env_spec(config(args.processes, {})).reset_ids["train"][:100])
    baselines = [measure_published(args.processes, args.seconds, ids)]
    rates = [measure_ours(config(args.processes, init), args.processes, args.seconds) for _, init, _ in SETTINGS]
    baselines.append(measure_published(args.processes, args.seconds, ids))
    baseline, seen = max(baselines), " and ".join(f"{rate:.1f}" for rate in baselines)
    print(f"{'published: every step, 200 and 84, exact':50s} {baseline:8.1f} env-steps/s   ({seen})")
    too_slow = []
    for (name, _, at_least), rate in zip(SETTINGS, rates, strict=True):
        print(f"{'ours: ' + name:50s} {rate:8.1f} env-steps/s   {rate / baseline:6.1f}x (at least {at_least}x)")
        if rate < at_least * baseline:
            too_slow.append(name)
    if too_slow:
        raise SystemExit(f"slower than promised: {', '.join(too_slow)}")


if __name__ == "__main__":
    main()
