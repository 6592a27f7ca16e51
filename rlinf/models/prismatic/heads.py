"""The critic beside the network."""

from __future__ import annotations

import itertools

import torch
from torch import nn

Tensor = torch.Tensor


class ValueHead(nn.Module):
    """MLP critic on one hidden state: f32 [B, width] -> [B, outputs]; it starts by predicting zero."""

    def __init__(self, width: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise((width, *hidden)):
            layers += [nn.Linear(a, b), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], outputs, bias=False))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden)

    def initialize(self, generator: torch.Generator) -> None:
        """Fan-in scaled layers, and a last one of zeros."""
        layers = [m for m in self.mlp if isinstance(m, nn.Linear)]
        for layer in layers[:-1]:
            std = layer.in_features**-0.5
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(layers[-1].weight)
