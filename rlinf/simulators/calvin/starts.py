"""From a reset id to the start of an episode: scene, tasks, and where everything lies.

reset id = (100 * scene + slot) * 1,000,000 + layout. Scenes A to D count from 0; slot 0-33 is one task, slot 50 a chain
of five. Chain layouts 0-999 are the benchmark's evaluation sequences; every other layout is a seed. Blocks lie where
the benchmark puts them; evaluation starts are exactly its own, seeded ones scatter by a centimetre.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from rlinf.simulators.calvin import symbolic
from rlinf.simulators.calvin.symbolic import State, after
from rlinf.simulators.calvin.tasks import COLOURS, TASKS
from rlinf.simulators.contract import DEMO_LAYOUTS, TASK_STRIDE, Array, IdGrid

SCENES = "ABCD"
CHAIN_SLOT, SLOTS = 50, 100

TCP_POSE = (0.02586889, -0.2313129, 0.5712808, 3.09045411, -0.02908596, 1.50013585)  # position, Euler angles
ARM_POSE = (-1.21779124, 1.03987629, 2.11978254, -2.34205014, -0.87015899, 1.64119093, 0.55344928)  # joints
ROBOT_OBS = np.array([*TCP_POSE, 0.07999963, *ARM_POSE, 1.0])  # gripper opening; last gripper action
HELD_WIDTH = 0.0402  # gripper opening around a block
CABINET_SPOTS = {
    "slider_left": (-2.40851662e-01, 9.24044687e-02, 4.60990009e-01),
    "slider_right": (7.03416330e-02, 9.24044687e-02, 4.60990009e-01),
}
TABLE_SPOTS = (
    (5.00000896e-02, -1.20000177e-01, 4.59990009e-01),
    (2.29995412e-01, -1.19995140e-01, 4.59990010e-01),
)
DRAWER_Y, DRAWER_Z, DRAWER_REACH = -0.355, 0.36, 0.19  # inside the open drawer; how far off its middle still falls in
STACK_HEIGHT = 0.042
YAW, YAW_RANGE, JITTER = np.pi / 2, np.pi / 8, 0.01
SETTLE_STEPS = 8  # control steps before a seeded episode begins: blocks come to rest, fingers close


@dataclass(frozen=True)
class Geometry:
    """Where things are in one scene, as far as scenes differ."""

    sizes: tuple[str, str, str]  # of the red, blue and pink block: small, middle, big
    drawer_x: float  # its middle
    slide_open: float  # joint position of the door on the left
    cabinet_shift: float = 0.0  # x of the cabinet against scene D's
    table_spots: tuple[tuple[float, ...], ...] = TABLE_SPOTS


GEOMETRY = {
    "A": Geometry(("middle", "big", "small"), 0.10, 0.28),
    # D's right table spot is under B's button
    "B": Geometry(("small", "big", "middle"), 0.18, 0.28, 0.20, ((-0.15, -0.12, 0.46), (0.05, -0.12, 0.46))),
    "C": Geometry(("big", "small", "middle"), 0.10, 0.24, 0.20),  # its door stops at 0.24
    "D": Geometry(("middle", "small", "big"), 0.18, 0.28),
}


def geometry(scene: str, *, compat: bool = False) -> Geometry:
    """A scene's geometry; `compat` puts things where scene D has them, as published, whether they fit or not."""
    own = GEOMETRY[scene]
    return Geometry(own.sizes, own.drawer_x, GEOMETRY["D"].slide_open) if compat else own


@dataclass(frozen=True)
class Start:
    """The start of an episode."""

    scene: str
    tasks: tuple[str, ...]  # one, or those of a chain
    robot_obs: Array  # f64 [15]
    scene_obs: Array  # f64 [24]
    settle_steps: int
    gripper: float  # held while settling: 1 open, -1 closed
    done_before: str = ""  # the task that the expert solves before the episode begins; empty: none


