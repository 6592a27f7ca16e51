"""How CALVIN's scripted expert sees the table and moves the gripper: to points, shut, open, out of the way.

A move is a generator of actions f64 [7], one per control step; it looks at the world before each and ends when done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlinf.simulators.calvin.starts import GEOMETRY
from rlinf.simulators.calvin.suite import STEP_ANGLE, STEP_LENGTH
from rlinf.simulators.calvin.tasks import COLOURS
from rlinf.simulators.contract import Array

if TYPE_CHECKING:
    from rlinf.simulators.calvin.world import World

Moves = Iterator[Array]
Point = Array | Sequence[float]

OPEN, CLOSED = 1.0, -1.0
YAW = 1.5  # of the gripper at rest; its fingers then open along x
GAIN, GAIN_LIMIT, GAIN_REACH = 0.15, 0.05, 0.005  # integral part, against the steady error of the inverse kinematics
MAX_TURN_ERROR = 0.15  # rad
TABLE_Z, CRUISE_Z = 0.44, 0.57  # the table's top; where a gripper with a block passes over everything on it
WALL_Y = -0.03  # beyond it the gripper is at the slanted wall
HALF_WIDTH = 0.02  # of every block, and of its height
HALF_LENGTH = {"small": 0.02, "middle": 0.028, "big": 0.04}
HOLDING = (0.02, 0.035)  # fingers this far apart, and a block this near, are holding it
FINGER_ROOM = 0.055  # from the middle of an open gripper to the outside of its fingers
GRASP_SHIFT = 0.018  # how far off a block's middle closing fingers still take it
DRAWER_WALL = 0.04  # its thickness, with the margin of the box around the drawer


class Hand:
    """The gripper of one world: where it is, where the blocks are, and how it moves."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lean = 0.0  # of the gripper when it took the block it holds

    @property
    def position(self) -> Array:
        """Position f64 [3] of the fingertips, world frame, metres."""
        return self.world.robot_obs()[:3]

    @property
    def width(self) -> float:
        """Metres between the fingers."""
        return float(self.world.robot_obs()[6])

    def block(self, colour: str) -> Array:
        """Position f64 [3] of the middle of a block, world frame, metres."""
        return np.array(self.world.block_pose(colour)[0])

    def half_length(self, colour: str) -> float:
        """Half the long side of a block, metres."""
        return HALF_LENGTH[GEOMETRY[self.world.scene].sizes[COLOURS.index(colour)]]

    def block_axes(self, colour: str) -> Array:
        """A block's own axes as columns f64 [3, 3]; the first is the long one."""
        x, y, z, w = self.world.block_pose(colour)[1]
        return np.array(
            [
                [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
            ]
        )

    def half_extent(self, colour: str) -> Array:
        """How far a block reaches from its middle along x, y and z, f64 [3]."""
        return np.abs(self.block_axes(colour)) @ [self.half_length(colour), HALF_WIDTH, HALF_WIDTH]

    def grasp_yaw(self, colour: str) -> float:
        """The yaw nearest to rest at which the fingers close across a narrow side of a block."""
        axes, yaws = self.block_axes(colour), []
        for i, half in enumerate((self.half_length(colour), HALF_WIDTH, HALF_WIDTH)):
            if half <= HALF_WIDTH and abs(axes[2, i]) < 0.5:
                across = np.arctan2(axes[1, i], axes[0, i]) + np.pi / 2
                yaws.append(YAW + (across - YAW + np.pi / 2) % np.pi - np.pi / 2)
        return float(min(yaws, key=lambda yaw: abs(yaw - YAW), default=YAW))

    def grasp_point(self, colour: str) -> Array:
        """A block's middle, or a little beside it where a finger would come down on a drawer's wall or the button."""
        block = self.block(colour)
        low, high = -np.inf, np.inf
        if self.place(colour) == "drawer":
            low, high = self.drawer_room()
        else:
            near, far = self.world.link_box("button_link")
            if near[1] - 0.03 < block[1] < far[1] + 0.03:
                low, high = (far[0] + FINGER_ROOM, high) if block[0] > near[0] else (low, near[0] - FINGER_ROOM)
        block[0] += np.clip(np.clip(block[0], low, high) - block[0], -GRASP_SHIFT, GRASP_SHIFT)
        return block

    def drawer_room(self) -> tuple[float, float]:
        """The lowest and highest x at which an open gripper fits between the drawer's side walls."""
        low, high = self.world.link_box("drawer_link")
        return low[0] + DRAWER_WALL + FINGER_ROOM, high[0] - DRAWER_WALL - FINGER_ROOM

    def place(self, colour: str) -> str:
        """Where a block is: table (or over it), cabinet, drawer."""
        _, y, z = self.block(colour)
        return "cabinet" if y > 0.02 else "drawer" if z < TABLE_Z - 0.03 else "table"

    def blocks_in(self, place: str, *, but: str | None = None) -> dict[str, Array]:
        """The blocks at a place, without the one in the hand."""
        return {colour: self.block(colour) for colour in COLOURS if colour != but and self.place(colour) == place}

    def held(self) -> str | None:
        """Colour of the block between the closed fingers; None where there is none."""
        least, most = HOLDING
        here = self.position
        distance = {colour: float(np.linalg.norm(self.block(colour) - here)) for colour in COLOURS}
        nearest = min(distance, key=distance.__getitem__)
        return nearest if self.world.gripper < 0 and self.width > least and distance[nearest] < most else None

    def middle(self, link: str) -> Array:
        """Middle f64 [3] of the box around a part of the table."""
        low, high = self.world.link_box(link)
        return (low + high) / 2

    def go(
        self,
        point: Point,
        grip: float,
        *,
        yaw: float = YAW,
        lean: float = 0.0,
        euler: Array | None = None,
        speed: float = 1.0,
        near: float = 0.012,
        limit: int = 40,
        until: Callable[[], bool] = lambda: False,
    ) -> Moves:
        """Move in a line to a point until within `near` metres of it, or until `until()`; at most `limit` steps.

        The gripper points down; `lean` swings its fingertips forward, to where `yaw` points. `euler` says both.
        """
        point = np.asarray(point, np.float64)
        euler = np.array([np.pi, -lean, yaw]) if euler is None else euler
        correction = np.zeros(3)
        for _ in range(limit):
            seen = self.world.robot_obs()
            error = point - seen[:3]
            arrived = np.linalg.norm(error) < near and np.abs(wrap(euler - seen[3:6])).max() < MAX_TURN_ERROR
            if arrived or until():
                return
            if np.linalg.norm(point + correction - self.world.target_position) < GAIN_REACH:
                correction = np.clip(correction + GAIN * error, -GAIN_LIMIT, GAIN_LIMIT)
            move = (point + correction - self.world.target_position) / STEP_LENGTH
            move *= min(1.0, speed / max(np.abs(move).max(), 1e-9))
            turn = np.clip(wrap(euler - self.world.target_euler) / STEP_ANGLE, -1, 1)
            yield np.array([*move, *turn, grip])

    def stay(self, steps: int, grip: float) -> Moves:
        """Keep the commanded pose for some steps."""
        for _ in range(steps):
            yield np.array([0, 0, 0, 0, 0, 0, grip])

    def close(self) -> Moves:
        """Shut the fingers and wait until they stop."""
        for step in range(10):
            before = self.width
            yield from self.stay(1, CLOSED)
            if step > 1 and abs(self.width - before) < 5e-4:
                return

    def release(self) -> Moves:
        """Open wide enough to leave a block where it is."""
        for _ in range(8):
            if self.width > 2 * HALF_WIDTH + 0.02:
                return
            yield from self.stay(1, OPEN)

    def withdraw(self, grip: float) -> Moves:
        """Back from the wall, then up: from there every point over the table is free to reach in a line."""
        euler = self.world.target_euler.copy()
        here = self.position
        if here[1] > WALL_Y:
            here[1], here[2] = -0.09, max(here[2] + 0.03, 0.54)
            yield from self.go(here, grip, euler=euler, near=0.03, limit=25)
        if here[2] < CRUISE_Z - 0.03:
            here[2] = CRUISE_Z
            yield from self.go(here, grip, euler=euler, near=0.03, limit=25)


def free_spot(low: float, high: float, blocked: list[float]) -> float:
    """The x between `low` and `high` farthest from the `blocked` ones; of equals, the one nearest to the middle."""
    spots = np.linspace(low, high, 15)
    room = np.min([np.minimum(np.abs(spots - x), 0.1) for x in [*blocked, np.inf]], axis=0)
    return float(spots[np.argmax(room - 0.01 * np.abs(spots - (low + high) / 2))])


def wrap(angle: Array) -> Array:
    """The same angle in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi
