"""Write rlinf/simulators/calvin/sequences.json: the 1000 evaluation chains of CALVIN.

    python tools/make_calvin_sequences.py

A row is the number of an initial state and of five tasks. The draws are the benchmark's own (a legacy numpy generator
per initial state, then one shuffle), so that the chains are the ones everybody reports on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlinf.simulators.calvin import symbolic
from rlinf.simulators.calvin.symbolic import (
    CATEGORIES,
    CHAIN_LENGTH,
    NUM_SEQUENCES,
    State,
    after,
    initial_states,
)
from rlinf.simulators.calvin.tasks import TASKS


def is_chain(state: State, tasks: Sequence[int]) -> bool:
    """Whether the tasks (numbers) can be done one after the other, no two of a category."""
    here: State | None = state
    for number in tasks:
        here = after(here, TASKS[number])
        if here is None:
            return False
    return len({CATEGORIES[number] for number in tasks}) == len(tasks)


def draw_chains(index: int, count: int) -> list[tuple[int, ...]]:
    """The first `count` evaluation chains of initial state `index`, by the benchmark's rejection sampling."""
    random = np.random.RandomState(index)
    state = initial_states()[index]
    found: list[tuple[int, ...]] = []
    while len(found) < count:
        tasks = tuple(random.permutation(len(TASKS))[:CHAIN_LENGTH].tolist())  # what choice(replace=False) draws
        if is_chain(state, tasks):
            found.append(tasks)
    return found


def chains_per_state() -> list[int]:
    """How many of the 1000 chains begin in each initial state: 6, later 5."""
    return [len(part) for part in np.array_split(np.arange(NUM_SEQUENCES), len(initial_states()))]


def shuffled() -> list[int]:
    """Position in the benchmark's list -> number of the chain, counted state by state."""
    order = list(range(NUM_SEQUENCES))
    np.random.RandomState(0).shuffle(order)
    return order


def main() -> None:
    rows = [[state, *chain] for state, n in enumerate(chains_per_state()) for chain in draw_chains(state, n)]
    ordered = [rows[number] for number in shuffled()]
    path = Path(symbolic.__file__).with_name("sequences.json")
    path.write_text("[" + ",\n".join(json.dumps(row) for row in ordered) + "]\n")
    print(f"{path}: {len(ordered)} chains")


if __name__ == "__main__":
    main()
