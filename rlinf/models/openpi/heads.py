"""Small networks beside the flow model: critics and the variance of flow_noise."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

Tensor = torch.Tensor


class ValueHead(nn.Module):
    """MLP critic on pooled features: f32 [B, width] -> [B, 1]."""

    def __init__(self, width: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise((width, *hidden)):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.mlp(features)


class StateValueHead(nn.Module):
    """Asymmetric critic on the simulator's state.

    Lengths in metres vary by centimetres around constants that differ per task; bounded sines at two scales make such
    differences visible without statistics that would have to be collected first.
    """

    SCALES = (math.pi, 4 * math.pi)

    def __init__(self, state_dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        width = state_dim * (1 + 2 * len(self.SCALES))
        layers: list[nn.Module] = [nn.Linear(width, hidden[0]), nn.LayerNorm(hidden[0]), nn.Tanh()]
        for a, b in itertools.pairwise(hidden):
            layers += [nn.Linear(a, b), nn.Tanh()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, state: Tensor) -> Tensor:
        """f32 [B, K] -> [B, 1]."""
        waves = [f(scale * state) for scale in self.SCALES for f in (torch.sin, torch.cos)]
        return self.mlp(torch.cat((torch.asinh(state), *waves), -1))


class _NamedLinear(nn.Module):
    """A Linear under the name the published checkpoints use."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(a, b)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_1(x)


class _NamedMlp(nn.Module):
    """Layers with tanh between them."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.moduleList = nn.ModuleList(_NamedLinear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.moduleList[:-1]:
            x = torch.tanh(layer(x))
        return self.moduleList[-1](x)


class NoiseHead(nn.Module):
    """flow_noise: expert features [B, H, W] -> standard deviation [B, H, D] between two bounds, on a log scale."""

    def __init__(self, width: int, hidden: tuple[int, ...], action_dim: int, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.mlp_logvar = _NamedMlp((width, *hidden, action_dim))
        for name, std in zip(("logvar_min", "logvar_max"), bounds, strict=True):
            self.register_buffer(name, torch.tensor([2 * math.log(std)], dtype=torch.float32))

    def forward(self, features: Tensor) -> Tensor:
        share = (torch.tanh(self.mlp_logvar(features)) + 1) / 2
        low, high = self.get_buffer("logvar_min"), self.get_buffer("logvar_max")
        return torch.exp(0.5 * (low + share * (high - low)))
