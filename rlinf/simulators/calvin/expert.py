"""CALVIN's scripted expert: a plan of moves for each of the 34 tasks, made from where things are.

Everything is found through the boxes of the table's parts and the poses of the blocks, so that a plan serves all four
scenes. The benchmark's judge alone says whether a task was done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rlinf.simulators.calvin import touch
from rlinf.simulators.calvin.expert_moves import CLOSED, CRUISE_Z, HALF_WIDTH, OPEN, TABLE_Z, Hand, Moves, free_spot
from rlinf.simulators.calvin.suite import Options
from rlinf.simulators.calvin.tasks import COLOURS
from rlinf.simulators.contract import Array

if TYPE_CHECKING:
    from rlinf.simulators.calvin.scene import Scene

Plan = Callable[[Hand], Moves]
CARRYING = ("place_in_slider", "place_in_drawer", "stack_block")  # begin with a block in the hand
SLIDES = {"move_slider_left": -1, "move_slider_right": 1}
DOOR_ROOM = 0.225  # from the middle of the sliding door to that of a block one can get at
PUSH_DISTANCE, SLIDING = 0.1, 4.0  # m; m/s^2 that a block loses on the table


class Expert:
    """Plays one episode, task by task; begins a task anew when a try is over and the judge has not seen it done."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._hand: Hand | None = None
        self._solved = -1
        self._moves: Moves = iter(())

    def act(self, sim: Scene) -> Array:
        """One action f32 [7]."""
        if self._hand is None:
            self._hand = Hand(sim.world)
        if sim.chain.over:
            self._moves = self._hand.stay(1, sim.world.gripper)
        elif sim.chain.solved != self._solved:
            self._solved = sim.chain.solved
            before = sim.chain.tasks[self._solved - 1] if self._solved else ""
            self._moves = play(self._hand, sim.chain.task, before)
        return next(self._moves).astype(np.float32)


def play(hand: Hand, task: str, before: str) -> Moves:
    """Move away from where the task `before` ended, then follow the plan of a task, again and again."""
    if before in SLIDES:
        yield from slide_on(hand, side=SLIDES[before])
    carried = hand.held() if task in CARRYING else None
    while True:
        held = hand.held()
        if held != carried and held is not None:
            yield from put_down(hand, held)
        yield from hand.withdraw(hand.world.gripper)
        if held != carried and carried is not None:
            yield from take(hand, carried)
        yield from PLANS[task](hand)
        yield from hand.stay(1, hand.world.gripper)


def wall_lean(x: float) -> float:
    """Radians that the gripper leans to the slanted wall at x: fewer close to the robot's own base."""
    return float(np.interp(x, (-0.24, 0.06), (0.4, 0.9)))


def press_button(hand: Hand) -> Moves:
    """Press the button with closed fingers, and leave it."""
    x, y, top = touch.on_button(hand)
    bottom = hand.world.link_box("button_link")[0][2]
    yield from hand.go([x, y, top + 0.06], CLOSED, near=0.02)
    yield from hand.go([x, y, bottom], CLOSED, limit=12)
    yield from hand.go([x, y, top + 0.06], CLOSED)


def open_drawer(hand: Hand) -> Moves:
    """Hook closed fingers behind the handle and pull."""
    x, y, z = touch.behind_drawer_handle(hand)
    yield from hand.go([x, y, 0.50], CLOSED, near=0.02)
    yield from hand.go([x, y, z], CLOSED)
    yield from hand.go([x, y - 0.25, z], CLOSED, speed=0.7)


def close_drawer(hand: Hand) -> Moves:
    """Push the handle."""
    x, y, z = touch.before_drawer_handle(hand)
    yield from hand.go([x, y, 0.46], CLOSED, near=0.02)
    yield from hand.go([x, y, z], CLOSED, near=0.02)
    yield from hand.go([x, y + 0.28, z], CLOSED, speed=0.7)


def slide_door(hand: Hand, *, side: int, until: Callable[[], bool] = lambda: False) -> Moves:
    """Push the door's handle sideways; `side` 1 is right."""
    x, y, z = touch.beside_door_handle(hand, side=side)
    lean = float(np.interp(x, (0.15, 0.30), (0.0, 0.6)))  # far to the right an upright gripper is out of reach
    yield from hand.go([x, -0.08, 0.58], CLOSED, lean=lean, near=0.02)
    yield from hand.go([x, y, z], CLOSED, lean=lean, near=0.015)
    yield from hand.go([x + side * 0.33, y, z], CLOSED, lean=lean, speed=0.7, until=until)


