"""Flow matching: the loss by which the velocity field learns demonstrated actions.

Letters: B rows, R (noise, time) draws per row, H actions, D action columns.
"""

from __future__ import annotations

import torch

from rlinf.models.openpi.model import PiNet, Prefix

Tensor = torch.Tensor


def flow_matching(
    net: PiNet, prefix: Prefix, state: Tensor | None, *, target: Tensor, is_target: Tensor, eps: Tensor, t: Tensor
) -> Tensor:
    """Mean squared error of the velocity from noise eps [B, R, H, D] to actions [B, H, D], at times t [B, R].

    `is_target` bool [B, H] marks the actions that are learned.
    """
    draws, eps, t = t.shape[1], eps.flatten(0, 1), t.flatten()
    state = None if state is None else state.repeat_interleave(draws, 0)
    target, is_target = target.repeat_interleave(draws, 0), is_target.repeat_interleave(draws, 0)
    x = t[:, None, None] * eps + (1 - t[:, None, None]) * target
    velocity = net.velocity(net.suffix(net.repeat(prefix, draws), state, x, net.times(t)))
    errors = (velocity - (eps - target)).square().mean(-1)  # [B x R, H]
    return (errors * is_target).sum() / is_target.sum()
