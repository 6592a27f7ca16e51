"""The replay arena: one rollout rank's experience, written in place as it happens, read in place by the actor.

Letters: T chunks, B columns (rollout epochs x stages x envs of the rank), C actions per chunk, A action dims, V values.
"""

from __future__ import annotations

import torch

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

    def __init__(self, num_chunks: int, num_columns: int, num_actions: int, *, cache_bytes: int = 0) -> None:
        T, B, C = num_chunks, num_columns, num_actions
        self.num_chunks, self.num_columns = T, B
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

    def write_output(self, t: int, columns: slice, out: PolicyOutput) -> None:
        """Store what the policy did at chunk t."""
        if self.logprobs is None:
            self._allocate(out)
        assert self.logprobs is not None
        self.logprobs[t, columns] = out.logprobs
        if self.values is not None and out.values is not None:
            self.values[t, columns] = out.values
        for key, value in out.replay.items():
            self.replay[key][t, columns] = value
        if out.cache is not None:
            rows = t * self.num_columns + torch.arange(columns.start, columns.stop)
            self.cache.put(rows, out.cache)

    def write_result(self, t: int, columns: slice, step: EnvStep) -> None:
        """Store what the env answered to chunk t."""
        self.rewards[t, columns] = step.rewards
        self.terminated[t, columns] = step.terminated
        self.truncated[t, columns] = step.truncated
        self.valid[t, columns] = step.valid
        self.lost[t, columns] = step.lost
        if self.final_values is not None:
            self.final_values[t, columns] = 0.0

    def write_final_values(self, t: int, columns: slice, rows: Tensor, values: Tensor) -> None:
        """Store V(final_obs) for the rows of this call whose episode ended in chunk t and was reset."""
        assert self.final_values is not None
        self.final_values[t, columns.start + rows] = values.cpu()

    def write_last_values(self, columns: slice, values: Tensor) -> None:
        """Store V of the observation after the last chunk."""
        assert self.values is not None
        self.values[self.num_chunks, columns] = values.cpu()

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

    def _allocate(self, out: PolicyOutput) -> None:
        T, B = self.num_chunks, self.num_columns
        self.logprobs = torch.zeros((T, B, *out.logprobs.shape[1:]))
        if out.values is not None:
            self.values = torch.zeros((T + 1, B, *out.values.shape[1:]))
            self.final_values = torch.zeros((T, B, *out.values.shape[1:]))
        self.replay = {
            k: torch.zeros((T, B, *v.shape[1:]), dtype=v.dtype, device=v.device) for k, v in out.replay.items()
        }
