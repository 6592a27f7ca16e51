"""The arena: memory for one rollout rank's experience, written in place as it happens, read in place by the actor.

Letters: T chunks, B columns (envs of the rank x stages x rollout epochs), C actions per chunk, A action dims, V values.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from rlinf.data.layout import Columns, row_numbers
from rlinf.data.row_cache import Measure, RowCache, Shares
from rlinf.data.types import EnvStep, PolicyOutput, Trajectory

Tensor = torch.Tensor


class Arena:
    """Tensors [T, B, ...] of a training step; those of the policy's outputs are allocated by the first of them."""

    def __init__(
        self, num_chunks: int, columns: Columns, num_actions: int, *, cache: Shares | Measure = Shares(0)
    ) -> None:
        """`cache` says what may be kept of the policy's frozen parts."""
        T, B, C = num_chunks, len(columns), num_actions
        self.num_chunks, self.columns = T, columns
        self.rewards = torch.zeros(T, B, C)
        self.terminated = torch.zeros(T, B, C, dtype=torch.bool)
        self.truncated = torch.zeros(T, B, C, dtype=torch.bool)
        self.valid = torch.zeros(T, B, C, dtype=torch.bool)
        self.lost = torch.zeros(T, B, dtype=torch.bool)
        self.logprobs: Tensor | None = None
        self.values: Tensor | None = None
        self.final_values: Tensor | None = None
        self.replay: dict[str, Tensor] = {}
        self.cache = RowCache(T * B, cache)

    def write_output(self, t: int, stage: int, epoch: int, out: PolicyOutput) -> None:
        """Store the policy's output for chunk t of the envs of one stage and epoch."""
        if self.logprobs is None:
            self._allocate(out)
        assert self.logprobs is not None
        self._put(self.logprobs[t], stage, epoch, out.logprobs)
        if self.values is not None and out.values is not None:
            self._put(self.values[t], stage, epoch, out.values)
        for key, value in out.replay.items():
            self._put(self.replay[key][t], stage, epoch, value)
        if out.cache is not None:
            rows = row_numbers(t, self.columns.numbers(stage, epoch), len(self.columns))
            self.cache.put(torch.from_numpy(rows), out.cache)

    def write_result(self, t: int, stage: int, epoch: int, step: EnvStep) -> None:
        """Store the env's rewards and flags of chunk t; values of final observations are 0 until they are written."""
        for name in ("rewards", "terminated", "truncated", "valid", "lost"):
            self._put(getattr(self, name)[t], stage, epoch, getattr(step, name))
        if self.final_values is not None:
            self.columns.part(self.final_values[t], stage, epoch).zero_()

    def write_final_values(self, t: int, stage: int, epoch: int, rows: Tensor, values: Tensor) -> None:
        """Store V(final_obs) for the rows of this call whose episode ended in chunk t and was reset."""
        assert self.final_values is not None
        columns = torch.from_numpy(self.columns.numbers(stage, epoch))
        self.final_values[t, columns[rows]] = values.cpu()

    def write_last_values(self, stage: int, epoch: int, values: Tensor) -> None:
        """Store V of the observation after the last chunk."""
        assert self.values is not None
        self._put(self.values[self.num_chunks], stage, epoch, values)

    def trajectory(self) -> Trajectory:
        """Views of everything written; valid until the next rollout overwrites them."""
        assert self.logprobs is not None
        return Trajectory(**{field.name: getattr(self, field.name) for field in fields(Trajectory)})

    def _put(self, x: Tensor, stage: int, epoch: int, value: Tensor) -> None:
        part = self.columns.part(x, stage, epoch)
        part.copy_(value.reshape(part.shape))

    def _allocate(self, out: PolicyOutput) -> None:
        T, B = self.num_chunks, len(self.columns)
        self.logprobs = torch.zeros((T, B, *out.logprobs.shape[1:]))
        if out.values is not None:
            self.values = torch.zeros((T + 1, B, *out.values.shape[1:]))
            self.final_values = torch.zeros((T, B, *out.values.shape[1:]))
        self.replay = {
            k: torch.zeros((T, B, *v.shape[1:]), dtype=v.dtype, device=v.device) for k, v in out.replay.items()
        }
