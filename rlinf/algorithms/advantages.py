"""From a rollout to what the update aims at: advantages, value targets and the mask of entries that count.

Letters: T chunks, B envs (columns), C actions per chunk, V values per chunk, n steps, K = 1 (chunk level) or C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.algorithms.masks import (
    filter_groups,
    from_steps,
    group_statistics,
    invalid_episode_mask,
    loss_mask,
    to_steps,
)
from rlinf.algorithms.registry import ADVANTAGES
from rlinf.data.struct import TensorStruct
from rlinf.data.types import Trajectory
from rlinf.errors import UserError

Tensor = torch.Tensor
AllReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Targets(TensorStruct):
    """What the loss compares the policy with; every field is [T, B, K], or [N, K] once rows are drawn."""

    advantages: Tensor  # f32
    returns: Tensor | None  # f32; what the critic should have said
    mask: Tensor | None  # bool; None: everything counts
    mask_sum: Tensor | None  # f32; n_i, primitive steps that count in the row's trajectory; None: no weighting


@dataclass(frozen=True)
class Steps:
    """A rollout on one time axis, as estimators read it."""

    rewards: Tensor  # f32 [n, B]
    dones: Tensor  # bool [n + 1, B]; dones[t + 1]: the episode ended with step t
    values: Tensor | None  # f32 [n + 1, B]
    mask: Tensor | None  # bool [n, B]
    alive: Tensor  # bool [B]; False: a simulator died, so the column cannot be compared with its group


def identity(x: Tensor) -> Tensor:
    """The all-reduce of a single rank."""
    return x


def gae(steps: Steps, cfg: AlgorithmConfig, all_reduce: AllReduce = identity) -> tuple[Tensor, Tensor | None]:
    """Generalised advantages: A_t = d_t + g l A_{t+1} with d_t = r_t + g V_{t+1} - V_t, cut at episode ends."""
    if steps.values is None:
        raise UserError("algorithm.adv_type gae needs a critic: set actor.model.add_value_head: true")
    r, V, go_on = steps.rewards, steps.values, (~steps.dones).to(steps.rewards.dtype)
    advantages, last = torch.zeros_like(r), torch.zeros_like(r[0])
    for t in reversed(range(len(r))):
        delta = r[t] + cfg.gamma * V[t + 1] * go_on[t + 1] - V[t]
        last = delta + cfg.gamma * cfg.gae_lambda * go_on[t + 1] * last
        advantages[t] = last
    returns = advantages + V[:-1]
    if cfg.normalize_advantages:
        advantages = normalize(advantages, steps.mask, all_reduce)
    return advantages, returns


def grpo(steps: Steps, cfg: AlgorithmConfig, all_reduce: AllReduce = identity) -> tuple[Tensor, Tensor | None]:
    """Group-relative advantages: the return of a column's first episode, standardised among its group."""
    first = (steps.dones[1:-1].cumsum(0) == 0).to(steps.rewards.dtype)  # [n - 1, B]
    scores = steps.rewards[0] + (steps.rewards[1:] * first).sum(0)  # [B]
    mean, std, _ = group_statistics(scores, steps.alive, cfg.group_size)
    relative = (scores - mean) / (std + 1e-6) * steps.alive
    advantages = relative.expand_as(steps.rewards)
    return advantages.clone() if steps.mask is None else advantages * steps.mask, None


def normalize(x: Tensor, mask: Tensor | None, all_reduce: AllReduce = identity) -> Tensor:
    """Shift and scale to mean 0, std 1 over the unmasked entries of all ranks (`all_reduce` sums over them)."""
    counted = (x if mask is None else x[mask]).double()
    moments = torch.stack([torch.tensor(counted.numel(), dtype=torch.float64), counted.sum(), counted.square().sum()])
    count, total, squares = all_reduce(moments.to(x.device))
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    return ((x - mean) / (variance.sqrt() + 1e-5)).to(x.dtype)


