"""Every stored episode of the published put-on-plate tasks: what its id means, how it looks, and ten actions of it.

The recordings are three episodes after another in one world per id and obj_set. PhysX remembers contacts over resets,
so that the second and third depend on what was played before. Played in the published layout, one after another, all
objects end where they did to the last bit. Ours builds a new world for each episode, in which there is nothing to
remember: objects end where they end in a new world of the published layout, to the last bit, so that all that parts
them from the recordings is the forgotten contacts. Mostly that is nothing; an object that rolls may end elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.maniskill_env import published_world
from rlinf.simulators.maniskill.assets import Assets, find_assets
from rlinf.simulators.maniskill.constants import NATIVE_SIZE
from rlinf.simulators.maniskill.reset_ids import rows_of
from rlinf.simulators.maniskill.tasks import episode, variant

JOINT_BOUND = 1e-5  # rad; the targets of the arm's joints are rounded differently on other processors
PIXEL_BOUND, PIXEL_SHARE = 2, 0.99


@pytest.fixture(scope="module")
def listed(golden_dir: Path) -> list[dict[str, Any]]:
    return json.loads((golden_dir / "maniskill_episodes" / "episodes.json").read_text())


@pytest.fixture(scope="module")
def stored(golden_dir: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden_dir / "maniskill_episodes" / "episodes.npz"))


@pytest.fixture(scope="module")
def assets(maniskill_path: Path, listed: list[dict[str, Any]]) -> Assets:
    return find_assets([*{(row["env_id"], row["obj_set"]) for row in listed}, *rows_of("ood", "test")])


@pytest.fixture(scope="module")
def picture(assets: Assets) -> Callable[[Any, Any], np.ndarray]:
    from rlinf.simulators.maniskill.cpu.renderer import shared_renderer

    return shared_renderer(assets, NATIVE_SIZE, "minimal").picture


def test_every_key_is_compared(listed, stored) -> None:
    parts = ("obj0", "plate0", "qpos0", "image0", "actions", "flags", "obj10", "qpos10")
    assert {f"{row['key']}.{part}" for row in listed for part in parts} == set(stored)
    assert len(listed) == 45


def test_ids_mean_the_published_scenes(listed, stored, assets, max_delta) -> None:
    for row in listed:
        key, own = row["key"], episode(row["env_id"], row["obj_set"], row["episode_id"])
        object_, plate = assets.objects[own.object.index], assets.plates[own.plate.index]
        assert (object_.folder.name, plate.folder.name) == (row["object"], row["plate"]), key
        assert own.instruction(object_.name, plate.name) == row["instruction"], key
        assert variant(row["env_id"], row["obj_set"]).total == row["total"], key
        max_delta(f"{key}.obj0", np.float32(own.object.position + own.object.quaternion), stored[f"{key}.obj0"], 0)
        max_delta(f"{key}.plate0", np.float32(own.plate.position + own.plate.quaternion), stored[f"{key}.plate0"], 0)
        max_delta(f"{key}.qpos0", np.float32(own.qpos), stored[f"{key}.qpos0"], 0)


def play(world: Any, row: dict[str, Any], stored: dict[str, np.ndarray], max_delta: Callable[..., float]) -> Any:
    """The object's pose and the arm's joints after the stored actions; start and flags must be the stored ones."""
    key = row["key"]
    world.reset(episode(row["env_id"], row["obj_set"], row["episode_id"]))
    max_delta(f"{key}.obj0", world.object_pose, stored[f"{key}.obj0"], 0)
    max_delta(f"{key}.plate0", world.plate_pose, stored[f"{key}.plate0"], 0)
    max_delta(f"{key}.qpos0", world.arm.qpos, stored[f"{key}.qpos0"], 0)
    flags = [world.step(action) for action in stored[f"{key}.actions"]]
    assert np.array_equal(np.array(flags), stored[f"{key}.flags"]), key
    max_delta(f"{key}.qpos10", world.arm.qpos, stored[f"{key}.qpos10"], JOINT_BOUND)
    return np.array(world.object_pose), np.array(world.arm.qpos)


def test_ten_actions_in_the_published_layout(listed, stored, assets, max_delta) -> None:
    worlds: dict[str, Any] = {}
    for row in listed:
        name = row["key"].rpartition(".")[0]
        if name not in worlds:
            worlds[name] = published_world(assets)
        pose, _ = play(worlds[name], row, stored, max_delta)
        max_delta(f"{row['key']}.obj10", pose, stored[f"{row['key']}.obj10"], 0)


def test_ten_actions_in_a_new_world(listed, stored, assets, max_delta) -> None:
    """What no episode shows, behind the camera, changes nothing: only forgotten contacts part ours from the stored."""
    from rlinf.simulators.maniskill.cpu.world import World

    world = World(assets)
    for row in listed:
        pose, joints = play(world, row, stored, max_delta)
        published_pose, published_joints = play(published_world(assets), row, stored, max_delta)
        max_delta(f"{row['key']}.obj10 in a new world", pose, published_pose, 0)
        max_delta(f"{row['key']}.qpos10 in a new world", joints, published_joints, 0)


def test_pictures(listed, stored, assets, picture) -> None:
    from rlinf.simulators.maniskill.cpu.world import World

    world = World(assets)
    for row in listed:
        key = row["key"]
        world.reset(episode(row["env_id"], row["obj_set"], row["episode_id"]))
        ours = picture(world.view(), world.episode)[::2, ::2]
        away = np.abs(ours.astype(int) - stored[f"{key}.image0"]).max(-1)
        share = float((away <= PIXEL_BOUND).mean())
        print(f"{key}.image0: {share:.5f} of pixels within {PIXEL_BOUND}, max |Δ| = {away.max()}")
        assert share >= PIXEL_SHARE, key
