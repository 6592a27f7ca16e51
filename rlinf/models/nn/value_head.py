"""The critic of a policy: a small MLP beside the network."""

from __future__ import annotations

import itertools

import torch
from torch import nn

Tensor = torch.Tensor


class ValueHead(nn.Module):
    """MLP from features f32 [..., width] to values [..., outputs]; parameter names are the published ones."""

    def __init__(
        self,
        width: int,
        hidden: tuple[int, ...],
        outputs: int = 1,
        *,
        activation: type[nn.Module] = nn.ReLU,
        bias: bool = True,
    ) -> None:
        """`bias` is that of the last layer; the others have one."""
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise((width, *hidden)):
            layers += [nn.Linear(a, b), activation()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], outputs, bias=bias))

    def forward(self, features: Tensor) -> Tensor:
        return self.mlp(features)
