"""CALVIN in symbols: which task can follow which, and the benchmark's evaluation sequences.

A symbolic state names where everything is. A task is possible where exactly one of its rules matches; a chain is five
possible tasks of different categories. The 1000 evaluation chains are the ones the benchmark publishes code for; they
are stored in sequences.json (made by tools/make_calvin_sequences.py), because drawing them takes most of a minute.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.simulators.calvin.tasks import COLOURS, TASKS

CHAIN_LENGTH = 5
NUM_SEQUENCES = 1000
CABINET = ("slider_right", "slider_left")  # a compartment is open while the door stands at the other end


@dataclass(frozen=True)
class State:
    """Where everything is; fields in the benchmark's order, which seeds the block poses."""

    led: int
    lightbulb: int
    slider: str  # right, left
    drawer: str  # closed, open
    red_block: str  # table, slider_right, slider_left, drawer, grasped, stacked_top, stacked_bottom
    blue_block: str
    pink_block: str
    grasped: int = 0

    def block(self, colour: str) -> str:
        """Where the block of a colour is."""
        return vars(self)[f"{colour}_block"]

    def moved(self, **where: Any) -> State:
        """The state after a change: `moved(red="drawer", drawer="open")`."""
        return replace(self, **{f"{k}_block" if k in COLOURS else k: v for k, v in where.items()})

    def as_dict(self) -> dict[str, Any]:
        """Names and values in the benchmark's order."""
        return {f.name: vars(self)[f.name] for f in fields(self)}


@dataclass(frozen=True)
class Rule:
    """One way to do a task: what must hold (a value, or one of several) and what changes."""

    condition: dict[str, Any]
    effect: dict[str, Any]

    def matches(self, state: State) -> bool:
        """Whether the task can be done this way."""
        values = vars(state)
        return all(values[k] in v if isinstance(v, tuple) else values[k] == v for k, v in self.condition.items())


@cache
def rules() -> dict[str, tuple[Rule, ...]]:
    """The ways to do each task."""

    def free(condition: dict[str, Any], effect: dict[str, Any]) -> tuple[Rule, ...]:
        return (Rule({"grasped": 0} | condition, effect),)

    made: dict[str, tuple[Rule, ...]] = {
        "move_slider_left": free({"slider": "right"}, {"slider": "left"}),
        "move_slider_right": free({"slider": "left"}, {"slider": "right"}),
        "open_drawer": free({"drawer": "closed"}, {"drawer": "open"}),
        "close_drawer": free({"drawer": "open"}, {"drawer": "closed"}),
    }
    for light in ("lightbulb", "led"):
        made[f"turn_on_{light}"] = free({light: 0}, {light: 1})
        made[f"turn_off_{light}"] = free({light: 1}, {light: 0})
    place_in_slider: list[Rule] = []
    place_in_drawer: list[Rule] = []
    push_into_drawer: list[Rule] = []
    for colour in COLOURS:
        block = f"{colour}_block"
        others = [f"{c}_block" for c in COLOURS if c != colour]
        held = {block: "grasped", "grasped": 1}
        for verb, side in product(("rotate", "push"), ("right", "left")):
            made[f"{verb}_{block}_{side}"] = free({block: "table"}, {})
        made[f"lift_{block}_table"] = free({block: "table"}, held)
        made[f"lift_{block}_drawer"] = free({block: "drawer", "drawer": "open"}, held)
        made[f"lift_{block}_slider"] = free({block: "slider_left", "slider": "right"}, held) + free(
            {block: "slider_right", "slider": "left"}, held
        )
        # The benchmark books the block into the compartment behind the door, although only the other one is open.
        for side in ("right", "left"):
            place_in_slider.append(Rule(held | {"slider": side}, {block: f"slider_{side}", "grasped": 0}))
        place_in_drawer.append(Rule(held | {"drawer": "open"}, {block: "drawer", "grasped": 0}))
        away = dict.fromkeys(others, CABINET)
        push_into_drawer += free({block: "table", "drawer": "open"} | away, {block: "drawer"})
    made["place_in_slider"] = tuple(place_in_slider)
    made["place_in_drawer"] = tuple(place_in_drawer)
    made["push_into_drawer"] = tuple(push_into_drawer)
    pairs = [(f"{a}_block", f"{b}_block") for a, b in permutations(COLOURS, 2)]
    stacked = [{top: "stacked_top", bottom: "stacked_bottom"} for top, bottom in pairs]
    made["stack_block"] = tuple(
        Rule({top: "grasped", bottom: "table", "grasped": 1}, pile | {"grasped": 0})
        for (top, bottom), pile in zip(pairs, stacked, strict=True)
    )
    made["unstack_block"] = tuple(Rule({"grasped": 0} | pile, dict.fromkeys(pile, "table")) for pile in stacked)
    return {task: made[task] for task in TASKS}


