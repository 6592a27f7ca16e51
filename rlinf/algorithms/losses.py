"""PPO losses: clipped policy objective, clipped Huber value loss, entropy bonus, and the metrics of each.

Letters: N rows, C actions per chunk, A action dims, V values per chunk, K = 1 (chunk level) or C (action level).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlinf.algorithms.advantages import Targets
from rlinf.algorithms.config import AlgorithmConfig, Level
from rlinf.algorithms.logprobs import reduce_level
from rlinf.algorithms.registry import LOSSES
from rlinf.data.types import PolicyEval
from rlinf.errors import UserError

Tensor = torch.Tensor
Mean = tuple[Tensor, Tensor]  # value, number of entries behind it

VARIANCE = "critic/variance/"
"""Prefix of the raw sums behind the explained variance: count, {returns,errors}_sum, {returns,errors}_sq_sum."""


@dataclass(frozen=True)
class Averager:
    """Means over the entries that count; mask and weight broadcast to the entries."""

    mask: Tensor | None  # bool
    weight: Tensor | None  # max_episode_steps / n_i: every trajectory weighs the same

    def mean(self, x: Tensor) -> Mean:
        """Mean over unmasked entries, 0 where there are none."""
        if self.mask is None:
            return x.mean(), x.new_tensor(x.numel())
        x, mask = torch.broadcast_tensors(x, self.mask)
        count = self.count(mask).to(x.dtype)
        return x.masked_fill(~mask, 0.0).sum() / count.clamp(min=1), count

    def loss_mean(self, x: Tensor) -> Mean:
        """The mean to backpropagate: over all entries with trajectory weights where they exist, else `mean`."""
        if self.mask is None or self.weight is None:
            return self.mean(x)
        return (x.masked_fill(~self.mask, 0.0) * self.weight).mean(), x.new_tensor(x.numel())

    def count(self, mask: Tensor) -> Tensor:
        """The entries a masked mean divides by; `mask` has the shape of what is averaged."""
        return mask.sum()


@dataclass(frozen=True)
class Batch:
    """One micro batch, as every loss reads it."""

    new: PolicyEval
    old_logprobs: Tensor  # f32 [N, C, A]
    old_values: Tensor | None  # f32 [N, V]
    targets: Targets  # [N, K]
    max_episode_steps: int | None
    critic_only: bool = False  # critic warm-up: the policy does not learn yet
    proximal_logprobs: Tensor | None = None  # f32 [N, C, A]; under the weights the update began with, if others acted
    entropy_scale: float = 1.0  # the share of the entropy's mean over the share of the loss in the global batch

    @property
    def centre(self) -> Tensor:
        """Log-probs f32 [N, C, A] of the policy that the ratio is clipped against."""
        return (self.old_logprobs if self.proximal_logprobs is None else self.proximal_logprobs).float()

    def averager(self, level: Level) -> Averager:
        """Means of entries at a level."""
        mask, n = self.targets.mask, self.targets.mask_sum
        weight = None
        if mask is not None and n is not None and self.max_episode_steps is not None:
            weight = _align(self.max_episode_steps / n.float().clamp(min=1), level)
        return self.make_averager(None if mask is None else _align(mask, level), weight)

    def make_averager(self, mask: Tensor | None, weight: Tensor | None) -> Averager:
        """How entries are averaged."""
        return Averager(mask, weight)


def compute_loss(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """The scalar to backpropagate for one micro batch and its metrics as name -> (mean, entries).

    Micro batches average to the loss of their union when weighted by `micro_batch_weight` and given their
    `entropy_scale`. Metrics under `VARIANCE` are sums, not means.
    """
    total, metrics = LOSSES.find(cfg.loss_type)(batch, cfg)
    if batch.new.entropy is not None:
        entropy, count = mean_entropy(batch, cfg)
        metrics["actor/entropy_loss"] = entropy, count
        if cfg.entropy_bonus and not batch.critic_only:
            total = total - cfg.entropy_bonus * batch.entropy_scale * entropy
    metrics["actor/total_loss"] = total, total.new_tensor(len(batch.old_logprobs))
    return total, {name: (value.detach(), count) for name, (value, count) in metrics.items()}


def mean_entropy(batch: Batch, cfg: AlgorithmConfig) -> Mean:
    """Mean over unmasked entries of the entropies at `cfg.entropy_type`; never weighted by trajectory.

    Where an entropy belongs to a chunk but masks to its actions, a chunk counts once per unmasked action.
    """
    assert batch.new.entropy is not None
    entropies = reduce_level(batch.new.entropy.float(), cfg.entropy_type)
    of_chunks = entropies.numel() == len(entropies)
    if of_chunks:
        return batch.averager("action_level").mean(entropies.view(-1, 1))
    return batch.averager(cfg.entropy_type).mean(entropies)


def micro_batch_weight(targets: Targets) -> Tensor:
    """What a micro batch counts for in its global batch: unmasked entries, or rows where trajectories are weighted.

    A masked mean divides by its unmasked entries, one over trajectory weights by all rows.
    """
    return torch.tensor(len(targets)) if targets.mask_sum is not None else entropy_weight(targets)


def entropy_weight(targets: Targets) -> Tensor:
    """What the entropy of a micro batch counts for in that of its global batch: unmasked entries, in any case."""
    return torch.tensor(len(targets)) if targets.mask is None else targets.mask.sum()


def actor(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """Clipped policy objective alone, for advantages that need no critic."""
    if batch.critic_only:
        raise UserError("actor.optim.critic_warmup_steps needs a critic, but algorithm.loss_type is 'actor'")
    return policy_loss(batch, cfg)


def actor_critic(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """Clipped policy objective plus clipped value loss."""
    return _with_critic(batch, cfg, policy_loss(batch, cfg))


def decoupled_actor_critic(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """As actor_critic, with the clip centre (proximal policy) apart from the policy that acted (behaviour)."""
    return _with_critic(batch, cfg, decoupled_policy_loss(batch, cfg))


def policy_loss(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """PPO: max(-A rho, -A clip(rho)), rho = pi_new / pi_old at `cfg.logprob_type`."""
    average = batch.averager(cfg.logprob_type)
    clipped = clip_ratio(batch, cfg, average.mask)
    value, count = average.loss_mean(clipped.losses)
    ratio = clipped.ratio.detach()
    metrics = {
        "actor/policy_loss": (torch.zeros_like(value) if batch.critic_only else value, count),
        "actor/policy_loss_abs": average.loss_mean(clipped.losses.detach().abs()),
        "actor/ratio": average.mean(ratio),
        "actor/ratio_abs": average.mean((ratio - 1.0).abs()),
        "actor/clipped_ratio": average.mean(clipped.clipped_ratio.detach()),
        "actor/clip_fraction": average.mean(clipped.active.float()),
        "actor/dual_cliped_ratio": average.mean(clipped.bounded.float()),
        "actor/approx_kl": average.mean(-clipped.log_ratio.detach()),
    }
    return value, metrics


def decoupled_policy_loss(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """PPO clipped around the proximal policy, weighted by pi_proximal / pi_behaviour."""
    average = batch.averager(cfg.logprob_type)
    clipped = clip_ratio(batch, cfg, average.mask)
    behaviour = reduce_level(batch.old_logprobs.float(), cfg.logprob_type)
    drift = reduce_level(batch.centre, cfg.logprob_type) - behaviour
    weight = drift.exp()
    limit = torch.inf if cfg.behave_weight_threshold is None else cfg.behave_weight_threshold
    dropped = weight > limit
    value, count = average.loss_mean(clipped.losses * weight.masked_fill(dropped, 0.0))
    metrics = {
        "actor/policy_loss": (torch.zeros_like(value) if batch.critic_only else value, count),
        "actor/proximal_ratio": average.mean(clipped.ratio.detach()),
        "actor/clipped_proximal_ratio": average.mean(clipped.clipped_ratio.detach()),
        "actor/clip_fraction": average.mean(clipped.active.float()),
        "actor/dual_clip_fraction": average.mean(clipped.bounded.float()),
        "actor/behav_clip_fraction": average.mean(dropped.float()),
        "actor/proximal_approx_kl": average.mean(-clipped.log_ratio.detach()),
        "actor/behav_approx_kl": average.mean(-drift),
    }
    return value, metrics


def value_loss(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """Larger of huber(R - V) and huber(R - V_clip), V_clip within `value_clip` of the old value."""
    V, V_old, R = batch.new.values, batch.old_values, batch.targets.returns
    if V is None or V_old is None or R is None:
        raise UserError(f"algorithm.loss_type {cfg.loss_type} needs values: set actor.model.add_value_head: true")
    V = V.float()
    average = batch.averager("action_level")  # values have the targets' own shape
    V_clip = clip_values(V, V_old, cfg)
    losses = torch.maximum(huber(R - V, cfg.huber_delta), huber(R - V_clip, cfg.huber_delta))
    value, count = average.loss_mean(losses)
    with torch.no_grad():
        clip_share = average.mean(((V - V_old).abs() > cfg.value_clip).float())
        metrics = {"critic/value_loss": (value, count), "critic/value_clip_ratio": clip_share}
        metrics |= _variance_sums(R, R - V, average.mask)
    return value, metrics


def clip_values(values: Tensor, old_values: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """New values, at most `value_clip` away from the old ones."""
    return old_values + (values - old_values).clamp(-cfg.value_clip, cfg.value_clip)


def huber(error: Tensor, delta: float) -> Tensor:
    """Half the square near zero, linear beyond `delta`."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


