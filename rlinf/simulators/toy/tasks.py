"""The toy's tasks: reach the dot of a colour, within a distance."""

from __future__ import annotations

import numpy as np

from rlinf.simulators.contract import Array

COLOURS = {"red": (220, 40, 40), "blue": (50, 80, 230)}  # a colour's position is its task's number
SUITES = {"toy_2": ("red", "blue"), "toy_red": ("red",), "toy_blue": ("blue",)}


def task_name(colour: str) -> str:
    """What tables call the task of a colour."""
    return f"reach-{colour}"


def reached(agent: Array, target: Array, radius: float) -> bool:
    """Whether the agent f64 [2] is close enough to the target f64 [2]."""
    return bool(np.linalg.norm(agent - target) <= radius)
