"""The play table against recordings of calvin_env: states bit for bit, images pixel for pixel.

Blocks are loaded in the order red, blue, pink in every scene, as stored: that is upstream's own order in B and D, and
the corrected one in A and C. The stored starts are the published ones, which our default moves in B and C (`compat`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlinf.simulators.calvin import Options
from rlinf.simulators.calvin.starts import CHAIN_SLOT, ids_of, start_of


@pytest.fixture(scope="module")
def stored(golden_dir: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden_dir / "calvin_rollouts" / "rollouts.npz"))


@pytest.fixture(scope="module")
def world(calvin_path: Path):
    from rlinf.simulators.calvin.world import World

    made = World(calvin_path, Options(renderer="tiny"))
    yield made
    made.close()


@pytest.mark.parametrize("scene", "ABCD")
def test_rollout(scene: str, stored, world, max_delta) -> None:
    """One Bullet client plays the four scenes: what it did before does not matter."""
    own = {key.removeprefix(f"{scene}."): value for key, value in stored.items() if key.startswith(f"{scene}.")}
    world.reset(scene, own.pop("robot0"), own.pop("scene0"))
    max_delta(f"{scene}.static0", world.static_image(), own.pop("static0"), 0)
    max_delta(f"{scene}.gripper0", world.wrist_image(), own.pop("gripper0"), 0)
    robot, blocks = [], []
    for action in own.pop("actions"):
        world.step(action)
        robot.append(world.robot_obs())
        blocks.append(world.scene_obs())
    max_delta(f"{scene}.robot", np.array(robot), own.pop("robot"), 0)
    max_delta(f"{scene}.scene", np.array(blocks), own.pop("scene"), 0)
    max_delta(f"{scene}.static120", world.static_image(), own.pop("static120"), 0)
    max_delta(f"{scene}.gripper120", world.wrist_image(), own.pop("gripper120"), 0)
    assert not own


def test_starts_are_the_published_ones_in_compat_mode(stored, golden_dir: Path, max_delta) -> None:
    for row in json.loads((golden_dir / "calvin_rollouts" / "rollouts.json").read_text()):
        scene = row["scene"]
        assert row["block_order"] == ["block_red", "block_blue", "block_pink"]
        reset_id = ids_of(scene, [CHAIN_SLOT], range(1000))[row["sequence"]]
        published, ours = start_of(reset_id, compat=True), start_of(reset_id)
        max_delta(f"{scene}.robot0", published.robot_obs, stored[f"{scene}.robot0"], 0)
        max_delta(f"{scene}.scene0", published.scene_obs, stored[f"{scene}.scene0"], 0)
        assert np.array_equal(ours.scene_obs, published.scene_obs) == (scene in "AD")