@dataclass(frozen=True)
class SceneIds(IdGrid):
    """Reset ids of the same slots in several scenes; `tasks` holds scene after scene."""

    slots_per_scene: int = 1

    def of_task(self, position: int) -> IdGrid:
        """The ids of one task, in every scene."""
        return IdGrid(self.tasks[position :: self.slots_per_scene], self.layouts, interleaved=True)


def ids_of(scenes: Sequence[str], slots: Sequence[int], layouts: range, *, interleaved: bool = False) -> SceneIds:
    """The reset ids of these slots in these scenes, with these layouts."""
    numbers = tuple(SLOTS * SCENES.index(scene) + slot for scene in scenes for slot in slots)
    return SceneIds(numbers, layouts, interleaved, slots_per_scene=len(slots))


def start_of(
    reset_id: int,
    tasks_known: Sequence[str] = (),
    in_a_row: int = 1,
    *,
    expert_first: float = 0.0,
    compat: bool = False,
) -> Start:
    """The start that a reset id means; the same in every suite.

    With `in_a_row` above 1 up to that many of `tasks_known` follow one another, the id's own task first. This share of
    the starts of single tasks, `expert_first`, comes after another of `tasks_known`, which the expert plays.
    """
    number, layout = divmod(int(reset_id), TASK_STRIDE)
    scene_number, slot = divmod(number, SLOTS)
    if not (0 <= scene_number < len(SCENES) and (slot < len(TASKS) or slot == CHAIN_SLOT)):
        raise ValueError(f"reset id {reset_id} belongs to no scene and task of CALVIN")
    scene = SCENES[scene_number]
    where = geometry(scene, compat=compat)
    if slot == CHAIN_SLOT and layout < symbolic.NUM_SEQUENCES:
        state, tasks = symbolic.evaluation_sequences()[layout]
        return Start(scene, tasks, ROBOT_OBS, benchmark_scene_obs(state, where), 0, 1.0)
    rng = np.random.default_rng([slot, layout])  # not by scene: the same seed is the same situation in each
    states = symbolic.initial_states() if slot == CHAIN_SLOT else task_states(TASKS[slot])
    state = states[int(rng.integers(len(states)))]
    tasks = symbolic.random_chain(state, rng) if slot == CHAIN_SLOT else (TASKS[slot],)
    while (state, tasks) in evaluation_pairs():
        tasks = symbolic.random_chain(state, rng)
    if slot != CHAIN_SLOT and in_a_row > 1 and layout not in DEMO_LAYOUTS:
        tasks = symbolic.chain_of(tasks_known, state, tasks[0], in_a_row, np.random.default_rng([slot, layout, 1]))
    robot_obs = ROBOT_OBS.copy()
    if state.grasped:
        robot_obs[6] = HELD_WIDTH
    scene_obs = seeded_scene_obs(state, where, rng, before_drawer=tasks == ("push_into_drawer",))
    before = ""
    if slot != CHAIN_SLOT and expert_first > 0:
        before = task_before(state, tasks[0], tasks_known, expert_first, np.random.default_rng([slot, layout, 2]))
    return Start(scene, tasks, robot_obs, scene_obs, SETTLE_STEPS, -1.0 if state.grasped else 1.0, before)


def task_before(state: State, task: str, tasks: Sequence[str], share: float, rng: np.random.Generator) -> str:
    """With the probability `share` one of `tasks`, of another kind, after which `task` can still be done; else none."""
    if state.grasped or rng.random() >= share:
        return ""
    others = [t for t in tasks if symbolic.category(t) != symbolic.category(task)]
    possible = [t for t in others if (then := after(state, t)) is not None and after(then, task) is not None]
    return possible[int(rng.integers(len(possible)))] if possible else ""


@cache
def evaluation_pairs() -> frozenset[tuple[State, tuple[str, ...]]]:
    """The evaluation sequences as a set: no seeded chain may repeat one."""
    return frozenset(symbolic.evaluation_sequences())


@cache
def task_states(task: str) -> tuple[State, ...]:
    """States in which a task can be done at once; beyond the benchmark's starts only where none of them will do."""
    states = symbolic.initial_states()
    if not any(after(state, task) for state in states):
        states = tuple(further for state in states for further in _one_block_elsewhere(state))
    return tuple(state for state in states if after(state, task) and not (task == "place_in_slider" and _full(state)))


