"""Where two fingers should take an object, found from its collision mesh as it lies. numpy only.

The hand points down. `across` is the line between its fingers, `along` the width of a finger. Letters: N points on the
object's surface. Metres, world frame.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlinf.simulators.contract import Array

TABLE_Z = 0.8695
# The hand, seen from the point between the fingers (ee_gripper_link): the fingertips are TIP below it, fingers hold up
# to PAD_TOP above it, and the bar that carries them, BAR above it, must not hit what stands between them.
TIP, PAD_TOP, BAR = 0.0157, 0.026, 0.022
FINGER_HALF_WIDTH = 0.0145
WIDEST, THINNEST = 0.050, 0.012  # what goes between open fingers with some room, what closed fingers still press
FINGER_NEAR, FINGER_FAR = 0.024, 0.044  # an open finger, from the middle of the hand

TURNS = np.arange(24) * np.pi / 24  # of the hand; after half a turn the fingers have changed places
SHIFTS = np.arange(-8, 9) * 0.005  # along, from the object's middle
GAP = 0.003  # kept below the fingertips and below the bar
CONTACT = 0.002  # what is this near to the outermost point touches a finger
MIDDLE, MIN_DEPTH = 0.005, 0.010  # fingers hold at least this far to both sides of their middle, this far up
SPACING = 0.0025  # of points on a surface

# A grasp costs 1 for each of these
WIDTH, LEVER, OFF_CENTRE = 0.04, 0.02, 0.005  # m between the fingers, m off balance, m off the middle of a finger
RAISED, MISFIT = 0.01, 0.002  # m above the table because something lies there, m too wide or too thin
TURN = 5.0  # rad from the hand's present turn


class Grasp(NamedTuple):
    """Where the point between the fingers goes, and how the line between them is turned."""

    position: Array  # f64 [3]
    yaw: float


def find_grasp(points: Array, obstacles: Array, yaw: float) -> Grasp:
    """The best way to take the object with surface `points` [N, 3], beside `obstacles` [M, 3] on other bodies.

    `yaw` is the hand's present turn: of two equal grasps the nearer one is better.
    """
    middle, balance = (points.min(0) + points.max(0)) / 2, points.mean(0)
    best, best_cost = Grasp(middle, yaw), np.inf
    for turn in sorted(half_turn(TURNS - yaw), key=abs):
        across = np.array([np.cos(yaw + turn), np.sin(yaw + turn)])
        along = np.array([-across[1], across[0]])
        s, t, z = points[:, :2] @ across, points[:, :2] @ along, points[:, 2]
        beside = np.stack([obstacles[:, :2] @ across, obstacles[:, :2] @ along, obstacles[:, 2]])
        for at in middle[:2] @ along + SHIFTS:
            known = abs(turn) / TURN + abs(at - balance[:2] @ along) / LEVER
            between = np.abs(t - at) < FINGER_HALF_WIDTH
            if known >= best_cost or not between.any():
                continue
            top, floor = z[between].max(), _floor(beside, (s[between].min() + s[between].max()) / 2, at)
            height = max(floor + GAP + TIP, top + GAP - BAR)
            held = between & (z > height - TIP) & (z < height + PAD_TOP)
            if top - (height - TIP) < MIN_DEPTH or min(_reach(t[held] - at)) < MIDDLE:
                continue
            low, high = s[held].min(), s[held].max()
            touching = (t[held & (s > high - CONTACT)], t[held & (s < low + CONTACT)])
            off_centre = max(abs(side.mean() - at) for side in touching)
            misfit = max(0.0, high - low - WIDEST, THINNEST - (high - low))
            cost = known + (high - low) / WIDTH + max(0.0, off_centre - SPACING) / OFF_CENTRE
            cost += misfit / MISFIT + (floor - TABLE_Z) / RAISED
            if cost < best_cost:
                xy = (low + high) / 2 * across + at * along
                best, best_cost = Grasp(np.array([*xy, height]), yaw + turn), cost
    return best


def _floor(beside: Array, s: float, t: float) -> float:
    """The highest point [3, M] under the open fingers of a hand at s, t; the table if there is none."""
    off = np.abs(beside[0] - s)
    under = (off > FINGER_NEAR) & (off < FINGER_FAR) & (np.abs(beside[1] - t) < FINGER_HALF_WIDTH)
    return float(beside[2, under].max(initial=TABLE_Z))


def _reach(offsets: Array) -> tuple[float, float]:
    """How far points extend to both sides of a middle."""
    return float(-offsets.min(initial=np.inf)), float(offsets.max(initial=-np.inf))


def half_turn(angle: Array) -> Array:
    """The same line's angle in [-pi/2, pi/2)."""
    return (angle + np.pi / 2) % np.pi - np.pi / 2


@cache
def surface(path: Path) -> Array:
    """Points about SPACING apart on the faces of an .obj file, f64 [N, 3]."""
    corners, triangles = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        kind, *rest = line.split() or [""]
        if kind == "v":
            corners.append([float(number) for number in rest[:3]])
        elif kind == "f":
            first, *others = [int(word.split("/")[0]) - 1 for word in rest]
            triangles += [(first, a, b) for a, b in itertools.pairwise(others)]
    found = [np.array(corners)]
    for a, b, c in np.array(corners)[np.array(triangles)]:
        n = int(max(np.linalg.norm(b - a), np.linalg.norm(c - a), np.linalg.norm(c - b)) / SPACING)
        if n:
            u, v = np.meshgrid(np.arange(n + 1) / n, np.arange(n + 1) / n, indexing="ij")
            inside = u + v <= 1
            found.append(a + u[inside][:, None] * (b - a) + v[inside][:, None] * (c - a))
    points = np.concatenate(found)
    one_per_cell = np.unique(np.round(points / SPACING).astype(np.int64), axis=0, return_index=True)[1]
    return points[np.sort(one_per_cell)]
