"""MetaWorld's 50 tasks: names, instructions, the ML45 split and difficulty classes. The judge is MetaWorld's own."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

TRIALS_PER_TASK = {"metaworld_50": 10, "metaworld_45_ind": 10, "metaworld_45_ood": 20}  # held out; all of a single task


@cache
def task_table() -> dict[str, Any]:
    """Instructions (their order numbers the tasks), the ML45 test tasks, and the difficulty classes."""
    return json.loads(Path(__file__).with_name("tasks.json").read_text())


@cache
def all_tasks() -> tuple[str, ...]:
    """The 50 task names, in the order of the published description table."""
    return tuple(task_table()["descriptions"])


def tasks_of(suite: str) -> tuple[str, ...]:
    """The tasks of a suite in table order; a task's name stands for itself."""
    held_out = task_table()["ml45_test"]
    if suite == "metaworld_50":
        return all_tasks()
    if suite == "metaworld_45_ind":
        return tuple(t for t in all_tasks() if t not in held_out)
    if suite == "metaworld_45_ood":
        return tuple(t for t in all_tasks() if t in held_out)
    return (suite,)


def difficulty_classes(tasks: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """These tasks by difficulty class; empty for a single task, where there is nothing to tell."""
    classes = {name: tuple(t for t in tasks if t in members) for name, members in task_table()["difficulty"].items()}
    return {name: members for name, members in classes.items() if members} if len(tasks) > 1 else {}