@dataclass(frozen=True)
class ClippedRatio:
    """The clipped objective entry by entry, at `cfg.logprob_type`."""

    losses: Tensor  # f32
    log_ratio: Tensor
    ratio: Tensor
    clipped_ratio: Tensor
    active: Tensor  # bool; the clipped branch was taken
    bounded: Tensor  # bool; the dual clip bounded the loss


def clip_ratio(batch: Batch, cfg: AlgorithmConfig, mask: Tensor | None) -> ClippedRatio:
    """The ratio of new to old probabilities, clipped, and the losses -A x ratio it gives."""
    A = _align(batch.targets.advantages, cfg.logprob_type)
    new = reduce_level(batch.new.logprobs.float(), cfg.logprob_type)
    log_ratio = new - reduce_level(batch.centre, cfg.logprob_type)
    if cfg.clip_log_ratio_min is not None or cfg.clip_log_ratio_max is not None:
        log_ratio = log_ratio.clamp(cfg.clip_log_ratio_min, cfg.clip_log_ratio_max)
    if mask is not None:  # before the exponential, so that a masked infinity cannot reach the gradient
        log_ratio = log_ratio.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    plain, clipped = -A * ratio, -A * clipped_ratio
    losses = torch.maximum(plain, clipped)
    bounded = torch.zeros_like(losses, dtype=torch.bool)
    if cfg.dual_clip:
        ceiling = (cfg.clip_ratio_c * A.abs()).expand_as(losses)
        bounded = losses.detach() > ceiling
        losses = torch.minimum(losses, ceiling)
    return ClippedRatio(losses, log_ratio, ratio, clipped_ratio, plain.detach() < clipped.detach(), bounded)


