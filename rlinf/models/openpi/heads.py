"""Small networks beside the flow model: its critics and the variance of flow_noise."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from rlinf.errors import UserError
from rlinf.models.nn.mlp import named_sequential
from rlinf.models.nn.value_head import ValueHead
from rlinf.models.openpi.architecture import Architecture
from rlinf.models.openpi.config import Config

Tensor = torch.Tensor


def make_value_head(cfg: Config, arch: Architecture) -> ValueHead | StateValueHead | None:
    """The critic that `cfg` asks for; None where it asks for none."""
    if cfg.value_input is None:
        return None
    if cfg.value_input == "state":
        if cfg.openpi.critic_state_dim < 1:
            raise UserError(
                "actor.model.openpi.value_input=state needs openpi.critic_state_dim, the simulator's state size"
            )
        return StateValueHead(cfg.openpi.critic_state_dim, cfg.value_hidden())
    return ValueHead(arch.expert_width if cfg.value_input == "expert" else arch.vlm_width, cfg.value_hidden())


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


def _tanh_mlp(*widths: int) -> nn.Sequential:
    """Layers with tanh between them, under the names the published checkpoints use."""
    *hidden, last = (nn.Linear(a, b) for a, b in itertools.pairwise(widths))
    layers = [named_sequential(linear_1=layer, tanh=nn.Tanh()) for layer in hidden]
    return named_sequential(moduleList=nn.Sequential(*layers, named_sequential(linear_1=last)))


class NoiseHead(nn.Module):
    """flow_noise: expert features [B, H, W] -> standard deviation [B, H, D] between two bounds, on a log scale."""

    def __init__(self, width: int, hidden: tuple[int, ...], action_dim: int, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.mlp_logvar = _tanh_mlp(width, *hidden, action_dim)
        for name, std in zip(("logvar_min", "logvar_max"), bounds, strict=True):
            self.register_buffer(name, torch.tensor([2 * math.log(std)], dtype=torch.float32))

    def forward(self, features: Tensor) -> Tensor:
        share = (torch.tanh(self.mlp_logvar(features)) + 1) / 2
        low, high = self.get_buffer("logvar_min"), self.get_buffer("logvar_max")
        return torch.exp(0.5 * (low + share * (high - low)))
