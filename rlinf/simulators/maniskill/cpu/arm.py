"""The WidowX-250S and its controller: actions move a target pose, the arm follows it. Imports SAPIEN.

An action is a translation in metres along the axes of the robot's base, three Euler angles in radians about them, and
the gripper, -1 closed to 1 open. The base looks along -x of the world.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sapien
from sapien.wrapper.pinocchio_model import PinocchioModel

from rlinf.simulators.contract import Array
from rlinf.simulators.maniskill import constants

FINGER_DRIVES = [(constants.FINGER_STIFFNESS, constants.FINGER_DAMPING, constants.FINGER_FORCE)] * 2
ARM_JOINTS, IK_ITERATIONS = 6, 100


class Arm:
    """The controller of one loaded robot."""

    def __init__(self, robot: Any, urdf: Path) -> None:
        self.robot = robot
        self.links = {link.name: link for link in robot.links}
        self._joints = robot.active_joints
        names = [joint.name for joint in self._joints], list(self.links)
        self._solver = _solver(urdf, *map(tuple, names))
        self._gripper_index = names[1].index(constants.GRIPPER_LINK)
        self._arm_only = np.arange(len(self._joints)) < ARM_JOINTS
        drives = zip(constants.STIFFNESS, constants.DAMPING, constants.FORCE_LIMIT, strict=True)
        for joint, (stiffness, damping, force) in zip(self._joints, [*drives, *FINGER_DRIVES], strict=True):
            joint.set_drive_properties(stiffness, damping, force_limit=force, mode="force")
            joint.set_friction(0.0)
        for link in robot.links:
            link.disable_gravity = True

    def place(self, qpos: tuple[float, ...]) -> None:
        """Stand still at `qpos` (6 arm joints, 2 fingers); the target is where the gripper is."""
        robot = self.robot
        robot.set_pose(sapien.Pose(constants.BASE_POSITION, constants.BASE_QUATERNION))
        robot.set_qpos(np.array(qpos, np.float32))
        robot.set_qvel(np.zeros(len(qpos), np.float32))
        robot.set_qf(np.zeros(len(qpos), np.float32))
        base, hand = robot.root_pose, self.gripper
        home = conjugate(base.q)
        self.target = sapien.Pose(rotate(home, -base.p) + rotate(home, hand.p), multiply(home, hand.q))

    @property
    def gripper(self) -> Any:
        """Pose of the point between the fingers, in the world frame."""
        return self.links[constants.GRIPPER_LINK].entity_pose

    @property
    def qpos(self) -> Array:
        """Arm joints (rad) and fingers (m), f32 [8]."""
        return self.robot.get_qpos()

    def command(self, action: Array) -> None:
        """Move the target by the action f32 [7] and drive the joints to where it is reached.

        A target out of reach is kept and the arm waits where it is, as published. Single precision is part of being
        equal: what rolls or topples shows the last bit.
        """
        self.target = sapien.Pose(self.target.p + action[:3], multiply(from_euler(action[3:6]), self.target.q))
        qpos = self.qpos
        found, reached, _ = self._solver.compute_inverse_kinematics(
            self._gripper_index,
            self.target,
            initial_qpos=qpos,
            active_qmask=self._arm_only,
            max_iterations=IK_ITERATIONS,
        )
        low, high, half = np.float32(constants.FINGER_CLOSED), np.float32(constants.FINGER_OPEN), np.float32(0.5)
        goal = np.full(len(qpos), half * (high + low) + half * (high - low) * np.clip(action[6], -1, 1))
        goal[:ARM_JOINTS] = (found if reached else qpos)[:ARM_JOINTS]
        for joint, value in zip(self._joints, goal, strict=True):
            joint.set_drive_target(float(value))


@cache
def _solver(urdf: Path, joints: tuple[str, ...], links: tuple[str, ...]) -> Any:
    """The robot's kinematics, read once per process."""
    solver = PinocchioModel(urdf.read_text(encoding="utf-8"), [0, 0, -9.81])
    solver.set_joint_order(list(joints))
    solver.set_link_order(list(links))
    return solver


def multiply(a: Array, b: Array) -> Array:
    """Rotation a after b as a quaternion w x y z with w >= 0."""
    product = _product(a, b)
    return -product if product[0] < 0 else product


def rotate(quaternion: Array, point: Array) -> Array:
    """The point [3] turned by the quaternion."""
    return _product(_product(quaternion, np.append(np.float32(0), point)), conjugate(quaternion))[1:]


def conjugate(quaternion: Array) -> Array:
    """The inverse of a unit quaternion w x y z."""
    return quaternion * np.array([1, -1, -1, -1], quaternion.dtype)


def from_euler(angles: Array) -> Array:
    """Quaternion of turning about x, then the new y, then the new z; through matrices, as ManiSkill rounds."""
    (cx, cy, cz), (sx, sy, sz) = np.cos(angles), np.sin(angles)
    a, b = sx * sy, -cx * sy
    m = np.array(
        [
            [cy * cz, -cy * sz, sy],
            [a * cz + cx * sz, cx * cz - a * sz, -sx * cy],
            [b * cz + sx * sz, sx * cz - b * sz, cx * cy],
        ]
    )
    one = angles.dtype.type(1)
    squares = [one + m[0, 0] + m[1, 1] + m[2, 2], *(one + 2 * m[i, i] - m[0, 0] - m[1, 1] - m[2, 2] for i in range(3))]
    twice = np.sqrt(np.maximum(np.array(squares), 0))  # w x y z, each without its sign
    largest = int(np.argmax(twice))
    x, y, z = m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]  # 4w times each
    xy, xz, yz = m[1, 0] + m[0, 1], m[0, 2] + m[2, 0], m[2, 1] + m[1, 2]
    rows = ((0, x, y, z), (x, 0, xy, xz), (y, xy, 0, yz), (z, xz, yz, 0))
    row = np.array(rows[largest], angles.dtype)
    row[largest] = twice[largest] ** 2
    found = row / (2 * twice[largest])
    return -found if found[0] < 0 else found


def _product(a: Array, b: Array) -> Array:
    """The Hamilton product of two quaternions w x y z."""
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return np.array(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ],
        a.dtype,
    )
