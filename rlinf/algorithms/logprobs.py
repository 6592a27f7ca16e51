"""Log-probabilities and entropies: from logits, and summed to the level at which ratios are taken.

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


def token_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of the chosen tokens and entropy, both f32 [...], from logits [..., V]; -inf marks a forbidden token."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)  # p log p -> 0 as p -> 0
    return chosen, -(logprobs.exp() * finite).sum(-1)