def category(task: str) -> str:
    """The kind of task; a chain has no kind twice."""
    if task.startswith(("rotate", "push_")) and task != "push_into_drawer":
        return "move a block"
    if task.startswith("lift"):
        return f"lift from the {task.rsplit('_', 1)[1]}"
    if task.startswith("place"):
        return "place"
    if task.startswith("turn"):
        return "light"
    return {"open_drawer": "drawer", "close_drawer": "drawer"}.get(task, "slider" if "slider" in task else task)


CATEGORIES = tuple(category(task) for task in TASKS)


@cache
def after(state: State, task: str) -> State | None:
    """The state after a task, None where it is impossible or ambiguous."""
    found = [rule for rule in rules()[task] if rule.matches(state)]
    return replace(state, **found[0].effect) if len(found) == 1 else None


def is_chain(state: State, tasks: Sequence[int]) -> bool:
    """Whether the tasks (numbers) can be done one after the other, no two of a category."""
    here: State | None = state
    for number in tasks:
        here = after(here, TASKS[number])
        if here is None:
            return False
    return len({CATEGORIES[number] for number in tasks}) == len(tasks)


@cache
def initial_states() -> tuple[State, ...]:
    """The 192 starts: one or two blocks on the table, at most one in each compartment."""
    places = ("table", *CABINET)
    every = product((0, 1), (0, 1), ("right", "left"), ("closed", "open"), places, places, places)
    states = []
    for values in every:
        blocks = values[4:]
        if blocks.count("table") in (1, 2) and all(blocks.count(place) < 2 for place in CABINET):
            states.append(State(*values))  # type: ignore[arg-type]
    return tuple(states)


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


@cache
def evaluation_sequences() -> tuple[tuple[State, tuple[str, ...]], ...]:
    """The 1000 (initial state, five tasks) of the benchmark, in its order."""
    rows = json.loads(Path(__file__).with_name("sequences.json").read_text())
    return tuple((initial_states()[row[0]], tuple(TASKS[n] for n in row[1:])) for row in rows)


@cache
def _completions(state: State, used: frozenset[str], length: int) -> tuple[tuple[int, int], ...]:
    """(task, number of chains that go on with it) for `length` more tasks of unused categories."""
    ways = []
    for number, task in enumerate(TASKS):
        if CATEGORIES[number] in used or (then := after(state, task)) is None:
            continue
        count = 1 if length == 1 else sum(n for _, n in _completions(then, used | {CATEGORIES[number]}, length - 1))
        if count:
            ways.append((number, count))
    return tuple(ways)


def random_chain(state: State, rng: np.random.Generator) -> tuple[str, ...]:
    """One of the state's possible chains, all equally likely: what rejection sampling gives, without the rejections."""
    chain: list[str] = []
    used: frozenset[str] = frozenset()
    for length in range(CHAIN_LENGTH, 0, -1):
        ways = _completions(state, used, length)
        counts = np.array([count for _, count in ways])
        number = ways[int(np.searchsorted(counts.cumsum(), rng.integers(counts.sum()), side="right"))][0]
        then = after(state, TASKS[number])
        assert then is not None
        state, used = then, used | {CATEGORIES[number]}
        chain.append(TASKS[number])
    return tuple(chain)
