"""Puts the object on the plate by script, looking at the simulator before every action. numpy only.

The hand comes from above, turned as grasps.py says, closes, lifts, carries and lowers; when the object is not where the
plan has it - it rolled, slipped, was pushed or put elsewhere - it begins anew. The judge alone says what success is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.simulators.contract import Array
from rlinf.simulators.maniskill import constants
from rlinf.simulators.maniskill.grasps import GAP, TABLE_Z, TIP, find_grasp, surface
from rlinf.simulators.maniskill.suite import Options
from rlinf.simulators.maniskill.tasks import BodyKey

if TYPE_CHECKING:
    from rlinf.simulators.maniskill.cpu.world import World
    from rlinf.simulators.maniskill.scene import Scene

Moves = Iterator[Array]

OPEN, CLOSED = 1.0, -1.0
MAX_MOVE, MAX_TURN = 0.03, 0.25  # m and rad of an action
ALIGNED = 0.12  # rad off the wanted turn
HOVER, LIFT, CLEAR = 0.06, 0.07, 0.03  # m above a grasp before and after it; of the object above the plate
PRESS = 0.005  # m further down than where the object touches the plate
MOVED, TURNED = 0.006, 0.1  # m and rad by which the object leaves a plan behind
CLOSING_STEPS, LOST = 5, 0.09  # LOST: m between the hand and what it has dropped
BASE_POSITION = np.array(constants.BASE_POSITION)
FLIP = np.array([-1.0, -1.0, 1.0])  # the base looks backwards: from its axes to the world's and back
UP = np.array([0.0, 0.0, 1.0])


class Expert:
    """Plays one episode, one action after each look at the world."""

    def __init__(self, options: Options) -> None:
        self._moves: Moves | None = None

    def act(self, sim: Scene) -> Array:
        """One action f32 [7]; of the scene, only its world is looked at."""
        if self._moves is None:
            self._moves = play(Hand(sim.world))
        return next(self._moves).astype(np.float32)


class Hand:
    """The gripper of one world: where it is, where object and plate are, and how it moves."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def position(self) -> Array:
        """Position f64 [3] of the point between the fingers, world frame, metres."""
        return self.world.gripper_pose[:3].astype(np.float64)

    @property
    def yaw(self) -> float:
        """Radians by which the line between the fingers is turned about the vertical."""
        line = matrix(self.world.gripper_pose[3:])[:, 1]
        return float(np.arctan2(line[1], line[0]))

    @property
    def holds(self) -> bool:
        """Whether both fingers press on the object."""
        return self.world.judge.grasped_steps > 0

    def points(self) -> Array:
        """The object's surface, f64 [N, 3]."""
        return self._surface(self.world.object_key)

    def plate_points(self) -> Array:
        """The plate's surface, f64 [N, 3]."""
        return self._surface(self.world.plate_key)

    def other_points(self) -> Array:
        """The surfaces of everything on the table but the object, f64 [M, 3]."""
        others = [key for key in self.world.view().bodies if key != self.world.object_key]
        return np.concatenate([self._surface(key) for key in others])

    def _surface(self, key: BodyKey) -> Array:
        """Points f64 [N, 3] on a body where it is now, world frame, metres."""
        pose = self.world.view().bodies[key]
        return surface(self.world.assets.model(key).collision) @ matrix(pose.q).T + pose.p

    def towards(self, point: Array, yaw: float, grip: float, *, speed: float = 1.0) -> Array:
        """The action f64 [7] that brings the target nearer to a point and turn, the hand pointing down."""
        target = self.world.arm.target  # in the base's frame
        move = FLIP * (point - BASE_POSITION) - target.p
        move *= min(1.0, speed * MAX_MOVE / max(float(np.linalg.norm(move)), 1e-9))
        line = np.array([np.cos(yaw), np.sin(yaw), 0.0])
        wanted = FLIP[:, None] * np.stack([-UP, line, np.cross(-UP, line)], axis=1)
        turn = rotation_vector(wanted @ matrix(target.q).T)
        turn *= min(1.0, MAX_TURN / max(float(np.linalg.norm(turn)), 1e-9))
        return np.array([*move, *euler(rotation(turn)), grip])

    def go(
        self,
        point: Callable[[], Array],
        yaw: float,
        grip: float,
        *,
        near: float,
        limit: int,
        speed: float = 1.0,
        until: Callable[[], bool] = lambda: False,
    ) -> Moves:
        """Move to `point()` and turn to `yaw` until within `near` metres, or until `until()`; at most `limit` steps."""
        for _ in range(limit):
            there = point()
            turned = abs(np.sin(self.yaw - yaw)) < ALIGNED
            if until() or (turned and np.linalg.norm(there - self.position) < near):
                return
            yield self.towards(there, yaw, grip, speed=speed)


