"""Where the fingers begin to move what a task is about. The expert goes there; a shaped reward pays for coming near."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from rlinf.simulators.calvin.expert_moves import Hand
from rlinf.simulators.calvin.tasks import COLOURS
from rlinf.simulators.contract import Array


def on_button(hand: Hand) -> Array:
    """The top of the button."""
    low, high = hand.world.link_box("button_link")
    x, y = (low + high)[:2] / 2
    return np.array([x, y, high[2]])


def behind_drawer_handle(hand: Hand) -> Array:
    """Between handle and drawer, from where closed fingers pull."""
    low, high = hand.world.link_box("drawer_link")
    return np.array([(low[0] + high[0]) / 2, low[1] + 0.055, 0.37])


def before_drawer_handle(hand: Hand) -> Array:
    """In front of the handle, from where closed fingers push."""
    low, high = hand.world.link_box("drawer_link")
    return np.array([(low[0] + high[0]) / 2, low[1] - 0.055, 0.36])


def beside_door_handle(hand: Hand, *, side: int) -> Array:
    """At the sliding door's handle, from where it is pushed to `side`: 1 is right."""
    return np.array([hand.middle("slide_link")[0] - side * 0.08, -0.015, 0.55])


def under_lever(hand: Hand) -> Array:
    """Under the lever of the lightbulb, from where it is lifted."""
    low, high = hand.world.link_box("switch_link")
    x, y, z = (low[0] + high[0]) / 2, low[1] + 0.02, high[2] - 0.03  # of the lever's end
    return np.array([x, y - 0.06, z - 0.035])


def over_lever(hand: Hand) -> Array:
    """Over the lever of the lightbulb, from where it is pressed down."""
    low, high = hand.world.link_box("switch_link")
    return np.array([(low[0] + high[0]) / 2, low[1] + 0.035, high[2] + 0.03])


def beside_block(hand: Hand, *, colour: str, side: int) -> Array:
    """Beside a block on the table, from where closed fingers push it to `side`: 1 is right."""
    x, y, _ = hand.block(colour)
    return np.array([x - side * (hand.half_extent(colour)[0] + 0.05), y, 0.455])


def _points() -> dict[str, Callable[[Hand], Array]]:
    """The point of every task that has one: not of those that begin with a block in the hand, nor of stacks."""
    points: dict[str, Callable[[Hand], Array]] = {
        "move_slider_left": partial(beside_door_handle, side=-1),
        "move_slider_right": partial(beside_door_handle, side=1),
        "open_drawer": behind_drawer_handle,
        "close_drawer": before_drawer_handle,
        "turn_on_lightbulb": under_lever,
        "turn_off_lightbulb": over_lever,
        "turn_on_led": on_button,
        "turn_off_led": on_button,
    }
    for colour in COLOURS:
        points[f"push_{colour}_block_left"] = partial(beside_block, colour=colour, side=-1)
        points[f"push_{colour}_block_right"] = partial(beside_block, colour=colour, side=1)
        grasped = [f"rotate_{colour}_block_{side}" for side in ("left", "right")]
        grasped += [f"lift_{colour}_block_{place}" for place in ("table", "drawer", "slider")]
        points |= dict.fromkeys(grasped, partial(Hand.grasp_point, colour=colour))
    return points


POINTS = _points()  # by task
