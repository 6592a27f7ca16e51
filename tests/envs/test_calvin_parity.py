"""Beside the published simulator: runs where calvin_env (main branch, with its conf/ and data/) can be imported.

Random actions with a downward drift, so that the arm touches table and blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.simulators.calvin import Options
from rlinf.simulators.calvin.starts import CHAIN_SLOT, Start, ids_of, start_of
from rlinf.simulators.calvin.tasks import TASKS, solved

pytest.importorskip("calvin_env.envs", reason="calvin_env is not installed beside the project")

STEPS = 200
BLOCK_ORDER = ("block_red", "block_blue", "block_pink")  # the published files of A and C list them otherwise


@pytest.fixture(scope="module")
def checkout() -> Path:
    import calvin_env

    assert calvin_env.__file__ is not None
    return Path(calvin_env.__file__).parents[1]


def published_env(checkout: Path, scene: str) -> Any:
    """The published environment with both cameras and TinyRenderer, from its own config files."""
    import hydra
    from omegaconf import OmegaConf

    def read(name: str) -> Any:
        return OmegaConf.load(checkout / "conf" / f"{name}.yaml")

    robot = OmegaConf.merge(read("robot/panda"), read("robot/panda_longer_finger"))
    del robot["defaults"]
    table = read(f"scene/calvin_scene_{scene}")
    blocks = table.objects.movable_objects
    table.objects.movable_objects = {name: blocks[name] for name in BLOCK_ORDER}
    cfg = OmegaConf.create(
        {
            "data_path": str(checkout / "data"),
            "use_vr": False,
            "robot": robot,
            "scene": table,
            "cameras": {"static": read("cameras/cameras/static"), "gripper": read("cameras/cameras/gripper")},
            "env": read("env/play_table_env"),
        }
    )
    cfg.env.use_egl, cfg.env.use_scene_info = False, True
    return hydra.utils.instantiate(cfg.env)


@pytest.mark.parametrize("scene", "ABCD")
def test_states_images_and_judgement_are_the_published_ones(scene: str, checkout: Path, calvin_path: Path) -> None:
    from calvin_env.envs.tasks import Tasks
    from omegaconf import OmegaConf

    from rlinf.simulators.calvin.world import World

    oracle = Tasks(OmegaConf.load(calvin_path / "tasks/new_playtable_tasks.yaml").tasks)
    theirs, ours = published_env(checkout, scene), World(calvin_path, Options(renderer="tiny"))
    start = start_of(ids_of(scene, [CHAIN_SLOT], range(1000))[17], compat=True)
    cameras, theirs.get_camera_obs = theirs.get_camera_obs, lambda: ({}, {})
    theirs.reset(robot_obs=start.robot_obs, scene_obs=start.scene_obs)
    ours.reset(scene, start.robot_obs, start.scene_obs)
    before, facts_before = theirs.get_info(), ours.facts()
    rng, action = np.random.default_rng(ord(scene)), np.zeros(7)
    touched, verdicts = 0, set()
    for i in range(STEPS):
        if i % 8 == 0:
            action = np.append(rng.uniform(-1, 1, 6) - (0, 0, 0.3, 0, 0, 0), rng.choice([-1.0, 1.0]))
        obs, _, _, info = theirs.step(action.copy())
        ours.step(action)
        assert np.array_equal(ours.robot_obs(), obs["robot_obs"]), f"step {i}"
        assert np.array_equal(ours.scene_obs(), obs["scene_obs"]), f"step {i}"
        facts = ours.facts()
        done = oracle.get_task_info(before, info)
        assert {task for task in TASKS if solved(task, facts_before, facts)} == done, f"step {i}"
        touched += bool(facts.robot_touches)
        verdicts |= done
    pictures, _ = cameras()
    assert np.array_equal(ours.static_image(), pictures["rgb_static"])
    assert np.array_equal(ours.wrist_image(), pictures["rgb_gripper"])
    moved = np.abs(ours.scene_obs() - start.scene_obs).max()
    print(f"{scene}: {STEPS} steps, {touched} in contact, largest motion {moved:.3f}, judged done: {sorted(verdicts)}")
    assert touched > 10
    close(ours, theirs)


def close(ours: Any, theirs: Any) -> None:
    ours.close()
    theirs.close()
    theirs.ownsPhysicsClient = False  # it would close again when collected


def test_judgement_between_any_two_situations(checkout: Path, calvin_path: Path) -> None:
    """Start of every task against start of every other: among them blocks turned, moved, lifted, stacked, put away."""
    from calvin_env.envs.tasks import Tasks
    from omegaconf import OmegaConf

    from rlinf.simulators.calvin.world import World

    oracle = Tasks(OmegaConf.load(calvin_path / "tasks/new_playtable_tasks.yaml").tasks)
    theirs, ours = published_env(checkout, "D"), World(calvin_path, Options(render="fast", renderer="tiny"))
    theirs.get_camera_obs = lambda: ({}, {})

    def look(start: Start) -> tuple[Any, Any]:
        theirs.reset(robot_obs=start.robot_obs, scene_obs=start.scene_obs)
        ours.reset("D", start.robot_obs, start.scene_obs)
        for _ in range(start.settle_steps):
            still = np.array([0, 0, 0, 0, 0, 0, start.gripper])
            theirs.step(still)
            ours.step(still)
        return theirs.get_info(), ours.facts()

    looks = []
    for number in range(2 * len(TASKS)):
        start = start_of(ids_of("D", [number % len(TASKS)], range(500))[number])
        if start.gripper > 0:
            start.scene_obs[[11, 17, 23]] += 1.3 * (number % 3 - 1)  # yaw, so that some pairs are rotations
        looks.append(look(start))
    seen: set[str] = set()
    for before, facts_before in looks:
        for info, facts in looks:
            done = oracle.get_task_info(before, info)
            assert {task for task in TASKS if solved(task, facts_before, facts)} == done
            seen |= done
    print(f"{len(looks) ** 2} pairs, {len(seen)} tasks among them; never: {sorted(set(TASKS) - seen)}")
    assert seen == set(TASKS)
    close(ours, theirs)
