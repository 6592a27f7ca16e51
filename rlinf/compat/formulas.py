"""Formulas of RLinf 0.4 that ours mend, wrapped around the clean ones; `compat: rlinf-0.4` chooses them for a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlinf.algorithms.advantages import Targets, compute_targets, identity
from rlinf.algorithms.config import AlgorithmConfig
from rlinf.algorithms.losses import (
    Averager,
    Batch,
    Mean,
    clip_ratio,
    clip_values,
    compute_loss,
    entropy_weight,
    micro_batch_weight,
)
from rlinf.data.types import Trajectory

Tensor = torch.Tensor


@dataclass(frozen=True)
class Formulas:
    """What the actor computes with."""

    targets: Callable[..., tuple[Targets, dict[str, Tensor]]]  # of a rollout
    loss: Callable[[Batch, AlgorithmConfig], tuple[Tensor, dict[str, Mean]]]  # of a micro batch
    weight: Callable[[Targets], Tensor]  # of a micro batch within its global batch
    entropy_weight: Callable[[Targets], Tensor]  # of its entropy
    first_warmup_step: int  # the number that a learning rate's warm-up counts the first training step as


def choose_formulas(compat: str | None) -> Formulas:
    """The clean formulas, or those of the release that `compat` names."""
    if compat is None:
        return Formulas(compute_targets, compute_loss, micro_batch_weight, entropy_weight, first_warmup_step=1)
    return Formulas(published_targets, published_loss, num_rows, num_rows, first_warmup_step=0)


def num_rows(targets: Targets) -> Tensor:
    """Micro batches count by their rows, however many of those are masked."""
    return torch.tensor(len(targets))


class PublishedAverager(Averager):
    """Divides a masked mean by the mask's own entries, before it is spread over the entries that are averaged."""

    def count(self, mask: Tensor) -> Tensor:
        assert self.mask is not None
        return self.mask.sum()


class PublishedBatch(Batch):
    """A micro batch whose means are the published ones."""

    def make_averager(self, mask: Tensor | None, weight: Tensor | None) -> Averager:
        return PublishedAverager(mask, weight)


def published_targets(traj: Trajectory, cfg: AlgorithmConfig, **options: Any) -> tuple[Targets, dict[str, Tensor]]:
    """Advantages normalised on each rank by itself; a success on the last allowed step counts as cut off too."""
    ends_only = traj.terminated & ~traj.truncated
    return compute_targets(replace(traj, terminated=ends_only), cfg, normalize_over=identity, **options)


def published_loss(batch: Batch, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Mean]]:
    """The published means, and three metrics that measure something else than their names say."""
    batch = PublishedBatch(**vars(batch))
    total, metrics = compute_loss(batch, cfg)
    with torch.no_grad():
        if "actor/dual_cliped_ratio" in metrics:
            average = batch.averager(cfg.logprob_type)
            clipped = clip_ratio(batch, cfg, average.mask)
            metrics["actor/dual_cliped_ratio"] = average.mean(clipped.ratio * clipped.bounded)
            if cfg.logprob_type == "token_level":  # these three were averaged rightly, at this level alone
                average = Averager(average.mask, average.weight)
                metrics["actor/ratio"] = average.mean(clipped.ratio)
                metrics["actor/ratio_abs"] = average.mean((clipped.ratio - 1.0).abs())
                metrics["actor/clipped_ratio"] = average.mean(clipped.clipped_ratio)
        if "critic/value_clip_ratio" in metrics:
            V, V_old = batch.new.values, batch.old_values
            assert V is not None
            assert V_old is not None
            moved = (clip_values(V.float(), V_old, cfg) - V_old).abs()  # never beyond the clip, but for rounding
            metrics["critic/value_clip_ratio"] = (moved > cfg.value_clip).float().mean(), V.new_tensor(V.numel())
    return total, metrics