def slide_on(hand: Hand, *, side: int) -> Moves:
    """Push the door to its end: the judge is content with half the way, but what follows may need the cabinet open."""
    positions = [np.inf]

    def stopped() -> bool:
        positions.append(hand.world.joint("slide"))
        return bool(abs(positions[-1] - positions[-2]) < 0.001)

    there = np.add(hand.position, (side * 0.3, 0, 0))
    yield from hand.go(there, CLOSED, euler=hand.world.target_euler, speed=0.7, until=stopped)


def clear_of_door(hand: Hand, x: float) -> Moves:
    """Push the door aside where it stands before x, a place in the cabinet."""

    def clear() -> bool:
        return bool(abs(hand.middle("slide_link")[0] - x) > DOOR_ROOM)

    if not clear():
        side = 1 if x < hand.middle("plank_link")[0] else -1
        yield from slide_door(hand, side=side, until=clear)
        yield from hand.withdraw(CLOSED)


def switch_on(hand: Hand) -> Moves:
    """Lift the lever from below."""
    x, y, z = touch.under_lever(hand)
    go = partial(hand.go, grip=CLOSED, lean=wall_lean(x))
    yield from go([x, y - 0.04, z + 0.055], near=0.03)
    yield from go([x, y, z], near=0.02)
    yield from go([x, y + 0.08, z], speed=0.5, limit=20)
    yield from go([x, y + 0.15, z + 0.135], speed=0.5)


def switch_off(hand: Hand) -> Moves:
    """Press the lever down from above."""
    x, y, z = touch.over_lever(hand)
    go = partial(hand.go, grip=CLOSED, lean=wall_lean(x))
    yield from go([x, y - 0.06, z + 0.02], near=0.03)
    yield from go([x, y, z], near=0.015)
    yield from go([x, y - 0.035, z - 0.12], speed=0.5)


def grasp(hand: Hand, colour: str, *, above: float = 0.0) -> Moves:
    """Come down from over a block and close the fingers, `above` metres over its middle."""
    block, yaw = hand.grasp_point(colour), hand.grasp_yaw(colour)
    yield from hand.go(np.add(block, (0, 0, 0.08)), OPEN, yaw=yaw, near=0.02)
    yield from hand.go(np.add(block, (0, 0, above)), OPEN, yaw=yaw, near=0.006, limit=20)
    yield from hand.close()
    hand.lean = 0.0


def lift(hand: Hand, colour: str, *, above: float = 0.0) -> Moves:
    """Lift a block off the table, off the drawer or off another block."""
    yaw = hand.grasp_yaw(colour)
    yield from grasp(hand, colour, above=above)
    yield from hand.go(np.add(hand.position, (0, 0, 0.14)), CLOSED, yaw=yaw, limit=15)


def lift_from_cabinet(hand: Hand, colour: str) -> Moves:
    """Lift a block out of the cabinet, through the open side of its slanted wall."""
    block = hand.block(colour)
    yield from clear_of_door(hand, block[0])
    lean = wall_lean(block[0])
    go = partial(hand.go, lean=lean)
    yield from go([block[0], -0.08, 0.56], OPEN, near=0.02)
    yield from go(np.add(block, (0, -0.07, 0.03)), OPEN, near=0.015)
    yield from go(np.add(block, (0, -0.005, 0.005)), OPEN, near=0.006, limit=20)
    yield from hand.close()
    hand.lean = lean
    yield from go(np.add(hand.position, (0, -0.03, 0.08)), CLOSED, limit=15)


def take(hand: Hand, colour: str) -> Moves:
    """Pick up a block wherever it lies."""
    yield from (lift_from_cabinet if hand.place(colour) == "cabinet" else lift)(hand, colour)


