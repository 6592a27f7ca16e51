"""Which entries of a rollout count: after an episode's end, in lost episodes, in uninformative groups.

Letters: T chunks, B envs (columns), C actions per chunk, n steps, K = 1 (chunk level) or C (action level).
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def to_steps(x: Tensor) -> Tensor:
    """[T, B, K] -> [T * K, B]: one row per step in time order."""
    return x.transpose(1, 2).flatten(0, 1)


def from_steps(x: Tensor, num_chunks: int) -> Tensor:
    """[T * K, B] -> [T, B, K], the inverse of `to_steps`."""
    return x.unflatten(0, (num_chunks, -1)).transpose(1, 2)


def loss_mask(dones: Tensor) -> Tensor:
    """Steps that belong to the first episode of each column, its last step included.

    dones: bool [T + 1, B, C]; row 0 tells how the columns were before the rollout. Returns bool [T, B, C].
    """
    num_chunks, num_actions = dones.shape[0] - 1, dones.shape[2]
    steps = to_steps(dones)[-(num_chunks * num_actions + 1) :]  # [n + 1, B]; steps[t]: ended before step t
    return from_steps(steps[:-1].cumsum(0) == 0, num_chunks)


def invalid_episode_mask(valid: Tensor, lost: Tensor, dones: Tensor) -> Tensor:
    """Steps that count for nothing, bool [T, B, C]: never simulated, or of an episode whose simulator died.

    valid: bool [T, B, C]; lost: bool [T, B]; dones: bool [T, B, C]. A loss voids its episode back to the previous end.
    """
    ended = dones.any(-1)  # [T, B]
    void = lost.clone()
    for t in reversed(range(len(lost) - 1)):
        void[t] |= void[t + 1] & ~ended[t]
    return ~valid | void[..., None]


def filter_groups(
    rewards: Tensor, mask: Tensor | None, alive: Tensor, *, group_size: int, lower: float, upper: float
) -> Tensor:
    """Columns bool [B] whose group of neighbours has a mean return within [lower, upper].

    rewards: f32 [T, B, C]; mask: bool [T, B, K]; alive: bool [B], the members that have a return at all.
    """
    returns = (rewards if mask is None else rewards * mask).sum((0, 2))  # [B]
    mean, _, _ = group_statistics(returns, alive, group_size)
    return (mean >= lower) & (mean <= upper)


def group_statistics(scores: Tensor, alive: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased std and count over the live members of each column's group, each [B]."""
    if len(scores) % group_size:
        raise ValueError(f"{len(scores)} envs do not divide into groups of algorithm.group_size={group_size}")
    s, w = scores.view(-1, group_size), alive.view(-1, group_size).to(scores.dtype)
    count = w.sum(1, keepdim=True)
    mean = (s * w).sum(1, keepdim=True) / count.clamp(min=1)
    std = (((s - mean) ** 2 * w).sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return tuple(x.expand_as(s).reshape(-1) for x in (mean, std, count))  # type: ignore[return-value]