def _with_critic(
    batch: Batch, cfg: AlgorithmConfig, policy: tuple[Tensor, dict[str, Mean]]
) -> tuple[Tensor, dict[str, Mean]]:
    value, metrics = value_loss(batch, cfg)
    total = cfg.value_coef * value
    return (total if batch.critic_only else policy[0] + total), {**policy[1], **metrics}


def _align(x: Tensor, level: Level) -> Tensor:
    """[N, K] so that it broadcasts against entries of a level: tokens [N, C, A], actions [N, C], chunks [N, 1]."""
    if level == "token_level":
        return x.unsqueeze(-1)
    if level == "chunk_level" and x.shape[-1] != 1:
        raise UserError(
            "algorithm.reward_type action_level cannot go with logprob_type chunk_level: "
            "set logprob_type to action_level or token_level, or reward_type to chunk_level"
        )
    return x


def _variance_sums(returns: Tensor, errors: Tensor, mask: Tensor | None) -> dict[str, Mean]:
    keep = torch.ones_like(returns, dtype=torch.bool) if mask is None else mask.expand_as(returns)
    R, E, one = returns[keep].double(), errors[keep].double(), returns.new_ones(())
    sums = {
        "count": R.new_tensor(R.numel()),
        "returns_sum": R.sum(),
        "returns_sq_sum": R.square().sum(),
        "errors_sum": E.sum(),
        "errors_sq_sum": E.square().sum(),
    }
    return {VARIANCE + name: (value, one) for name, value in sums.items()}
