"""Log-probabilities and entropies, summed to the level at which ratios are taken.

Letters: N rows, C actions per chunk, A action dims (or tokens per action).
"""

from __future__ import annotations

import torch

from rlinf.algorithms.config import Level

Tensor = torch.Tensor


def reduce_level(x: Tensor, level: Level) -> Tensor:
    """Sum f32 [N, C, A] to tokens [N, C, A], actions [N, C] or chunks [N, 1]: log-probs of independent parts add up."""
    if level == "token_level":
        return x
    if level == "action_level":
        return x.sum(-1)
    return x.sum((1, 2)).unsqueeze(-1)