def bootstrap(traj: Trajectory, terminated: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Rewards [T, B, C] plus gamma V(final_obs) where an episode was cut off (`standard`) or ended (`always`)."""
    if traj.final_values is None:
        return traj.rewards
    if cfg.bootstrap_type == "always":
        cut = terminated | traj.truncated
    else:  # success on the very last step is an end, not a cut
        cut = traj.truncated & ~terminated.any(-1, keepdim=True)
    first = cut & (cut.cumsum(-1) == 1)
    return traj.rewards + cfg.gamma * traj.final_values[..., :1] * first


def estimate(
    rewards: Tensor,
    dones: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    alive: Tensor,
    cfg: AlgorithmConfig,
    all_reduce: AllReduce = identity,
) -> tuple[Tensor, Tensor | None]:
    """Advantages and returns [T, B, K] by `cfg.adv_type`.

    rewards: f32 [T, B, C]; dones: bool [T + 1, B, C]; values: f32 [T + 1, B, K]; mask: bool [T, B, K]; alive: bool [B].
    """
    num_chunks = len(rewards)
    if cfg.reward_type == "chunk_level":
        rewards, dones = rewards.sum(-1, keepdim=True), dones.any(-1, keepdim=True)
    num_steps = num_chunks * rewards.shape[-1]
    if values is not None and values.shape[-1] != rewards.shape[-1]:
        raise UserError(
            f"actor.model.value_type gives {values.shape[-1]} values per chunk, but algorithm.reward_type "
            f"{cfg.reward_type} has {rewards.shape[-1]} rewards per chunk: use the same level for both"
        )
    steps = Steps(
        rewards=to_steps(rewards),
        dones=to_steps(dones)[-(num_steps + 1) :],
        values=None if values is None else to_steps(values)[: num_steps + 1],
        mask=None if mask is None else to_steps(mask),
        alive=alive,
    )
    advantages, returns = ADVANTAGES.find(cfg.adv_type)(steps, cfg, all_reduce)
    return from_steps(advantages, num_chunks), None if returns is None else from_steps(returns, num_chunks)


def compute_targets(
    traj: Trajectory,
    cfg: AlgorithmConfig,
    *,
    auto_reset: bool,
    ignore_terminations: bool,
    all_reduce: AllReduce = identity,
    all_max: AllReduce = identity,
    normalize_over: AllReduce | None = None,
) -> tuple[Targets, dict[str, Tensor]]:
    """Targets of a rollout and its metrics over all ranks (`all_reduce` sums over them, `all_max` takes the largest).

    `normalize_over` sums over the ranks whose advantages are normalised together; all of them by default.
    """
    terminated = torch.zeros_like(traj.terminated) if ignore_terminations else traj.terminated
    ended = terminated | traj.truncated  # [T, B, C]
    invalid = invalid_episode_mask(traj.valid, traj.lost, ended)
    alive = ~traj.lost.any(0)  # [B]; what a column plays after a loss starts elsewhere than its group
    before = torch.zeros_like(ended[:1])
    mask, mask_sum = None, None
    if not auto_reset and not ignore_terminations:
        mask = loss_mask(torch.cat([before, ended])) & ~invalid
        mask_sum = mask.sum((0, 2)).float()  # [B]
    elif all_max(invalid.any()[None].float()).any():  # a mask on one rank is a mask on all: they count together
        mask = ~invalid
    if mask is not None and cfg.reward_type == "chunk_level":
        mask = mask.any(-1, keepdim=True)  # [T, B, 1]
    level = 1 if cfg.reward_type == "chunk_level" else ended.shape[-1]
    metrics: dict[str, Tensor] = {}
    if cfg.filter_rewards:
        lower, upper = cfg.rewards_lower_bound, cfg.rewards_upper_bound
        keep = filter_groups(traj.rewards, mask, alive, group_size=cfg.group_size, lower=lower, upper=upper)
        kept = keep[None, :, None].expand(*ended.shape[:2], level)
        mask = kept.clone() if mask is None else mask & kept
        metrics["groups_kept"] = _mean(keep.float(), None, all_reduce)

    rewards = bootstrap(traj, terminated, cfg) if auto_reset else traj.rewards
    dones = torch.cat([before, ended | ~traj.valid])  # nothing may leak across steps that were never simulated
    advantages, returns = estimate(rewards, dones, traj.values, mask, alive, cfg, normalize_over or all_reduce)
    if mask_sum is not None:
        mask_sum = mask_sum[None, :, None].expand(*ended.shape[:2], level).contiguous()
    per_entry = rewards.sum(-1, keepdim=True) if level == 1 else rewards
    metrics["rewards"] = _mean(per_entry, mask, all_reduce)
    metrics["valid_fraction"] = _mean((torch.ones_like(per_entry) if mask is None else mask).float(), None, all_reduce)
    metrics |= _summary("advantages", advantages, mask, all_reduce, all_max)
    if returns is not None:
        metrics |= _summary("returns", returns, mask, all_reduce, all_max)
    return Targets(advantages=advantages, returns=returns, mask=mask, mask_sum=mask_sum), metrics


def _summary(name: str, x: Tensor, mask: Tensor | None, all_reduce: AllReduce, all_max: AllReduce) -> dict[str, Tensor]:
    counted = (x if mask is None else x[mask]).float()
    lowest = counted.new_tensor(-torch.inf)
    largest = torch.stack([counted.max(), -counted.min()]) if counted.numel() else torch.stack([lowest, lowest])
    top, bottom = all_max(largest)
    none = torch.isinf(top) & (top < 0)
    extremes = {f"{name}_max": torch.where(none, 0.0, top), f"{name}_min": torch.where(none, 0.0, -bottom)}
    return {f"{name}_mean": _mean(x, mask, all_reduce)} | extremes


def _mean(x: Tensor, mask: Tensor | None, all_reduce: AllReduce) -> Tensor:
    counted = (x if mask is None else x[mask]).double()
    total, count = all_reduce(torch.stack([counted.sum(), counted.new_tensor(counted.numel())]))
    return (total / count.clamp(min=1)).float()
