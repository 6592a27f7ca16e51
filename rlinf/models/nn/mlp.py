"""The gated MLP of Gemma and Llama, with the published parameter names."""

from __future__ import annotations

import torch
from torch import nn

from rlinf.models.nn.packed import Packed

Tensor = torch.Tensor


class GatedMlp(Packed):
    """down(act(gate(x)) * up(x)); a network says by `activate` which function its gate is."""

    groups = (("gate_proj", "up_proj"),)

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(*self.project(self.groups[0], x)))
