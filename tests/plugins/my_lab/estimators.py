"""An advantage estimator of one's own: the return of an episode less the mean of the other members of its group."""

from __future__ import annotations

import torch

from rlinf.algorithms.advantages import Steps
from rlinf.algorithms.registry import traits


@traits(compares_groups=True)
def leave_one_out(steps: Steps, cfg, all_reduce) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages [n, B], the same at every step of an episode; no critic, so no returns."""
    returns = steps.rewards.sum(0).view(-1, cfg.group_size)
    others = (returns.sum(1, keepdim=True) - returns) / (cfg.group_size - 1)
    advantages = (returns - others).view(-1).expand_as(steps.rewards)
    return advantages.clone() if steps.mask is None else advantages * steps.mask, None
