"""What both back ends tell beside the picture: distances of an episode, and the columns that only a critic sees.

Arguments are arrays of numpy or tensors of torch, positions [..., 3] and poses [..., 7] (position, quaternion w x y z).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DISTANCES = ("gripper_carrot_dist", "gripper_plate_dist", "carrot_plate_dist")  # as published
CRITIC_COLUMNS = 7 + 3 + 7 + 3 + 3 + 3 + 8 + 4  # of `critic_columns`, in its order
FAR = 3.0  # m; what a critic sees of places ends there: an object shot away between the fingers must not blind it


def distances(norm: Callable[[Any], Any], gripper: Any, object_: Any, plate: Any) -> dict[str, Any]:
    """Metres between gripper, object and plate; `norm` is the library's norm over the last dimension."""
    away = (gripper - object_, gripper - plate, object_ - plate)
    return dict(zip(DISTANCES, map(norm, away), strict=True))


def critic_columns(object_pose: Any, plate: Any, gripper_pose: Any, size: Any, qpos: Any, grasp: Any) -> list[Any]:
    """What a critic sees, column after column, to be joined along the last dimension.

    Object pose 7, plate position 3, gripper pose 7, from gripper to object 3, from object to plate 3, size of the
    object's box 3, joints 8, and `grasp` 4: grasped now, steps in a row / 5 up to 1, grasped once, held once.
    """
    between = [object_pose[..., :3] - gripper_pose[..., :3], plate - object_pose[..., :3]]
    return [object_pose, plate, gripper_pose, *between, size, qpos, grasp]
