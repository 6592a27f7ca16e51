"""How near a task is to being solved, which `shaped_reward` pays for: half for the hand's way, half for the task's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from rlinf.simulators.calvin.expert_moves import Hand
from rlinf.simulators.calvin.tasks import (
    JUDGES,
    Facts,
    door_moved,
    lifted,
    light_turned,
    pushed,
    rotated,
    rotation_between,
)
from rlinf.simulators.calvin.touch import POINTS

NEAR = 0.15  # m over which the hand's part falls to 1/e


def nearness(task: str, hand: Hand, start: Facts, now: Facts) -> float:
    """How near the task that began at `start` is to being solved, 0 to 1; 0 for a task that touch.POINTS does not name.

    A task that is solved is at 1, whatever this says: the judge asks for more than the way (a block still on its base).
    """
    if task not in POINTS:
        return 0.0
    away = float(np.linalg.norm(POINTS[task](hand) - hand.position))
    return 0.5 * math.exp(-away / NEAR) + 0.5 * min(max(done(task, start, now), 0.0), 1.0)


def done(task: str, start: Facts, now: Facts) -> float:
    """How much of what its judge asks for has happened: 1 at the judge's threshold, below 0 on the wrong side."""
    judge = JUDGES[task]
    assert isinstance(judge, partial)
    return SHARES[judge.func](start, now, **judge.keywords)


def _of_push(start: Facts, now: Facts, *, colour: str, distance: float) -> float:
    return float(now.blocks[colour].position[0] - start.blocks[colour].position[0]) / distance


def _of_turn(start: Facts, now: Facts, *, colour: str, degrees: float) -> float:
    return rotation_between(start.blocks[colour].orientation, now.blocks[colour].orientation)[2] / degrees


def _of_lift(start: Facts, now: Facts, *, colour: str, height: float, link: str) -> float:
    return float(now.blocks[colour].position[2] - start.blocks[colour].position[2]) / height


def _of_door(start: Facts, now: Facts, *, door: str, distance: float) -> float:
    return (now.doors[door] - start.doors[door]) / distance


def _of_light(start: Facts, now: Facts, *, light: str, on: int) -> float:
    """The way of button or lever to where the light changes, which is at 1, from whichever side it began."""
    to_go = 1.0 - start.levers[light]
    return (now.levers[light] - start.levers[light]) / to_go if to_go else 0.0


SHARES: dict[Callable[..., bool], Callable[..., float]] = {
    pushed: _of_push,
    rotated: _of_turn,
    lifted: _of_lift,
    door_moved: _of_door,
    light_turned: _of_light,
}