def push(hand: Hand, colour: str, *, side: int) -> Moves:
    """Closed fingers push the block along x and stop early: it slides on, touched by nothing. `side` 1 is right."""
    x = hand.block(colour)[0]
    beside, y, z = touch.beside_block(hand, colour=colour, side=side)

    def slides_home() -> bool:
        speed = side * hand.world.facts().blocks[colour].linear_velocity[0]
        left_to_go = PUSH_DISTANCE - side * (hand.block(colour)[0] - x)
        return bool(left_to_go < max(speed, 0.0) ** 2 / (2 * SLIDING))

    yield from hand.go([beside, y, 0.54], CLOSED, near=0.02)
    yield from hand.go([beside, y, z], CLOSED, near=0.02)
    for _ in range(4):
        yield from hand.go([x + side * 0.14, y, z], CLOSED, speed=0.5, until=slides_home)
        yield from hand.go(np.subtract(hand.position, (side * 0.04, 0, 0)), CLOSED, near=0.02, limit=6)


def rotate(hand: Hand, colour: str, *, side: int) -> Moves:
    """Turn the block in the hand, a little over the table, and let it drop; `side` 1 is to the left."""
    yaw = hand.grasp_yaw(colour)
    yield from grasp(hand, colour)
    yield from hand.go(np.add(hand.position, (0, 0, 0.012)), CLOSED, yaw=yaw + side * 1.3, near=0.008)
    yield from hand.stay(6, OPEN)


def put_down(hand: Hand, held: str) -> Moves:
    """Leave a block on the table: here if it touches it, else at a free place."""
    if hand.block(held)[2] > TABLE_Z + 2 * HALF_WIDTH:
        low, high = hand.world.link_box("drawer_link")
        blocked = [block[0] for block in hand.blocks_in("table", but=held).values()]
        spot = free_spot(low[0] + 0.06, high[0] - 0.06, [*blocked, hand.middle("button_link")[0]])
        go = partial(hand.go, grip=CLOSED, lean=hand.lean)
        yield from hand.withdraw(CLOSED)
        yield from go([spot, -0.11, CRUISE_Z], near=0.02)
        offset = hand.position - hand.block(held)
        yield from go([spot, -0.11, offset[2] + TABLE_Z + hand.half_extent(held)[2]], limit=20)
    yield from hand.release()


def place_in_drawer(hand: Hand) -> Moves:
    """Let the held block go between the drawer's front and the edge of the table."""
    front, edge = (hand.world.link_box(link)[0][1] for link in ("drawer_link", "base_link"))
    y, middle = (front + 0.07 + edge) / 2, hand.middle("drawer_link")[0]
    x = free_spot(middle - 0.1, middle + 0.1, [block[0] for block in hand.blocks_in("drawer").values()])
    go = partial(hand.go, lean=hand.lean)
    yield from go([x, y, CRUISE_Z], CLOSED, near=0.03)
    yield from go([x, y, 0.385 + 0.05 * hand.lean], CLOSED, near=0.015, limit=20)
    yield from hand.stay(6, OPEN)
    yield from go([x, y, 0.5], OPEN)


def place_in_cabinet(hand: Hand) -> Moves:
    """Put the held block into the side of the cabinet that the door leaves open."""
    held = hand.held()
    if held is None:
        return
    low, high = (corner[0] for corner in hand.world.link_box("plank_link"))
    door = hand.middle("slide_link")[0]
    left = low + 0.05, max(door - DOOR_ROOM, low + 0.05)
    right = min(door + DOOR_ROOM, high - 0.05), high - 0.05
    blocked = [block[0] for block in hand.blocks_in("cabinet", but=held).values()]
    x = free_spot(*(left if door > (low + high) / 2 else right), blocked)
    lean = wall_lean(x)
    tilt = lean - hand.lean
    z = TABLE_Z + 0.008 + hand.half_length(held) * abs(np.sin(tilt)) + HALF_WIDTH * np.cos(tilt)
    go = partial(hand.go, lean=lean)
    yield from go([x, -0.10, 0.58], CLOSED, near=0.02)
    yield from go([x, 0.0, 0.52], CLOSED, near=0.02)
    yield from go([x, 0.085, z], CLOSED, limit=20)
    yield from hand.stay(6, OPEN)
    yield from go([x, 0.0, 0.52], OPEN, near=0.02)


