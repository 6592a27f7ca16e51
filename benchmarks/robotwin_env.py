"""Seconds per chunk of RoboTwin's own VectorEnv and of rlinf's environments, the same actions, in one run.

    ROBOTWIN_PATH=... ASSETS_PATH=... ROBOTWIN_PYTHON=... python benchmarks/robotwin_env.py [--chunks 8] [--envs 2]

Both play stack_blocks_two chunk by chunk in turns, VectorEnv in its threads, rlinf in its processes, each to the
observation after the chunk. They draw with SAPIEN's rasteriser `default`, shadows on, since ray tracing needs an NVIDIA
GPU. Then one scene of `render: fast` shows what its pictures cost beside the physics, and of `render: exact` where it
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CHUNK, FIRST_SEED = 25, 100_100_000
TASK_CONFIG: dict[str, Any] = {
    "task_name": "stack_blocks_two",
    "embodiment": ["piper", "piper", 0.6],
    "planner_backend": "mplib",
    "step_lim": 10_000,
    "clear_cache_freq": 8,
    "save_freq": 15,
    "save_path": "data",
    "camera": {"collect_wrist_camera": False},
    "domain_randomization": {"clean_background_rate": 1},
    "data_type": {"rgb": True, "qpos": True},
}
HOME = [0, 0.3, -0.3, 0, 0.3, 0, 1] * 2  # the stand-in Piper's
AT_LEAST, AT_MOST = 2.0, 1.3  # times VectorEnv's speed, and physics' time


def walk(env: int, chunks: int) -> np.ndarray:
    """A random walk of both arms around their home, f64 [chunks, C, 14]; the grippers stay open."""
    rng = np.random.default_rng(env)
    steps = rng.normal(0, 0.02, (chunks * CHUNK, 14))
    steps[:, [6, 13]] = 0
    return (np.array(HOME) + 0.5 * np.sin(np.cumsum(steps, 0))).reshape(chunks, CHUNK, 14)


def vector_env(seeds: list[int], shader: str, task_config: dict[str, Any]) -> Any:
    """RoboTwin's own VectorEnv with another shader; to be called in its interpreter."""
    from rlinf.simulators.robotwin.host import load_host
    from rlinf.simulators.robotwin.suite import Options

    host = load_host(Options(task_config=task_config, shader=shader))
    sys.path.insert(0, str(host.checkout))
    from robotwin.envs.vector_env import VectorEnv

    config = json.loads(json.dumps(task_config))
    return VectorEnv(config, len(seeds), list(seeds))


def serve_vector(envs: int, chunks: int, shader: str) -> Iterator[float]:
    """Seconds of each chunk of VectorEnv, one whenever asked for."""
    seeds = [FIRST_SEED + i for i in range(envs)]
    env = vector_env(seeds, shader, TASK_CONFIG)
    env.reset(env_seeds=seeds)
    env.get_obs()
    actions = [walk(i, chunks) for i in range(envs)]
    for k in range(chunks):
        began = time.perf_counter()
        env.step(np.stack([a[k] for a in actions]))
        yield time.perf_counter() - began


def serve_scene(chunks: int, render: str) -> Iterator[tuple[float, float]]:
    """CPU seconds of the physics and of the picture of each chunk of one scene."""
    from rlinf.simulators.robotwin import Options, Scene

    scene = Scene(Options(task_config=TASK_CONFIG, render=render))
    scene.reset(FIRST_SEED)
    scene.observe()
    for chunk in walk(0, chunks):
        times = [time.process_time()]
        scene.step_chunk(chunk, stop_on_success=True, record=False)
        times.append(time.process_time())
        scene.observe()
        times.append(time.process_time())
        yield times[1] - times[0], times[2] - times[1]


