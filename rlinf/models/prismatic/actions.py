"""Continuous actions as 256 bins of [-1, 1], and bins as the last ids of a vocabulary; a higher id is a lower value.

Bins (0-255, relative to the first action id) are what the network's action head scores and what policies store.
"""

from __future__ import annotations

import torch

from rlinf.models.prismatic.constants import NUM_BINS

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


def to_tokens(bins: Tensor, action_end: int) -> Tensor:
    """Bins -> vocabulary ids, which end just before `action_end`."""
    return bins + (action_end - NUM_BINS)


def to_bins(tokens: Tensor, action_end: int) -> Tensor:
    """Vocabulary ids -> bins; ids outside the action range stay outside 0..255."""
    return tokens - (action_end - NUM_BINS)


def _edges(device: torch.device) -> Tensor:
    edges = torch.arange(NUM_BINS, dtype=torch.float64, device=device) * (2.0 / (NUM_BINS - 1)) - 1.0
    edges[-1] = 1.0
    return edges
