"""The judge of many worlds at once, of which some are reset while others go on. Letters: B envs, R rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf.simulators.maniskill.judge import Judge, Judgement


class BatchJudge(Judge):
    """The rule of `Judge` on tensors [B]; each step of an env counts once, however often it is judged."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        reach, stack = torch.zeros((2, num_envs), device=device)
        self.judged, grasped_steps = torch.zeros((2, num_envs), dtype=torch.int32, device=device)  # judged: steps
        super().__init__(
            reach, stack, grasped_steps, Judgement(*torch.zeros((4, num_envs), dtype=torch.bool, device=device))
        )

    def begin(self, rows: Sequence[int], object_sizes: Tensor, plate_sizes: Tensor) -> None:
        """Begin new episodes in R rows; sizes f32 [R, 3] are those of the bounding boxes."""
        limits = self.limits(plate_sizes.amax(1), plate_sizes[:, 2], object_sizes[:, 2])
        self.reach[rows], self.stack[rows] = limits
        for memory in self.memory().values():
            memory[rows] = 0

    def is_new(self, elapsed: Tensor) -> Tensor:
        """Where a step has been made since the last judgement, bool [B]."""
        return elapsed > self.judged

    def judge(self, elapsed: Tensor, away: Tensor, force: Tensor, grasping: Tensor) -> Judgement:
        """Judge all envs after `elapsed` i32 [B] steps.

        away: object minus plate f32 [B, 3], m; force: on the plate f32 [B, 3], N; grasping: by both fingers, bool [B]
        """
        new, grasped_steps, before = self.is_new(elapsed), self.grasped_steps, self.judgement
        now = self.step(
            sideways=torch.linalg.norm(away[:, :2], dim=1),
            above=away[:, 2],
            force=torch.linalg.norm(force, dim=1),
            grasping=grasping,
        )
        on_plate = now.success & (elapsed > 0)
        grasped, held = (torch.where(new, *pair) for pair in zip(now[1:3], before[1:3], strict=True))
        self.grasped_steps = torch.where(new, self.grasped_steps, grasped_steps)
        self.judged = torch.where(new, elapsed, self.judged)
        self.judgement = Judgement(on_plate, grasped, held, on_plate)
        return Judgement(*(flag.clone() for flag in self.judgement))  # rows of its own are overwritten by `begin`

    def memory(self) -> dict[str, Tensor]:
        """What is remembered of the running episodes, [B] each; writing to a row changes it."""
        _, grasped, held, _ = self.judgement
        return {"judged": self.judged, "grasps": self.grasped_steps, "grasped": grasped, "held": held}
