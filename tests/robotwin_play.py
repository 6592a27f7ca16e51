"""Plays episodes in RoboTwin's interpreter, in its own VectorEnv or in rlinf's scene: `python FILE WHO CASE FOLDER`.

rlinf goes first and leaves the actions that both play: a random walk, or the path of RoboTwin's expert.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.robotwin_env import CHUNK, TASK_CONFIG, vector_env, walk

LIGHT = {"random_light": True, "crazy_random_light_rate": 1.0}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # seed, domain randomisation
    "walk": (100_100_003, {}),
    "expert": (100_100_001, {}),
    "light": (100_100_005, LIGHT),
    "table": (7, {"random_table_height": 0.03, "random_light": True}),
}
SHADER = "minimal"


def config(case: str) -> dict[str, Any]:
    """task_config of a case."""
    randomised = {"clean_background_rate": 1, **CASES[case][1]}
    return {**TASK_CONFIG, "domain_randomization": randomised}


def play_rlinf(case: str, folder: Path) -> dict[str, Any]:
    """States, pictures, successes and instruction of rlinf's scene; leaves the actions."""
    from rlinf.simulators.robotwin import Expert, Options, Scene

    options, seed = Options(task_config=config(case), render="exact", shader=SHADER), CASES[case][0]
    scene = Scene(options)
    chunks = list(walk(1, 3))
    if case == "expert":
        path = np.stack(Expert(options)._play("stack_blocks_two", seed).states[1:])
        chunks = [path[i : i + CHUNK] for i in range(0, len(path), CHUNK)]
    scene.reset(seed)
    seen, success = [scene.observe()], []
    for chunk in chunks:
        success.append(bool(scene.step_chunk(chunk, stop_on_success=True, record=False).success[-1]))
        seen.append(scene.observe())
        if success[-1]:
            break
    np.savez(folder / f"{case}_actions.npz", *chunks[: len(success)])
    again = scene.get_state()
    scene.set_state(again)
    return {
        "states": [s["states"] for s in seen],
        "images": [s["images"] for s in seen],
        "success": success,
        "instruction": seen[0]["task_description"],
        "restored": scene.observe()["states"],
        "restored_image": scene.observe()["images"],
    }


def play_vector(case: str, folder: Path) -> dict[str, Any]:
    """The same of RoboTwin's VectorEnv, with the actions that rlinf left."""
    with np.load(folder / f"{case}_actions.npz") as stored:
        chunks = [stored[name] for name in stored]
    seed = CASES[case][0]
    env = vector_env([seed], SHADER, config(case))
    env.reset(env_seeds=[seed])
    seen, success = env.get_obs(), []
    for chunk in chunks:
        obs, _, terminated, _, _ = env.step(chunk[None].astype(np.float64))
        seen.append(obs[0])
        success.append(bool(terminated[0][0]))
    return {
        "states": [s["state"] for s in seen],
        "images": [s["full_image"] for s in seen],
        "success": success,
        "instruction": seen[0]["instruction"],
    }


def play_objects(task: str) -> None:
    """Reset and step a task whose objects are files, and print how far its arms were moved."""
    from rlinf.simulators.robotwin import Options, Scene

    scene = Scene(Options(task_config={**config("walk"), "task_name": task}, render="fast"))
    scene.reset(CASES["walk"][0])
    before = scene.observe()
    scene.step_chunk(walk(1, 1)[0], stop_on_success=True, record=False)
    moved = float(np.abs(scene.observe()["states"] - before["states"]).max())
    scene.close()
    print("played", task, json.dumps({"moved": moved, "instruction": before["task_description"]}), flush=True)


def play_resets(count: int) -> None:
    """Reset, step and look `count` times, and print the process's resident MB after 20 and after all."""
    from rlinf.simulators.robotwin import Options, Scene

    scene, used = Scene(Options(task_config=config("walk"), render="fast", max_growth_mb=0)), []
    for i in range(count):
        scene.reset(100_000 + i)
        scene.step_chunk(walk(1, 1)[0][:2], stop_on_success=True, record=False)
        scene.observe()
        used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
    print("resident", used[min(19, count - 1)], used[-1], flush=True)


def play_unseen(task: str) -> None:
    """Let the expert play; print how many looks of three cameras there were, with bodies left out, and other by it."""
    from rlinf.simulators.robotwin import Options, Scene
    from rlinf.simulators.robotwin.unseen import Bodies

    cameras = {**TASK_CONFIG.get("camera", {}), "collect_wrist_camera": True}
    scene = Scene(Options(task_config={**config("walk"), "task_name": task, "camera": cameras}, render="fast"))
    scene.reset(CASES["expert"][0])
    world, told = scene.world, {"pictures": 0, "hidden": 0, "differ": 0}

    def compare() -> None:
        world.look()
        drawn, bodies = world.pictures(), world._bodies
        shown = [(body.visibility, visibility) for body, visibility, _ in bodies._bodies]  # to the last camera
        for body, visibility, _ in bodies._bodies:
            body.visibility = visibility
        world._bodies, world._pictures = Bodies(()), None
        told["differ"] += not all(map(np.array_equal, drawn, world.pictures()))
        told["hidden"] += any(now != before for now, before in shown)
        told["pictures"] += 1
        world._bodies = bodies

    world.play_expert(compare)
    print("drew", json.dumps(told), flush=True)


def main() -> None:
    """Play what the command line asks for."""
    _, who, what, out = sys.argv
    if who == "resets":
        return play_resets(int(what))
    for name in what.split(","):
        if who in ("objects", "unseen"):
            (play_objects if who == "objects" else play_unseen)(name)
        else:
            played = (play_rlinf if who == "rlinf" else play_vector)(name, Path(out))
            np.savez(Path(out) / f"{name}_{who}.npz", **{key: np.asarray(value) for key, value in played.items()})
    return None


if __name__ == "__main__":
    main()
