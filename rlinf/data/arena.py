"""The replay arena: one rollout rank's experience, written in place as it happens, read in place by the actor.

Letters: T chunks, B columns (envs of the rank x stages x rollout epochs), C actions per chunk, A action dims, V values.
"""

from __future__ import annotations

import torch

from rlinf.data.layout import Columns, row_numbers
from rlinf.data.types import EnvStep, PolicyOutput, Trajectory

Tensor = torch.Tensor


class RowCache:
    """Rows of pure functions of frozen weights (prefix KV), kept while a byte budget lasts, recomputed otherwise."""

    def __init__(self, num_rows: int, budget_bytes: int) -> None:
        self.num_rows, self.budget_bytes = num_rows, budget_bytes
        self.num_bytes = 0
        self._store: dict[str, Tensor] = {}
        self._held = torch.zeros(num_rows, dtype=torch.bool)
        self._slot = torch.zeros(num_rows, dtype=torch.long)
        self._used = 0

    def put(self, rows: Tensor, values: dict[str, Tensor]) -> None:
        """Keep `values` [n, ...] for `rows`, as many as still fit."""
        if not self._store:
            row_bytes = sum(v[0].numel() * v.element_size() for v in values.values())
            capacity = min(self.num_rows, self.budget_bytes // max(row_bytes, 1))
            if capacity == 0:
                return
            self._store = {k: v.new_empty((capacity, *v.shape[1:])) for k, v in values.items()}
            self.num_bytes = capacity * row_bytes
        capacity = len(next(iter(self._store.values())))
        fits = min(len(rows), capacity - self._used)
        if fits <= 0:
            return
        rows = rows[:fits]
        slots = torch.arange(self._used, self._used + fits)
        for key, value in values.items():
            self._store[key][slots] = value[:fits]
        self._held[rows], self._slot[rows] = True, slots
        self._used += fits

    def get(self, rows: Tensor) -> dict[str, Tensor] | None:
        """The rows' values, or None unless all of them are held."""
        if not self._store or not bool(self._held[rows].all()):
            return None
        slots = self._slot[rows]
        return {k: v[slots] for k, v in self._store.items()}

    def held(self, rows: Tensor) -> Tensor:
        """Which of the rows are kept, bool [n]."""
        return self._held[rows]

    def clear(self) -> None:
        """Forget everything; the memory is reused."""
        self._held.zero_()
        self._used = 0


class Arena:
    """Preallocated [T, B, ...] storage, sized by the first outputs written to it."""

    def __init__(self, num_chunks: int, columns: Columns, num_actions: int, *, cache_bytes: int = 0) -> None:
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
        self.cache = RowCache(T * B, cache_bytes)

    def write_output(self, t: int, stage: int, epoch: int, out: PolicyOutput) -> None:
        """Store what the policy did at chunk t."""
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
        """Store what the env answered to chunk t."""
        self._put(self.rewards[t], stage, epoch, step.rewards)
        self._put(self.terminated[t], stage, epoch, step.terminated)
        self._put(self.truncated[t], stage, epoch, step.truncated)
        self._put(self.valid[t], stage, epoch, step.valid)
        self._put(self.lost[t], stage, epoch, step.lost)
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
        return Trajectory(
            rewards=self.rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            valid=self.valid,
            lost=self.lost,
            logprobs=self.logprobs,
            values=self.values,
            final_values=self.final_values,
            replay=self.replay,
        )

    def num_bytes(self) -> int:
        """Bytes held, the cache included."""
        return (self.trajectory().num_bytes() if self.logprobs is not None else 0) + self.cache.num_bytes

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
