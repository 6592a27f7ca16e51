"""The messages that travel between workers.

Letters: B envs in a call, C actions per chunk, A action dims, S state dims, N wrist cameras, T chunks in a rollout,
V values per chunk (1, or C for an action-level critic), K columns of the simulator's privileged state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from rlinf.data.struct import TensorStruct

Tensor = torch.Tensor


@dataclass(frozen=True)
class ChunkIndex:
    """Which chunk of actions of a run: it finds the chunk's rows in the arena and keys its random numbers."""

    step: int  # training step, counted from 0
    epoch: int  # rollout epoch within the step
    chunk: int  # chunk within the epoch; the number of chunks stands for the observation after the last one


@dataclass(frozen=True)
class Observation(TensorStruct):
    """What a policy sees, as the simulator gave it; resizing is the policy's business, on its own device."""

    images: Tensor  # u8 [B, H, W, 3]
    wrist_images: Tensor | None  # u8 [B, N, h, w, 3]
    states: Tensor | None  # f32 [B, S]
    task_descriptions: list[str]
    critic_state: Tensor | None = None  # f32 [B, K + 1]; privileged: K columns, then the share of the episode passed


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode; metrics, evaluation tables and reports are all computed from these."""

    suite: str
    task: str
    reset_id: int
    seed: int
    env_id: int  # global index of the env that played it
    steps: int  # primitive steps until the episode ended
    episode_return: float
    success_once: bool
    success_at_end: bool
    extra: dict[str, float] = field(default_factory=dict)  # e.g. subtasks solved, grasped
    first_call: int = 0  # chunks that its envs had played when it began
    calls: int = 0  # chunks it took
    instructions: tuple[tuple[int, str], ...] = ()  # (chunk of the episode, what the policy is told from then on)
    video: str | None = None  # the file that shows it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EnvStep(TensorStruct):
    """The result of one chunk (or of a reset, where rewards and flags are zero)."""

    obs: Observation
    rewards: Tensor  # f32 [B, C]
    terminated: Tensor  # bool [B, C]
    truncated: Tensor  # bool [B, C]
    valid: Tensor  # bool [B, C]; False where nothing was simulated: a lost step, or an env that waits for a reset
    lost: Tensor  # bool [B]; True where a simulator died in this chunk: the whole partial episode is worthless
    final_obs: Observation | None = None  # rows in the order of final_rows
    final_rows: Tensor | None = None  # i64 [M]; rows whose episode ended in the chunk and that were reset
    trials: Tensor | None = None  # i64 [B, 2], evaluations only: each row's reset id, and chunks its trial has played

    @classmethod
    def start(cls, obs: Observation, chunk_size: int, trials: Tensor | None = None) -> EnvStep:
        """Where a rollout starts: an observation, and no results of a chunk before it."""
        flags = torch.zeros((len(obs), chunk_size), dtype=torch.bool)
        return cls(
            obs=obs,
            rewards=torch.zeros(flags.shape),
            terminated=flags,
            truncated=flags.clone(),
            valid=torch.ones_like(flags),
            lost=torch.zeros(len(obs), dtype=torch.bool),
            trials=trials,
        )

    def __getitem__(self, index: Any) -> EnvStep:
        """Rows by slice; the finished episodes of the slice come along."""
        rows = TensorStruct.__getitem__(replace(self, final_obs=None, final_rows=None), index)
        if self.final_rows is None or self.final_obs is None:
            return rows
        lo, hi, _ = index.indices(len(self))
        keep = (self.final_rows >= lo) & (self.final_rows < hi)
        if not keep.any():
            return rows
        return replace(rows, final_obs=self.final_obs[keep], final_rows=self.final_rows[keep] - lo)

    @classmethod
    def cat(cls, parts: Sequence[EnvStep], dim: int = 0) -> EnvStep:
        """Parts one after another; finished episodes are renumbered."""
        if len(parts) == 1:
            return parts[0]
        joined = super().cat([replace(part, final_obs=None, final_rows=None) for part in parts], dim)
        offset, finals, rows = 0, [], []
        for part in parts:
            if part.final_rows is not None and part.final_obs is not None:
                finals.append(part.final_obs)
                rows.append(part.final_rows + offset)
            offset += len(part)
        if not rows:
            return joined
        return replace(joined, final_obs=Observation.cat(finals), final_rows=torch.cat(rows))


@dataclass(frozen=True)
class PolicyOutput(TensorStruct):
    """What `Policy.predict` returns. Only `actions` travel to the env; the rest stays with the rollout rank."""

    actions: Tensor  # f32 [B, C, A] un-normalised, in the policy's own convention; envs/bridge.py converts them
    logprobs: Tensor  # f32 [B, C, A]
    values: Tensor | None  # f32 [B, V]
    replay: dict[str, Tensor]  # what evaluate() needs again
    cache: dict[str, Tensor] | None = None  # pure functions of frozen weights (prefix KV), kept while memory lasts


@dataclass(frozen=True)
class PolicyEval(TensorStruct):
    """What `Policy.evaluate` returns, with gradients."""

    logprobs: Tensor  # f32 [N, C, A]
    values: Tensor | None  # f32 [N, V]
    entropy: Tensor | None  # f32 [N, C, A], or [N, 1, 1] of a policy that has one number per chunk


@dataclass(frozen=True)
class Trajectory(TensorStruct):
    """One training step's experience of a rollout rank; data/layout.py says which column is which env and epoch."""

    rewards: Tensor  # f32 [T, B, C]
    terminated: Tensor  # bool [T, B, C]
    truncated: Tensor  # bool [T, B, C]
    valid: Tensor  # bool [T, B, C]
    lost: Tensor  # bool [T, B]
    logprobs: Tensor  # f32 [T, B, C, A]
    values: Tensor | None  # f32 [T + 1, B, V]
    final_values: Tensor | None  # f32 [T, B, V]; V(final_obs) where an episode ended and was reset, else 0
    replay: dict[str, Tensor]  # [T, B, ...]

    def columns(self, columns: slice) -> Trajectory:
        """Views of some columns."""
        return self.map(lambda x: x[:, columns])


@dataclass(frozen=True)
class ArenaRows:
    """A reference to experience that its reader finds in the arena of a rollout rank of the same process."""

    rank: int
    columns: slice
