"""Actions as 256 bins of [-1, 1]: encoding, decoding, and the distribution that a policy samples bins from.

Bin i is id `Architecture.action_begin + i` of the vocabulary; a higher bin is a lower value. Bins are what the action
head of the network scores and what policies store. Other vocabulary entries never enter the distribution, so that
predict and evaluate score a bin alike whatever the sampler.
"""

from __future__ import annotations

import torch

from rlinf.models.prismatic.architecture import NUM_BINS

Tensor = torch.Tensor


def encode(actions: Tensor) -> Tensor:
    """Normalised actions, any shape -> bins i64 in 0..255; values outside [-1, 1] are clipped."""
    clipped = actions.double().clamp(-1.0, 1.0)
    return NUM_BINS - torch.bucketize(clipped, _edges(actions.device), right=True)


def decode(bins: Tensor) -> Tensor:
    """Bins, any shape -> normalised values f32, the centres of 255 intervals; bins 0 and 1 share the highest."""
    edges = _edges(bins.device)
    centres = (edges[:-1] + edges[1:]) / 2
    return centres[(NUM_BINS - 1 - bins.long()).clamp(0, NUM_BINS - 2)].float()


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


def _edges(device: torch.device) -> Tensor:
    edges = torch.arange(NUM_BINS, dtype=torch.float64, device=device) * (2.0 / (NUM_BINS - 1)) - 1.0
    edges[-1] = 1.0
    return edges
