"""Every stored episode of the published put-on-plate tasks: what its id means, how it looks, and ten actions of it.

The recordings are three episodes after another in one world per id and obj_set. PhysX remembers contacts over resets,
so that the second and third depend on what was played before: new worlds give most of them to the last bit, some within
6e-5, and ROLLING not at all, where a pepper rolls off the plate's edge. Played in the published layout, one after
another, all objects end where they did to the last bit.
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

ROLLING = "MultiCarrot-v1.test.2"
STATE_BOUND, PIXEL_BOUND, PIXEL_SHARE = 1e-4, 2, 0.99


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


@pytest.mark.parametrize("layout", ["ours", "published"])
def test_ten_actions(layout: str, listed, stored, assets, max_delta) -> None:
    """Ours is a new world per episode; published keeps one per id and obj_set, with everything in it."""
    from rlinf.simulators.maniskill.cpu.world import World

    worlds: dict[str, World] = {}
    for row in listed:
        key = row["key"]
        world = worlds.setdefault(
            key[:-2] if layout == "published" else "", (published_world if layout == "published" else World)(assets)
        )
        world.reset(episode(row["env_id"], row["obj_set"], row["episode_id"]))
        max_delta(f"{key}.obj0", world.object_pose, stored[f"{key}.obj0"], 0)
        max_delta(f"{key}.plate0", world.plate_pose, stored[f"{key}.plate0"], 0)
        max_delta(f"{key}.qpos0", world.arm.qpos, stored[f"{key}.qpos0"], 0)
        flags = [world.step(action) for action in stored[f"{key}.actions"]]
        assert np.array_equal(np.array(flags), stored[f"{key}.flags"]), key
        max_delta(f"{key}.qpos10", world.arm.qpos, stored[f"{key}.qpos10"], STATE_BOUND)
        if layout == "published" or key != ROLLING:
            max_delta(f"{key}.obj10", world.object_pose, stored[f"{key}.obj10"], STATE_BOUND)


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
