"""Random weights that train from the first step: the rules all networks share."""

from __future__ import annotations

import math

import torch
from torch import nn


def initialize_layer(layer: nn.Module, generator: torch.Generator, gain: float = 1.0) -> None:
    """Linear layers and convolutions scaled by their fan-in, without bias; layer norms that change nothing.

    A module of any other kind is left alone.
    """
    if isinstance(layer, nn.Linear | nn.Conv2d):
        truncated_normal_(layer.weight, gain / math.sqrt(layer.weight[0].numel()), generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    elif isinstance(layer, nn.LayerNorm):
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)


def initialize_value_head(head: nn.Module, generator: torch.Generator) -> None:
    """A critic that starts by predicting zero everywhere: its last layer is zero, the others are drawn."""
    for layer in head.modules():
        initialize_layer(layer, generator)
    last = [m for m in head.modules() if isinstance(m, nn.Linear)][-1]
    nn.init.zeros_(last.weight)


def truncated_normal_(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Draw `weight` in place from a normal distribution cut off at two standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
