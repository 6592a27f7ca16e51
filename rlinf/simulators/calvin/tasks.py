"""The 34 tasks and the judge, which tells from the facts of two moments whether a task was done between them.

The thresholds are those of the benchmark's task file (tests compare them with the user's copy), and so are its quirks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from rlinf.errors import did_you_mean
from rlinf.simulators.contract import Array

COLOURS = ("red", "blue", "pink")
MAX_ROTATION, MAX_TILT, MAX_SHIFT = 180.0, 30.0, 0.1  # rotating: degrees, degrees about x and y, metres moved
MAX_SPEED = 1.0  # (un)stacking: m/s and rad/s, per axis
Contact = tuple[int, int]  # body, link


@dataclass(frozen=True)
class Block:
    """A block at one moment, in the world frame, metres and seconds."""

    body: int
    position: Array  # f64 [3]
    orientation: Array  # f64 [4] quaternion xyzw
    linear_velocity: Array  # f64 [3]
    angular_velocity: Array  # f64 [3]
    contacts: frozenset[Contact]  # what touches it

    @cached_property
    def touching(self) -> frozenset[int]:
        """The bodies that touch it."""
        return frozenset(body for body, _ in self.contacts)

    @property
    def slow(self) -> bool:
        """Whether it moves and turns slower than MAX_SPEED."""
        return bool(np.all(np.abs([*self.linear_velocity, *self.angular_velocity]) < MAX_SPEED))


@dataclass(frozen=True)
class Facts:
    """What the judge looks at: everything of one moment that some task is about."""

    blocks: Mapping[str, Block]  # by colour
    robot: int  # body
    robot_touches: frozenset[int]  # bodies
    table_links: Mapping[str, Contact]  # base_link, plank_link (cabinet floor), drawer_link, ...
    doors: Mapping[str, float]  # joint positions: slide, drawer
    lights: Mapping[str, int]  # lightbulb, led: 0 or 1
    levers: Mapping[str, float]  # by light, where its lever or button is: 0 at rest, 1 where the light changes

    def block_named(self, body: int) -> Block | None:
        """The block with this body, if it is one."""
        return next((b for b in self.blocks.values() if b.body == body), None)

    @property
    def block_bodies(self) -> frozenset[int]:
        """The bodies of the three blocks."""
        return frozenset(b.body for b in self.blocks.values())


Judge = Callable[[Facts, Facts], bool]  # start, now


def rotated(start: Facts, now: Facts, *, colour: str, degrees: float) -> bool:
    """A block turned about the vertical by more than `degrees` (left is positive), hardly tilting, moving or rising."""
    before, after = start.blocks[colour], now.blocks[colour]
    if np.linalg.norm(after.position - before.position) > MAX_SHIFT or not after.touching - {now.robot}:
        return False
    x, y, z = rotation_between(before.orientation, after.orientation)
    turned = degrees < z < MAX_ROTATION if degrees > 0 else degrees > z > -MAX_ROTATION
    return bool(turned and abs(x) < MAX_TILT and abs(y) < MAX_TILT)


def pushed(start: Facts, now: Facts, *, colour: str, distance: float) -> bool:
    """A block moved along x by more than `distance` (right is positive), still on everything it lay on."""
    before, after = start.blocks[colour], now.blocks[colour]
    below, below_now = ({c for c in b.contacts if c[0] != start.robot} for b in (before, after))
    if not below or not below <= below_now:
        return False
    moved = float(after.position[0] - before.position[0])
    return moved > distance if distance > 0 else moved < distance


def lifted(start: Facts, now: Facts, *, colour: str, height: float, link: str) -> bool:
    """A block was raised off a part of the table by more than `height`, and touched by the robot alone."""
    before, after = start.blocks[colour], now.blocks[colour]
    return bool(
        after.position[2] - before.position[2] > height
        and after.touching == {now.robot}
        and start.table_links[link] in before.contacts
    )


def placed(start: Facts, now: Facts, *, link: str) -> bool:
    """The block that only the robot held, and that was all it touched, is let go and lies on a part of the table."""
    if len(start.robot_touches) != 1:
        return False
    (body,) = start.robot_touches
    before, after = start.block_named(body), now.block_named(body)
    if before is None or after is None or body in now.robot_touches:
        return False
    return before.touching == {start.robot} and now.table_links[link] in after.contacts


def pushed_into(start: Facts, now: Facts, *, source: str, target: str) -> bool:
    """Some block that lay on `source` alone touches `target`. The robot may touch it then: the benchmark's own check
    for that compares a body with (body, link) pairs and never fires."""
    return any(
        before.contacts == {start.table_links[source]} and now.table_links[target] in now.blocks[colour].contacts
        for colour, before in start.blocks.items()
    )


def door_moved(start: Facts, now: Facts, *, door: str, distance: float) -> bool:
    """A joint moved by more than `distance`, in its direction."""
    moved = now.doors[door] - start.doors[door]
    return moved > distance if distance > 0 else moved < distance


def light_turned(start: Facts, now: Facts, *, light: str, on: int) -> bool:
    """A light changed to `on`."""
    return start.lights[light] == 1 - on and now.lights[light] == on


def stacked(start: Facts, now: Facts) -> bool:
    """A block that touched no block lies on blocks alone, hardly moving."""
    blocks = now.block_bodies
    return any(
        not before.touching & blocks and after.touching & blocks and not after.touching - blocks and after.slow
        for before, after in ((start.blocks[c], now.blocks[c]) for c in start.blocks)
    )


def unstacked(start: Facts, now: Facts) -> bool:
    """A block that lay on blocks alone, hardly moving, touches none."""
    blocks = now.block_bodies
    return any(
        before.touching & blocks and not before.touching - blocks and before.slow and not after.touching & blocks
        for before, after in ((start.blocks[c], now.blocks[c]) for c in start.blocks)
    )


def _table() -> dict[str, Judge]:
    """Every task's judge, in the benchmark's order (evaluation sequences number tasks by it)."""
    made: dict[str, Judge] = {}
    for colour in COLOURS:
        made[f"rotate_{colour}_block_right"] = partial(rotated, colour=colour, degrees=-60)
        made[f"rotate_{colour}_block_left"] = partial(rotated, colour=colour, degrees=60)
    for colour in COLOURS:
        made[f"push_{colour}_block_right"] = partial(pushed, colour=colour, distance=0.1)
        made[f"push_{colour}_block_left"] = partial(pushed, colour=colour, distance=-0.1)
    made["move_slider_left"] = partial(door_moved, door="slide", distance=0.15)
    made["move_slider_right"] = partial(door_moved, door="slide", distance=-0.15)
    made["open_drawer"] = partial(door_moved, door="drawer", distance=0.12)
    made["close_drawer"] = partial(door_moved, door="drawer", distance=-0.12)
    for colour in COLOURS:
        made[f"lift_{colour}_block_table"] = partial(lifted, colour=colour, height=0.05, link="base_link")
        made[f"lift_{colour}_block_slider"] = partial(lifted, colour=colour, height=0.03, link="plank_link")
        made[f"lift_{colour}_block_drawer"] = partial(lifted, colour=colour, height=0.05, link="drawer_link")
    made["place_in_slider"] = partial(placed, link="plank_link")
    made["place_in_drawer"] = partial(placed, link="drawer_link")
    made["stack_block"] = stacked
    made["unstack_block"] = unstacked
    for light in ("lightbulb", "led"):
        made[f"turn_on_{light}"] = partial(light_turned, light=light, on=1)
        made[f"turn_off_{light}"] = partial(light_turned, light=light, on=0)
    made["push_into_drawer"] = partial(pushed_into, source="base_link", target="drawer_link")
    return made


JUDGES = _table()
TASKS = tuple(JUDGES)


def solved(task: str, start: Facts, now: Facts) -> bool:
    """Whether `task` was done between two moments."""
    return JUDGES[check_task(task)](start, now)


def check_task(task: str) -> str:
    """The task's name, or ValueError with the nearest one."""
    if task not in JUDGES:
        hint = did_you_mean(task, TASKS) or f"; there are {len(TASKS)}: {', '.join(TASKS)}"
        raise ValueError(f"task {task!r} is unknown{hint}")
    return task


def rotation_between(before: Array, after: Array) -> tuple[float, float, float]:
    """Degrees about the fixed axes x, then y, then z, that turn one orientation (quaternion xyzw) into another."""
    x, y, z, w = after / np.linalg.norm(after)
    a, b, c, d = before / np.linalg.norm(before) * (-1, -1, -1, 1)  # inverse
    qx = w * a + x * d + y * c - z * b
    qy = w * b - x * c + y * d + z * a
    qz = w * c + x * b - y * a + z * d
    qw = w * d - x * a - y * b - z * c
    roll = np.arctan2(2 * (qw * qx + qy * qz), 1 - 2 * (qx * qx + qy * qy))
    pitch = np.arcsin(np.clip(2 * (qw * qy - qz * qx), -1, 1))
    yaw = np.arctan2(2 * (qw * qz + qx * qy), 1 - 2 * (qy * qy + qz * qz))
    return tuple(float(v) for v in np.degrees([roll, pitch, yaw]))  # type: ignore[return-value]