def rlinf_envs(envs: int, shader: str) -> Any:
    """The same environments in rlinf's processes."""
    from rlinf.envs.config import EnvConfig
    from rlinf.envs.spec import env_spec
    from rlinf.envs.vec import VecEnv

    cfg = EnvConfig(
        env_type="robotwin",
        task_config=TASK_CONFIG,
        init_params={"render": "exact", "shader": shader},
        total_num_envs=envs,
        max_episode_steps=10_000,
        step_deadline_s=600,
    )
    trials = [FIRST_SEED + i for i in range(envs)]
    spec = env_spec(cfg, "env.eval")
    return VecEnv(cfg, spec, env_ids=range(envs), mode="eval", chunk_size=CHUNK, seed=0, trials=trials)


def start(mode: str, arguments: argparse.Namespace, render: str = "") -> subprocess.Popen[str]:
    """This file in RoboTwin's interpreter: it does one chunk for each line that it is sent."""
    command = [os.environ["ROBOTWIN_PYTHON"], __file__, "--child", mode, "--render", render]
    command += ["--chunks", str(arguments.chunks), "--envs", str(arguments.envs), "--shader", arguments.shader]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(process: subprocess.Popen[str]) -> list[float]:
    """Have a child do the next chunk; what it measured. RoboTwin prints, too, so its lines are passed over."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("next\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("measured "):
            return json.loads(line.removeprefix("measured "))
    raise SystemExit(f"a child ended with status {process.wait()}")


def child(arguments: argparse.Namespace) -> None:
    """Measure a chunk for each line on stdin."""
    measured: Iterator[Any]
    if arguments.child == "vector":
        measured = serve_vector(arguments.envs, arguments.chunks, arguments.shader)
    else:
        measured = serve_scene(arguments.chunks, arguments.render)
    for _ in sys.stdin:
        values = next(measured)
        print("measured", json.dumps(np.atleast_1d(values).tolist()), flush=True)


def measure_scene(arguments: argparse.Namespace, render: str) -> tuple[float, float]:
    """Median CPU seconds of physics and picture per chunk."""
    process = start("scene", arguments, render)
    rows = np.array([ask(process) for _ in range(arguments.chunks)])
    process.stdin.close()  # type: ignore[union-attr]
    process.wait()
    return float(np.median(rows[:, 0])), float(np.median(rows[:, 1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--shader", default="default")
    parser.add_argument("--child", choices=["vector", "scene"], help=argparse.SUPPRESS)
    parser.add_argument("--render", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return 0
    import torch

    from rlinf.simulators.vulkan import has_nvidia

    theirs, ours = start("vector", arguments), rlinf_envs(arguments.envs, arguments.shader)
    ours.reset()
    actions = torch.from_numpy(np.stack([walk(i, arguments.chunks) for i in range(arguments.envs)], 1)).float()
    seconds = []
    for k in range(arguments.chunks):
        (published,) = ask(theirs)
        began = time.perf_counter()
        ours.chunk_step(actions[k])
        seconds.append((published, time.perf_counter() - began))
    ours.close()
    theirs.stdin.close()  # type: ignore[union-attr]
    theirs.wait()
    published, here = np.median(np.array(seconds), axis=0)
    print(f"{arguments.envs} envs, chunks of {CHUNK}, shader {arguments.shader}, shadows on, median of {len(seconds)}")
    print(f"  VectorEnv {published:.2f} s, rlinf {here:.2f} s: {published / here:.1f} times as fast")
    physics, picture = measure_scene(arguments, "fast")
    ratio = (physics + picture) / physics
    print(f"  fast: physics {1e3 * physics:.0f} ms, picture {1e3 * picture:.0f} ms of CPU time: {ratio:.2f} x physics")
    if has_nvidia():
        physics, picture = measure_scene(arguments, "exact")
        print(f"  exact, ray traced: physics {1e3 * physics:.0f} ms, picture {1e3 * picture:.0f} ms")
    else:
        print("  exact, ray traced: not measured, there is no NVIDIA GPU")
    return int(published / here < AT_LEAST or ratio > AT_MOST)


if __name__ == "__main__":
    sys.exit(main())
