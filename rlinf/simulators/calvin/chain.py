"""Counts how far an episode has come through its tasks: one, or five in a row. Knows nothing of the simulator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Chain:
    """The tasks of an episode, to be solved in order; a task that takes longer than `step_limit` ends the chain."""

    tasks: tuple[str, ...]
    step_limit: int = 0  # control steps per task; 0: none
    solved: int = 0
    steps: int = 0  # since the current task began
    failed: bool = False

    @property
    def complete(self) -> bool:
        """Whether every task was solved."""
        return self.solved == len(self.tasks)

    @property
    def over(self) -> bool:
        """Whether the chain has ended: solved completely, or failed."""
        return self.complete or self.failed

    @property
    def just_solved(self) -> bool:
        """Whether the last step solved a task."""
        return self.solved > 0 and self.steps == 0

    @property
    def position(self) -> int:
        """Index of the current task; the last one's when there is nothing left."""
        return min(self.solved, len(self.tasks) - 1)

    @property
    def task(self) -> str:
        """Name of the current task."""
        return self.tasks[self.position]

    def count_step(self, solved: bool) -> None:
        """Count one control step, in which the current task was solved or not."""
        assert not self.over
        self.steps += 1
        if solved:
            self.solved, self.steps = self.solved + 1, 0
        elif self.step_limit and self.steps >= self.step_limit:
            self.failed = True

    def metrics(self) -> dict[str, float]:
        """avg_len, success_len_1.., and the outcome of every task that was tried; of a single task only its failure.

        fail_once and fail_at_end where there is a limit to fail at; a failed chain stays so.
        """
        values = dict.fromkeys(("fail_once", "fail_at_end"), float(self.failed)) if self.step_limit else {}
        if len(self.tasks) == 1:
            return values
        values |= {"avg_len": float(self.solved)}
        values |= {f"success_len_{n}": float(self.solved >= n) for n in range(1, len(self.tasks) + 1)}
        tried = self.tasks[: self.solved + 1]
        return values | {f"task/{t}/success_once": float(i < self.solved) for i, t in enumerate(tried)}
