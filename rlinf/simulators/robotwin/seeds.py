"""Which seeds a task plays: the published lists of those that RoboTwin's expert solves, a file of one's own, or all.

What a seed is for follows from its number, in every list: below 100 million it is for training, up to 200 million for
evaluation, as published, and up to 300 million for demonstrations. Further on lie the seeds that take the place of
unstable ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlinf.errors import did_you_mean

SPLITS = {"train": range(10**8), "eval": range(10**8, 2 * 10**8), "demo": range(2 * 10**8, 3 * 10**8)}
FIRST = {"train": 100_000, "eval": 100_100_000, "demo": 200_000_000}  # where a search, or a list of all, begins
COUNT = {"train": 100_000, "eval": 500, "demo": 400_000}  # seeds of a split where there is no list
SUBSTITUTE_STRIDE = 3 * 10**8
MAX_SUBSTITUTES = 13  # numpy's seeds end at 2**32
PUBLISHED = ("train_seeds.json", "eval_seeds.json")  # in rlinf/envs/robotwin/seeds of the published repository
FORMAT = "rlinf-robotwin-seeds"


def substitute(seed: int, attempt: int) -> int:
    """The seed that is tried in place of an unstable one; no other reset id has it. RoboTwin takes the next seed."""
    return seed + attempt * SUBSTITUTE_STRIDE


@cache
def published_seeds() -> dict[str, dict[str, list[int]]]:
    """The published lists: split -> task -> seeds; 22 tasks, valid with the original assets."""
    return json.loads(Path(__file__).with_name("seeds.json").read_text(encoding="utf-8"))


def seeds_of(task: str, seeds_path: str | None, *, assets: str | None, others: bool) -> dict[str, Sequence[int]]:
    """The seeds of a task by split ("train", "demo", "eval").

    A split that `seeds_path` says nothing of has the published list, or every seed of a range where the assets are
    known to be `others`. `assets` is the hash of the assets, where they are there.
    """
    lists: dict[str, Sequence[int]] = {s: range(first, first + COUNT[s]) for s, first in FIRST.items()}
    if not others:
        lists |= {split: tasks[task] for split, tasks in published_seeds().items() if task in tasks}
    if seeds_path is not None and not is_published(seeds_path):
        lists |= _read(Path(seeds_path).expanduser(), task, assets)
    return lists


def has_list(task: str, seeds_path: str | None, *, others: bool) -> bool:
    """Whether the seeds of a task are known to be solvable."""
    if seeds_path is not None and not is_published(seeds_path):
        return True
    return not others and task in published_seeds()["eval"]


def is_published(seeds_path: str) -> bool:
    """Whether this is where the published repository keeps its lists, which rlinf brings along."""
    path = Path(seeds_path)
    return path.name in PUBLISHED and path.parts[-3:-1] == ("robotwin", "seeds") and not path.expanduser().is_file()


def _read(path: Path, task: str, assets: str | None) -> dict[str, Sequence[int]]:
    """The lists of a task in a file of `rlinf seeds`, or of the published form {task: seeds}; ValueError names it."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"seeds_path={path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"seeds_path={path} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"seeds_path={path} must hold tasks and their seeds")
    tasks = _tasks(path, read, assets)
    if task not in tasks:
        hint = did_you_mean(task, tasks) or f"; it has {', '.join(tasks) or 'none'}"
        raise ValueError(f"seeds_path={path} has no seeds of {task}{hint}; find some: rlinf seeds robotwin {task}")
    entry = tasks[task]
    seeds = entry.get("success_seeds", entry.get("seeds")) if isinstance(entry, dict) else entry
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise ValueError(f"seeds_path={path}: {task} must have a list of whole numbers")
    if outside := [seed for seed in seeds if not any(seed in numbers for numbers in SPLITS.values())]:
        raise ValueError(f"seeds_path={path}: seed {outside[0]} of {task} must be from 0 to {3 * 10**8 - 1}")
    if twice := next((seed for seed in seeds if seeds.count(seed) > 1), None) if len(set(seeds)) < len(seeds) else None:
        raise ValueError(f"seeds_path={path}: {task} has seed {twice} twice")
    found = {split: [seed for seed in seeds if seed in numbers] for split, numbers in SPLITS.items()}
    return {split: listed for split, listed in found.items() if listed}


def _tasks(path: Path, read: Mapping[str, Any], assets: str | None) -> dict[str, Any]:
    """The tasks of a file; ValueError where it was made with other assets."""
    if read.get("format") != FORMAT:
        return dict(read)
    if assets is not None and read.get("assets") != assets:
        raise ValueError(
            f"seeds_path={path} was made with other assets (hash {read.get('assets')}, here {assets}): what the expert "
            "solves there it may not solve here; make a list: rlinf seeds robotwin TASK"
        )
    return dict(read["tasks"])
