"""Our world beside ManiSkill's own physics, controller and grasp test: whole episodes, equal to the last bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.simulators.maniskill import Options, Scene
from rlinf.simulators.maniskill.tasks import PREFIX
from rlinf.simulators.opengl import choose_backend
from tests.envs.test_maniskill import BOTTLE, solve

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mani_skill") is None, reason="ManiSkill is not installed")
FLAGS = ("success", "is_src_obj_grasped", "consecutive_grasp", "src_on_target")


@pytest.mark.parametrize("reset_id", [BOTTLE, 579494])  # the second, a plant, is dropped beside the plate
def test_an_episode_with_a_grasp(reset_id: int, maniskill_path: Path) -> None:
    scene = Scene(Options(image_size=64))
    scene.reset(reset_id)
    actions, _ = solve(scene)
    last = scene.world.object_pose, scene.world.plate_pose, scene.world.arm.qpos
    scene.reset(reset_id)
    ours = [scene.world.step(action) for action in actions]

    choose_backend("auto")  # ManiSkill imports MuJoCo, which reads the choice once
    from rlinf.simulators.maniskill.gpu.registered import PutOnPlate

    theirs = PutOnPlate(
        task=PREFIX + "Main-v3", num_envs=1, obs_mode="none", sim_backend="physx_cpu", render_backend="cpu"
    )
    theirs.reset(options={"episode_id": torch.tensor([reset_id])})
    judged = [theirs.advance(torch.from_numpy(action)[None]) for action in actions]
    assert [[bool(j[name]) for name in FLAGS] for j in judged] == [list(map(bool, j)) for j in ours]
    assert any(j.is_src_obj_grasped for j in ours)
    object_, plate = (actor.pose.raw_pose[0].numpy() for actor in (theirs._object, theirs._plate))
    for a, b in zip(last, (object_, plate, theirs.agent.robot.get_qpos()[0].numpy()), strict=True):
        assert np.array_equal(a, b)
    theirs.close()