def play(hand: Hand) -> Moves:
    """Take the object and put it on the plate, again and again until the episode is over."""
    while True:
        judged = hand.world.judge.judgement
        if judged.success and judged.is_src_obj_grasped:
            yield from let_go(hand)
        elif (yield from take(hand)):
            yield from put(hand)


def take(hand: Hand) -> Generator[Array, None, bool]:
    """Grasp and lift the object; returns whether it is in the hand."""
    world = hand.world
    grasp, seen = find_grasp(hand.points(), hand.other_points(), hand.yaw), world.object_pose.copy()

    def moved() -> bool:
        now = world.object_pose
        turned = 2 * np.arccos(min(1.0, abs(float(now[3:] @ seen[3:]))))
        return bool(np.linalg.norm(now[:3] - seen[:3]) > MOVED or turned > TURNED)

    over = grasp.position + HOVER * UP
    away = over - hand.position
    if away[2] > 0.02 and np.linalg.norm(away[:2]) > 0.02:  # do not sweep the table
        here = hand.position + away[2] * UP
        yield from hand.go(lambda: here, hand.yaw, OPEN, near=0.03, limit=8)
    yield from hand.go(lambda: over, grasp.yaw, OPEN, near=0.012, limit=25, until=moved)
    if moved():
        return False
    yield from hand.go(lambda: grasp.position, grasp.yaw, OPEN, near=0.004, limit=8, until=moved)
    for _ in range(CLOSING_STEPS):
        yield hand.towards(grasp.position, grasp.yaw, CLOSED)
        if world.judge.grasped_steps > 1:
            break
    up = grasp.position + LIFT * UP
    yield from hand.go(lambda: up, grasp.yaw, CLOSED, near=0.02, limit=8, until=lambda: not hand.holds)
    return hand.holds


def put(hand: Hand) -> Moves:
    """Carry the object over the plate and lower it until it lies there."""
    world, yaw = hand.world, hand.yaw

    def over() -> bool:
        lost = np.linalg.norm(world.object_pose[:3] - hand.position) > LOST
        return bool(lost or world.judge.judgement.success)

    def above(height: float) -> Array:
        """Where the hand is when the middle of what it holds is this high above that of the plate."""
        points, plate = hand.points(), hand.plate_points()
        off = (plate.min(0) + plate.max(0) - points.min(0) - points.max(0)) / 2
        off[2] = plate[:, 2].max() + height - points[:, 2].min()
        goal = hand.position + off
        goal[2] = max(goal[2], TABLE_Z + TIP + GAP)
        return goal

    yield from hand.go(lambda: above(CLEAR), yaw, CLOSED, near=0.02, limit=20, until=over)
    yield from hand.go(lambda: above(-PRESS), yaw, CLOSED, near=0.003, limit=10, speed=0.7, until=over)
    yield from let_go(hand)


def let_go(hand: Hand) -> Moves:
    """Open the fingers and go up."""
    here, yaw = hand.position, hand.yaw
    for height in (0.0, 0.0, 0.0, HOVER, HOVER, HOVER):
        yield hand.towards(here + height * UP, yaw, OPEN)


def matrix(quaternion: Any) -> Array:
    """Rotation f64 [3, 3] of a quaternion w x y z."""
    w, x, y, z = np.asarray(quaternion, np.float64) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def rotation_vector(turn: Array) -> Array:
    """Axis times angle [3] of a rotation [3, 3]."""
    axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]) / 2
    sine = float(np.linalg.norm(axis))
    angle = np.arctan2(sine, (np.trace(turn) - 1) / 2)
    return axis * (angle / sine if sine > 1e-9 else 1.0)


def rotation(vector: Array) -> Array:
    """The rotation [3, 3] about an axis times angle [3]."""
    angle = float(np.linalg.norm(vector))
    axis = vector / max(angle, 1e-12)
    return matrix(np.array([np.cos(angle / 2), *np.sin(angle / 2) * axis]))


def euler(turn: Array) -> Array:
    """Angles about x, then the new y, then the new z."""
    about_y = np.arcsin(np.clip(turn[0, 2], -1, 1))
    return np.array([np.arctan2(-turn[1, 2], turn[2, 2]), about_y, np.arctan2(-turn[0, 1], turn[0, 0])])
