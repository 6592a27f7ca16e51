"""How well CALVIN's scripted expert does, judged by the benchmark: single tasks per scene, or the official chains.

    python tools/calvin_expert_table.py tasks --scenes ABCD --trials 4
    python tools/calvin_expert_table.py chains --scenes D --trials 125

Needs pybullet and CALVIN_PATH; draws nothing (about 350 control steps a second).
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

from rlinf.simulators.calvin import Expert, Options, Scene
from rlinf.simulators.calvin.starts import CHAIN_SLOT, ids_of
from rlinf.simulators.calvin.symbolic import CHAIN_LENGTH
from rlinf.simulators.calvin.tasks import TASKS

RL_STEPS = 480  # for a whole chain in training


def play(scene: Scene, reset_id: int) -> list[int]:
    """Control steps at which the tasks of an episode were solved."""
    scene.reset(reset_id)
    expert, solved_at, step = Expert(scene.options), [], 0
    while not scene.chain.over:
        step += 1
        if scene.step_chunk(expert.act(scene)[None], stop_on_success=True, record=False).rewards[0]:
            solved_at.append(step)
    return solved_at


def task_table(scenes: str, trials: int) -> None:
    """Solved / tried and mean steps of each task, a column per scene."""
    worlds = {letter: open_scene(letter) for letter in scenes}
    steps: dict[str, list[int]] = {letter: [] for letter in scenes}
    for slot, task in enumerate(TASKS):
        cells = []
        for letter, scene in worlds.items():
            done = [n for reset_id in ids_of(letter, [slot], range(trials)) for n in play(scene, reset_id)]
            steps[letter] += done
            cells.append(f"{len(done):3}/{trials} {np.mean(done) if done else np.nan:5.1f}")
        print(f"{task:24}", *cells, sep="  ", flush=True)
    tried = trials * len(TASKS)
    totals = [f"{letter}: {len(done)}/{tried} = {len(done) / tried:.1%}" for letter, done in steps.items()]
    print(*totals, f"mean steps {np.mean(np.concatenate(list(steps.values()))):.1f}", sep="; ")


def chain_table(scenes: str, trials: int) -> None:
    """Subtasks solved in the first official chains, and what ended the others."""
    for letter in scenes:
        scene, chains, ended = open_scene(letter), [], Counter[str]()
        for reset_id in ids_of(letter, [CHAIN_SLOT], range(trials)):
            chains.append(play(scene, reset_id))
            if scene.chain.failed:
                ended[scene.chain.task] += 1
        lengths = np.array([len(chain) for chain in chains])
        in_time = np.mean([sum(step <= RL_STEPS for step in chain) for chain in chains])
        share = " ".join(f"{np.mean(lengths >= n):.3f}" for n in range(1, CHAIN_LENGTH + 1))
        per_task = np.mean([step for chain in chains for step in np.diff([0, *chain])])
        print(f"{letter}: avg_num_subtasks {lengths.mean():.3f}, success_len_1..5 {share}")
        print(f"   {per_task:.1f} steps a subtask; avg_num_subtasks within {RL_STEPS} steps {in_time:.3f}")
        print(f"   chains ended by {dict(ended)}", flush=True)


def open_scene(letter: str) -> Scene:
    """A world that gives every task the benchmark's 360 steps."""
    return Scene(Options(task_suite_name=f"calvin_{letter.lower()}", protocol="official", renderer="tiny"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tasks", "chains"))
    parser.add_argument("--scenes", default="D", help="letters out of ABCD")
    parser.add_argument("--trials", type=int, default=4, help="per task and scene, or chains per scene")
    args = parser.parse_args()
    (task_table if args.what == "tasks" else chain_table)(args.scenes, args.trials)


if __name__ == "__main__":
    main()
