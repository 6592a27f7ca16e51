"""The order in which a comparison plays its trials, and after how many of them it looks. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np


def rounds(tasks: Mapping[int, object], seed: int) -> list[list[int]]:
    """Reset ids in rounds that play every task once, layouts and tasks in an order drawn by `seed`.

    `tasks`: reset id -> its task. Tasks with more trials than others play the last rounds alone.
    """
    rng, by_task = np.random.default_rng(seed), dict[object, list[int]]()
    for reset_id in sorted(tasks):
        by_task.setdefault(tasks[reset_id], []).append(reset_id)
    drawn = [rng.permutation(ids).tolist() for ids in by_task.values()]
    played = [[ids[number] for ids in drawn if number < len(ids)] for number in range(max(map(len, drawn), default=0))]
    return [rng.permutation(ids).tolist() for ids in played]


def batches(played: Sequence[Sequence[int]], unit: int) -> Iterator[list[int]]:
    """Whole rounds, of `unit` trials or a few more at first, then each time as many as were played before.

    A policy is loaded, and its simulators started, once per batch: doubling keeps that to a few times. A last batch
    smaller than `unit` would be played by fewer envs than the others; it is played with the one before.
    """
    left, before = [list(ids) for ids in played], 0
    while left:
        batch: list[int] = []
        while left and (len(batch) < max(unit, before) or sum(map(len, left)) < unit):
            batch += left.pop(0)
        yield batch
        before += len(batch)