def _full(state: State) -> bool:
    """Whether a block lies in the compartment that is open: the one away from the door."""
    return ("slider_left" if state.slider == "right" else "slider_right") in state.blocks


def _one_block_elsewhere(state: State) -> Iterator[State]:
    """The state with a block of the table in the hand, in the drawer, or on the other block of the table."""
    on_table = [block for block, place in zip(symbolic.BLOCKS, state.blocks, strict=True) if place == "table"]
    for block in on_table:
        changes: list[dict[str, Any]] = [{block: "grasped", "grasped": 1}]
        changes += [{block: "drawer"}] if state.drawer == "open" else []
        changes += [{block: "stacked_top", other: "stacked_bottom"} for other in on_table if other != block]
        yield from (replace(state, **change) for change in changes)


def benchmark_scene_obs(state: State, where: Geometry) -> Array:
    """The scene_obs f64 [24] of an evaluation start: spots and yaws drawn from the hash of the state's values."""
    random = np.random.RandomState(fnv1_32(str(vars(state).values())))
    order = [0, 1]
    random.shuffle(order)
    yaws = [random.uniform(YAW - YAW_RANGE, YAW + YAW_RANGE) for _ in COLOURS]
    return _scene_obs(state, where, [where.table_spots[i] for i in order], yaws, np.zeros((3, 2)))


def seeded_scene_obs(state: State, where: Geometry, rng: np.random.Generator, *, before_drawer: bool) -> Array:
    """A start f64 [24] like the benchmark's, scattered; `before_drawer` keeps to the spots in front of the drawer."""
    spots = [where.table_spots[i] for i in rng.permutation(2)]
    if before_drawer:
        near = [spot for spot in spots if abs(spot[0] - where.drawer_x) < DRAWER_REACH]
        spots = [near[0], near[0]]  # there is one block on the table
    yaws = rng.uniform(YAW - YAW_RANGE, YAW + YAW_RANGE, 3)
    return _scene_obs(state, where, spots, yaws, rng.uniform(-JITTER, JITTER, (3, 2)))


def _scene_obs(
    state: State, where: Geometry, spots: Sequence[Sequence[float]], yaws: Sequence[float] | Array, jitter: Array
) -> Array:
    """Joints, lights, then position and Euler angles of the red, blue and pink block; the blocks' jitter is [3, 2]."""
    obs = np.zeros(24)
    obs[0] = where.slide_open if state.slider == "left" else 0.0
    obs[1] = 0.22 if state.drawer == "open" else 0.0
    obs[3] = 0.088 if state.lightbulb else 0.0
    obs[4:6] = state.lightbulb, state.led
    poses = obs[6:].reshape(3, 6)
    spot_of = (0, 0 if state.red_block not in ("table", "stacked_bottom") else 1, 1)
    for i, place in enumerate(state.blocks):
        if place in CABINET_SPOTS:
            poses[i, :3] = CABINET_SPOTS[place]
            poses[i, 0] += where.cabinet_shift
        elif place == "drawer":
            poses[i, :3] = where.drawer_x, DRAWER_Y, DRAWER_Z
        else:
            poses[i, :3] = spots[spot_of[i]]
        poses[i, :2] += jitter[i]
        poses[i, 5] = yaws[i]
    for i, place in enumerate(state.blocks):
        if place == "grasped":
            poses[i] = (*ROBOT_OBS[:3], 0.0, 0.0, ROBOT_OBS[5])
        elif place == "stacked_top":
            poses[i] = poses[state.blocks.index("stacked_bottom")]
            poses[i, 2] += STACK_HEIGHT
    return obs


def fnv1_32(text: str) -> int:
    """The benchmark's hash: FNV-1 of 32 bits over UTF-16 bytes, begun at 0 instead of the usual offset."""
    value = 0
    for byte in text.encode("utf-16-le"):
        value = (value * 0x01000193) & 0xFFFFFFFF ^ byte
    return value
