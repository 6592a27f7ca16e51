"""What holds in many envs at once: `stage.Judgement` in torch. Letters: B envs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf.simulators.maniskill.stage import HELD_STEPS, ON_PLATE_FORCE, ON_PLATE_HEIGHT, ON_PLATE_MARGIN


class Judge:
    """Remembers, per env, what must hold for success and how long the object has been grasped."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.reach, self.stack = torch.zeros((2, num_envs), device=device)  # m from the plate's centre, m above it
        self.judged, self.grasps = torch.zeros(
            (2, num_envs), dtype=torch.int32, device=device
        )  # steps; of them in a row
        self.grasped, self.held = torch.zeros((2, num_envs), dtype=torch.bool, device=device)  # once true, always true

    def begin(self, rows: Sequence[int], object_sizes: Tensor, plate_sizes: Tensor) -> None:
        """New episodes in R rows; sizes f32 [R, 3] of the bounding boxes."""
        self.reach[rows] = plate_sizes.amax(1) / 2 + ON_PLATE_MARGIN
        self.stack[rows] = (plate_sizes[:, 2] + object_sizes[:, 2]) / 2 + ON_PLATE_HEIGHT
        for memory in (self.judged, self.grasps, self.grasped, self.held):
            memory[rows] = 0

    def new(self, elapsed: Tensor) -> Tensor:
        """Where a step has been made since the last judgement, bool [B]."""
        return elapsed > self.judged

    def judge(self, elapsed: Tensor, away: Tensor, force: Tensor, grasping: Tensor) -> dict[str, Tensor]:
        """After `elapsed` i32 [B] steps: object minus plate f32 [B, 3], force on the plate f32 [B, 3], bool [B].

        Judging twice, or while other envs are reset, changes nothing.
        """
        new = self.new(elapsed)
        self.grasps = torch.where(new, (self.grasps + 1) * grasping, self.grasps)
        self.grasped |= new & grasping
        self.held |= self.grasps >= HELD_STEPS
        self.judged = torch.where(new, elapsed, self.judged)
        above = (torch.linalg.norm(away[:, :2], dim=1) <= self.reach) & (away[:, 2] > 0) & (away[:, 2] <= self.stack)
        on_plate = above & (torch.linalg.norm(force, dim=1) > ON_PLATE_FORCE) & (elapsed > 0)
        return {
            "success": on_plate,
            "src_on_target": on_plate,
            "is_src_obj_grasped": self.grasped.clone(),
            "consecutive_grasp": self.held.clone(),
        }

    def memory(self) -> dict[str, Tensor]:
        """All that `begin` does not know, [B] each; writing to a row changes it."""
        return {"judged": self.judged, "grasps": self.grasps, "grasped": self.grasped, "held": self.held}