def stack(hand: Hand) -> Moves:
    """Set the held block on one that lies on the table, by where the blocks are, not the hand."""
    held = hand.held()
    bases = [block for block in hand.blocks_in("table", but=held).values() if block[2] < TABLE_Z + 3 * HALF_WIDTH]
    if held is None or not bases:
        return
    base = min(bases, key=lambda block: float(np.linalg.norm(block - hand.position)))
    base[0] += off_button(hand, base, hand.half_extent(held) + 0.003)
    top = TABLE_Z + 2 * HALF_WIDTH + hand.half_extent(held)[2]
    go = partial(hand.go, grip=CLOSED, lean=hand.lean)
    for height, near, limit in ((0.06, 0.02, 40), (0.01, 0.006, 20), (0.003, 0.004, 12)):
        offset = hand.position - hand.block(held)
        yield from go([*(base + offset)[:2], top + offset[2] + height], near=near, limit=limit)
    yield from hand.stay(6, OPEN)
    yield from hand.go(np.add(hand.position, (0, 0, 0.1)), OPEN, lean=hand.lean)


def off_button(hand: Hand, base: Array, reach: Array) -> float:
    """How far along x to stack off the middle, so that the upper block does not touch the button too."""
    low, high = hand.world.link_box("button_link")
    if base[1] + reach[1] < low[1] or base[1] - reach[1] > high[1]:
        return 0.0
    if base[0] > low[0]:
        return float(np.clip(high[0] + reach[0] - base[0], 0, 0.015))
    return float(np.clip(low[0] - reach[0] - base[0], -0.015, 0))


def unstack(hand: Hand) -> Moves:
    """Lift the highest block on the table."""
    blocks = hand.blocks_in("table")
    if blocks:
        yield from lift(hand, max(blocks, key=lambda colour: blocks[colour][2]), above=0.015)


def push_into_drawer(hand: Hand) -> Moves:
    """Closed fingers push a block off the table's edge, once it lies before the drawer."""
    blocks = hand.blocks_in("table")
    if not blocks:
        return
    colour = min(blocks, key=lambda colour: abs(blocks[colour][0] - hand.middle("drawer_link")[0]))
    x, y, _ = blocks[colour]
    inside = float(np.clip(x, *hand.drawer_room()))
    if abs(inside - x) > 0.015:
        yield from grasp(hand, colour)
        yield from hand.go([inside, y, hand.position[2] + 0.005], CLOSED, yaw=hand.grasp_yaw(colour), near=0.006)
        yield from hand.release()
        yield from hand.withdraw(OPEN)
    x, y, _ = hand.block(colour)
    behind = y + hand.half_extent(colour)[1] + 0.03  # no farther: the door's handle is close
    yield from hand.go([x, behind, 0.54], CLOSED, near=0.02)
    yield from hand.go([x, behind, 0.465], CLOSED, near=0.02)
    yield from hand.go([x, hand.world.link_box("base_link")[0][1] - 0.06, 0.465], CLOSED, speed=0.5)
    yield from hand.withdraw(CLOSED)
    yield from hand.stay(4, CLOSED)


def _plans() -> dict[str, Plan]:
    """The plan of every task."""
    plans: dict[str, Plan] = {
        "move_slider_left": partial(slide_door, side=-1),
        "move_slider_right": partial(slide_door, side=1),
        "open_drawer": open_drawer,
        "close_drawer": close_drawer,
        "place_in_slider": place_in_cabinet,
        "place_in_drawer": place_in_drawer,
        "stack_block": stack,
        "unstack_block": unstack,
        "turn_on_lightbulb": switch_on,
        "turn_off_lightbulb": switch_off,
        "turn_on_led": press_button,
        "turn_off_led": press_button,
        "push_into_drawer": push_into_drawer,
    }
    for colour in COLOURS:
        for name, side in (("left", 1), ("right", -1)):
            plans[f"rotate_{colour}_block_{name}"] = partial(rotate, colour=colour, side=side)
            plans[f"push_{colour}_block_{name}"] = partial(push, colour=colour, side=-side)
        plans[f"lift_{colour}_block_table"] = partial(lift, colour=colour)
        plans[f"lift_{colour}_block_drawer"] = partial(lift, colour=colour)
        plans[f"lift_{colour}_block_slider"] = partial(lift_from_cabinet, colour=colour)
    return plans


PLANS = _plans()
