"""RoboTwin's 46 tasks: names, what is to be done, how many actions an evaluation allows. The judge is RoboTwin's own.

A reset id is RoboTwin's seed; in a list of tasks it is (number of the task + 1) * STRIDE + seed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from rlinf.errors import did_you_mean

STRIDE = 10**10  # above every seed
UNSUPPORTED = {
    "open_laptop": "its success check reads what only RoboTwin's expert sets",
    "place_fan": "it is not among the 46 tasks of the published RLinf",
    "place_object_scale": "it is not among the 46 tasks of the published RLinf",
    "put_object_cabinet": "it is not among the 46 tasks of the published RLinf",
}


@cache
def task_table() -> dict[str, dict[str, Any]]:
    """By task: step_limit, the actions that RoboTwin's own evaluation allows, and description, what is to be done."""
    return json.loads(Path(__file__).with_name("tasks.json").read_text(encoding="utf-8"))


def all_tasks() -> tuple[str, ...]:
    """The names of the 46 tasks, in alphabetical order."""
    return tuple(task_table())


def check_task(name: str, key: str) -> None:
    """ValueError for a name that is no task, or one of the four that are not supported; `key` is where it stands."""
    if name in UNSUPPORTED:
        raise ValueError(
            f"{key}={name!r} is not supported: {UNSUPPORTED[name]}; docs/robotwin.md lists the 46 that are"
        )
    if name not in task_table():
        hint = did_you_mean(name, all_tasks())
        raise ValueError(f"{key}={name!r} must be one of RoboTwin's {len(task_table())} tasks{hint}")


def listed_id(task: str, seed: int) -> int:
    """The reset id of a task's seed within a list of tasks."""
    return (all_tasks().index(task) + 1) * STRIDE + seed


def task_and_seed(reset_id: int, single: str) -> tuple[str, int]:
    """The task and the seed of a reset id; `single` is the task where ids are seeds."""
    number, seed = divmod(reset_id, STRIDE)
    return (all_tasks()[number - 1] if number else single), seed
