"""The WidowX-250S as a ManiSkill agent, with the published controller and camera."""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien
from mani_skill.agents.controllers import PDEEPoseControllerConfig, PDJointPosMimicControllerConfig
from mani_skill.agents.robots.widowx.widowx import WidowX250S
from mani_skill.sensors.camera import CameraConfig

from rlinf.simulators.maniskill import arm, studio

CONTROL_MODE = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
CAMERA = "3rd_view_camera"


class WidowX(WidowX250S):
    """The same drives as `arm.Arm`; ManiSkill's controllers move them."""

    uid = "widowx250s_bridgedataset_flat_table"
    image_size = studio.NATIVE_SIZE  # height, width

    @property
    def _controller_configs(self) -> dict[str, Any]:
        target_pose = PDEEPoseControllerConfig(
            joint_names=self.arm_joint_names,
            pos_lower=-1.0,  # limits are of no effect: the action is not normalised
            pos_upper=1.0,
            stiffness=arm.STIFFNESS,
            damping=arm.DAMPING,
            force_limit=arm.FORCE_LIMIT,
            ee_link=arm.GRIPPER_LINK,
            urdf_path=self.urdf_path,
            normalize_action=False,
            use_target=True,
        )
        first, second = self.gripper_joint_names
        fingers = PDJointPosMimicControllerConfig(
            joint_names=[first, second],
            lower=arm.FINGER_CLOSED,
            upper=arm.FINGER_OPEN,
            stiffness=arm.FINGER_STIFFNESS,
            damping=arm.FINGER_DAMPING,
            force_limit=arm.FINGER_FORCE,
            mimic={first: {"joint": second}},
        )
        return {CONTROL_MODE: {"arm": target_pose, "gripper": fingers}}

    @property
    def _sensor_configs(self) -> list[CameraConfig]:
        height, width = self.image_size
        return [
            CameraConfig(
                uid=CAMERA,
                pose=sapien.Pose(*studio.CAMERA),
                width=width,
                height=height,
                intrinsic=intrinsic(self.image_size),
                entity_uid="base_link",
            )
        ]


def intrinsic(size: tuple[int, int]) -> np.ndarray:
    """The camera matrix at a height and width: the field of view is always the same."""
    down, across = size[0] / studio.NATIVE_SIZE[0], size[1] / studio.NATIVE_SIZE[1]
    (x, y), focal = studio.CENTRE, studio.FOCAL
    return np.array([[focal * across, 0, x * across], [0, focal * down, y * down], [0, 0, 1]])
