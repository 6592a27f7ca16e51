"""The WidowX-250S as a ManiSkill agent, with the published controller and camera."""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien
from mani_skill.agents.controllers import PDEEPoseControllerConfig, PDJointPosMimicControllerConfig
from mani_skill.agents.robots.widowx.widowx import WidowX250S
from mani_skill.sensors.camera import CameraConfig

from rlinf.simulators.maniskill import constants

CAMERA = "3rd_view_camera"


class WidowX(WidowX250S):
    """The same drives as `cpu.arm.Arm`; ManiSkill's controllers move them."""

    uid = "widowx250s_bridgedataset_flat_table"
    image_size = constants.NATIVE_SIZE  # height, width

    @property
    def _controller_configs(self) -> dict[str, Any]:
        target_pose = PDEEPoseControllerConfig(
            joint_names=self.arm_joint_names,
            pos_lower=-1.0,  # limits are of no effect: the action is not normalised
            pos_upper=1.0,
            stiffness=constants.STIFFNESS,
            damping=constants.DAMPING,
            force_limit=constants.FORCE_LIMIT,
            ee_link=constants.GRIPPER_LINK,
            urdf_path=self.urdf_path,
            normalize_action=False,
            use_target=True,
        )
        first, second = self.gripper_joint_names
        fingers = PDJointPosMimicControllerConfig(
            joint_names=[first, second],
            lower=constants.FINGER_CLOSED,
            upper=constants.FINGER_OPEN,
            stiffness=constants.FINGER_STIFFNESS,
            damping=constants.FINGER_DAMPING,
            force_limit=constants.FINGER_FORCE,
            mimic={first: {"joint": second}},
        )
        return {constants.CONTROL_MODE: {"arm": target_pose, "gripper": fingers}}

    @property
    def _sensor_configs(self) -> list[CameraConfig]:
        height, width = self.image_size
        pose, matrix = sapien.Pose(*constants.CAMERA), camera_matrix(self.image_size)
        return [
            CameraConfig(uid=CAMERA, pose=pose, width=width, height=height, intrinsic=matrix, entity_uid="base_link")
        ]


def camera_matrix(size: tuple[int, int]) -> np.ndarray:
    """The camera matrix [3, 3] at a height and width."""
    focal, centre = constants.lens(size)
    return np.array([[focal[0], 0, centre[0]], [0, focal[1], centre[1]], [0, 0, 1]])
