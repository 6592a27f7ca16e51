"""Small networks with published parameter names: the gated MLP of Gemma and Llama, and layers in a row."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from rlinf.models.nn import fused
from rlinf.models.nn.packed import Packed

Tensor = torch.Tensor


class GatedMlp(Packed):
    """down(act(gate(x)) * up(x)), where act is the tanh form of GELU (Gemma) or SiLU (Llama)."""

    groups = (("gate_proj", "up_proj"),)

    def __init__(self, width: int, hidden: int, *, gelu: bool) -> None:
        super().__init__()
        self.gelu = gelu
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(self.groups[0], x)
        return self.down_proj(fused.gelu_gate(gate, up) if self.gelu else fused.silu_gate(gate, up))


def named_sequential(**layers: nn.Module) -> nn.Sequential:
    """Layers in a row, under these names."""
    return nn.Sequential(OrderedDict(layers))
