"""The distribution over the 256 action bins: temperature and top-k inside them, draws by inverse CDF.

Other vocabulary entries never enter, so that predict and evaluate score a bin alike whatever the sampler.
Letters: V vocabulary, ... any leading axes.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def log_probs(logits: Tensor, *, temperature: float, top_k: int, keep: Tensor | None = None) -> Tensor:
    """Log-probabilities f32 [..., 256] of logits f32 [..., 256]; -inf outside the `top_k` best (<= 0 keeps all).

    `keep` i64 [...] are stored bins to score: one that has left the top k since it was drawn stays in the support,
    where an infinite log-prob would ruin the update.
    """
    if 0 < top_k < logits.shape[-1]:
        lowest = logits.topk(top_k, -1).values[..., -1:]
        outside = logits < lowest
        if keep is not None:
            outside = outside.scatter(-1, keep[..., None], False)
        logits = logits.masked_fill(outside, -torch.inf)
    return (logits / temperature).log_softmax(-1)


def published_log_probs(logits: Tensor, vocabulary: Tensor, *, temperature: float, top_k: int) -> Tensor:
    """The published update's order: top-k over the whole vocabulary, f32 [..., V], then the bins (compat only).

    A bin drawn in the rollout may be impossible here, with a log-prob of -inf.
    """
    if top_k > 0:
        lowest = vocabulary.topk(min(top_k, vocabulary.shape[-1]), -1).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return (logits / temperature).log_softmax(-1)


def draw(log_prob: Tensor, uniforms: Tensor) -> Tensor:
    """Bins i64 [...] by inverse CDF, one uniform [0, 1) each; fp64 keeps the last bin's edge above every uniform."""
    cdf = log_prob.double().exp().cumsum(-1)
    point = uniforms.double()[..., None] * cdf[..., -1:]
    return torch.searchsorted(cdf, point, right=True)[..., 0]


def entropy(log_prob: Tensor) -> Tensor:
    """Entropy f32 [...] in nats; impossible bins add nothing, and no NaN to the gradient."""
    return -(log_prob.exp() * log_prob.masked_fill(log_prob == -torch.inf, 0.0)).sum(-1)


def chosen(log_prob: Tensor, bins: Tensor) -> Tensor:
    """Log-prob f32 [...] of each bin i64 [...]."""
    return log_prob.gather(-1, bins[..., None])[..., 0]
