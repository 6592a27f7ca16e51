"""sft.state_loss: image tokens that must tell the simulator's state, so that a policy learns to see."""

from __future__ import annotations

import torch
from torch import nn

from rlinf.config.schema import SftConfig
from rlinf.demos.dataset import DemoDataset
from rlinf.errors import UserError
from rlinf.models.policy import Policy


def check_state_loss(sft: SftConfig, data: DemoDataset, policy: Policy) -> None:
    """Refuse a dataset without a simulator state that changes, and a policy whose image tokens do not learn."""
    if data.privileged is None:
        raise UserError(
            f"sft.state_loss={sft.state_loss} needs the simulator's state, which sft.dataset={sft.dataset} does not "
            "hold: collect it again with `rlinf collect`, or set sft.state_loss=0"
        )
    if not _changing(data.privileged).any():
        raise UserError(f"sft.state_loss={sft.state_loss}: the simulator's state never changes in {sft.dataset}")
    if policy.image_width is None:
        raise UserError(f"sft.state_loss={sft.state_loss} must be 0: this policy's image tokens do not learn")


def _changing(states: torch.Tensor) -> torch.Tensor:
    """Which columns of f32 [M, K] change, bool [K]."""
    return states.std(0) > 1e-4


class StateReadout(nn.Module):
    """A linear layer that predicts the simulator's privileged state from the mean image token."""

    def __init__(self, width: int, states: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        states = states[:, _changing(states)]
        self.targets = ((states - states.mean(0)) / states.std(0)).to(device)  # f32 [M, columns]
        self.linear = nn.Linear(width, self.targets.shape[1], device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def loss(self, image_tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the normalised columns, of mean image tokens [B, W] at those frames."""
        return (self.linear(image_tokens) - self.targets[rows]).square().mean()
