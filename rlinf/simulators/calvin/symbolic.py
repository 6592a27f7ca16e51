"""CALVIN in symbols: which task can follow which, and the benchmark's evaluation sequences.

A symbolic state names where everything is. A task is possible where exactly one of its rules matches; a chain is five
possible tasks of different categories. The 1000 evaluation chains are the ones the benchmark publishes code for; they
are stored in sequences.json (made by tools/make_calvin_sequences.py), because drawing them takes most of a minute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.simulators.calvin.tasks import COLOURS, TASKS

CHAIN_LENGTH = 5
NUM_SEQUENCES = 1000
BLOCKS = tuple(f"{colour}_block" for colour in COLOURS)
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

    @property
    def blocks(self) -> tuple[str, str, str]:
        """Where the red, the blue and the pink block are."""
        return self.red_block, self.blue_block, self.pink_block


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
def rules() -> Mapping[str, list[Rule]]:
    """The ways to do each task."""
    ways: dict[str, list[Rule]] = {task: [] for task in TASKS}

    def add(task: str, condition: dict[str, Any], effect: dict[str, Any]) -> None:
        ways[task].append(Rule({"grasped": 0} | condition, effect))

    add("open_drawer", {"drawer": "closed"}, {"drawer": "open"})
    add("close_drawer", {"drawer": "open"}, {"drawer": "closed"})
    for light in ("lightbulb", "led"):
        add(f"turn_on_{light}", {light: 0}, {light: 1})
        add(f"turn_off_{light}", {light: 1}, {light: 0})
    for side, other in (("left", "right"), ("right", "left")):
        add(f"move_slider_{side}", {"slider": other}, {"slider": side})
    for block in BLOCKS:
        others = [other for other in BLOCKS if other != block]
        held = {block: "grasped", "grasped": 1}
        for verb, side in product(("rotate", "push"), ("right", "left")):
            add(f"{verb}_{block}_{side}", {block: "table"}, {})
        add(f"lift_{block}_table", {block: "table"}, held)
        add(f"lift_{block}_drawer", {block: "drawer", "drawer": "open"}, held)
        for side, other in (("left", "right"), ("right", "left")):
            add(f"lift_{block}_slider", {block: f"slider_{side}", "slider": other}, held)
            # The benchmark books the block into the compartment behind the door, although only the other one is open.
            add("place_in_slider", held | {"slider": side}, {block: f"slider_{side}", "grasped": 0})
        add("place_in_drawer", held | {"drawer": "open"}, {block: "drawer", "grasped": 0})
        away = dict.fromkeys(others, CABINET)
        add("push_into_drawer", {block: "table", "drawer": "open"} | away, {block: "drawer"})
        for bottom in others:
            pile = {block: "stacked_top", bottom: "stacked_bottom"}
            add("stack_block", held | {bottom: "table"}, pile | {"grasped": 0})
            add("unstack_block", pile, dict.fromkeys(pile, "table"))
    return ways


def category(task: str) -> str:
    """The kind of task; a chain has no kind twice."""
    first, last = task.split("_")[0], task.split("_")[-1]
    if task in ("push_into_drawer", "stack_block", "unstack_block"):
        return task
    if first == "lift":
        return f"lift from the {last}"
    kinds = {"rotate": "move a block", "push": "move a block", "place": "place", "turn": "light", "move": "slider"}
    return kinds.get(first, "drawer")


CATEGORIES = tuple(category(task) for task in TASKS)


@cache
def after(state: State, task: str) -> State | None:
    """The state after a task, None where it is impossible or ambiguous."""
    found = [rule for rule in rules()[task] if rule.matches(state)]
    return replace(state, **found[0].effect) if len(found) == 1 else None


@cache
def initial_states() -> tuple[State, ...]:
    """The 192 starts: one or two blocks on the table, at most one in each compartment."""
    places = ("table", *CABINET)
    every = product((0, 1), (0, 1), ("right", "left"), ("closed", "open"), places, places, places)

    def allowed(blocks: tuple[Any, ...]) -> bool:
        return blocks.count("table") in (1, 2) and all(blocks.count(place) < 2 for place in CABINET)

    return tuple(State(*values) for values in every if allowed(values[4:]))  # type: ignore[arg-type]


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


def chain_of(tasks: Sequence[str], state: State, first: str, length: int, rng: np.random.Generator) -> tuple[str, ...]:
    """A chain of these tasks that begins with `first`: each next one is drawn evenly from those that are possible then.

    As in the benchmark's chains no kind of task comes twice, so that there may be fewer than `length`.
    """
    chain = [first]
    while len(chain) < length:
        then = after(state, chain[-1])
        assert then is not None, "tasks are drawn where they are possible"
        state, used = then, {category(task) for task in chain}
        possible = [task for task in tasks if category(task) not in used and after(state, task) is not None]
        if not possible:
            break
        chain.append(possible[int(rng.integers(len(possible)))])
    return tuple(chain)
