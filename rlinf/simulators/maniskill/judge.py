"""When a put-on-plate episode is solved, and what that pays: one rule for both back ends.

Quantities are numbers (one world) or tensors [B] (B worlds at once): nothing but arithmetic and comparisons is used.
`nearness`, which only training asks for, takes numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

GRASP_FORCE, GRASP_ANGLE, HELD_STEPS = 0.5, 85.0, 5  # N at each finger, degrees off its axis, steps in a row
ON_PLATE_MARGIN, ON_PLATE_HEIGHT, ON_PLATE_FORCE = 0.01, 0.05, 0.03  # m sideways, m above it, N
NEAR = 0.06  # m over which nearness falls to 1/e


class Judgement(NamedTuple):
    """What holds after a step; the two about grasping stay true for the rest of the episode. Names as published."""

    success: Any = False
    is_src_obj_grasped: Any = False
    consecutive_grasp: Any = False  # grasped for HELD_STEPS steps in a row
    src_on_target: Any = False  # all that success asks for: the hand may still hold the object


NOTHING = Judgement()  # when an episode begins


@dataclass
class Judge:
    """The rule of success, and what it remembers of the running episode."""

    reach: Any  # m that the object's centre may be away from the plate's, sideways
    stack: Any  # m that it may be above the plate's centre
    grasped_steps: Any = 0  # in a row, up to now
    judgement: Judgement = NOTHING

    @staticmethod
    def limits(plate_width: Any, plate_height: Any, object_height: Any) -> tuple[Any, Any]:
        """`reach` and `stack` for bounding boxes of these sizes, m; all stand upright when an episode starts."""
        return plate_width / 2 + ON_PLATE_MARGIN, (plate_height + object_height) / 2 + ON_PLATE_HEIGHT

    def step(self, *, sideways: Any, above: Any, force: Any, grasping: Any) -> Judgement:
        """Judge the episode after a step, and remember what the next step needs.

        sideways, above: how far the object's centre is from the plate's, m; force: between the two, N; grasping:
        whether both fingers press on the object.
        """
        on_plate = (sideways <= self.reach) & (above > 0) & (above <= self.stack) & (force > ON_PLATE_FORCE)
        self.grasped_steps = (self.grasped_steps + 1) * grasping
        self.judgement = Judgement(
            success=on_plate,
            is_src_obj_grasped=self.judgement.is_src_obj_grasped | grasping,
            consecutive_grasp=self.judgement.consecutive_grasp | (self.grasped_steps >= HELD_STEPS),
            src_on_target=on_plate,
        )
        return self.judgement


def level(reward_mode: str, judged: Judgement) -> Any:
    """The published reward level, of which callers pay the differences."""
    if reward_mode == "raw":
        return 0.0 * judged.success
    if reward_mode == "only_success":
        return 1.0 * judged.success
    grasped = judged.is_src_obj_grasped
    return 0.1 * grasped + 0.1 * judged.consecutive_grasp + 1.0 * (judged.success & grasped)


def nearness(hand_to_object: float, object_to_plate: float, *, holding: bool, success: bool) -> float:
    """How near an episode is to being solved, 0 to 1, from metres between the centres and whether the hand holds it.

    The first half is for the hand's way to the object, the second for the held object's way to the plate.
    """
    if success:
        return 1.0
    return 0.5 * (1.0 + math.exp(-object_to_plate / NEAR) if holding else math.exp(-hand_to_object / NEAR))
