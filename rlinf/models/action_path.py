"""ActionPath: what stands between a robot and a policy's network, which `rlinf doctor --recipe` checks without it.

Letters: B rows, n cameras, S state columns, H actions the network gives at once, C executed, A columns.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from rlinf.data.types import Observation

Tensor = torch.Tensor


class Seen(NamedTuple):
    """What of an observation reaches the network."""

    images: Tensor  # u8 [B, n, size, size, 3]
    state: Tensor | None  # f32 [B, S] in the model's convention, not normalised


class Normal(NamedTuple):
    """Numbers in units of the statistics: -1 and 1 are the ends of the range that they call usual, not clipped."""

    state: Tensor | None  # f32 [B, S]
    actions: Tensor  # f32 [B, H, A]


class ActionPath(Protocol):
    """The statistics and conventions of a policy, from observations to its inputs and from its outputs to actions."""

    clips: bool  # whether actions outside of the statistics' range are cut to it, as tokens must be

    @property
    def action_horizon(self) -> int:
        """H, as Policy.action_horizon."""

    @property
    def relative_actions(self) -> bool:
        """As Policy.relative_actions."""

    def fit(self, states: Tensor | None, actions: Tensor) -> None:
        """As Policy.fit_statistics."""

    def seen(self, obs: Observation) -> Seen:
        """Images and state as the network would get them."""

    def targets(self, obs: Observation, actions: Tensor) -> Tensor:
        """What `Policy.sft_loss` teaches the network to give for the expert's actions f32 [B, H, A]."""

    def actions(self, obs: Observation, targets: Tensor) -> Tensor:
        """The actions f32 [B, C, A] that `Policy.predict` makes of such an output."""

    def normal(self, obs: Observation, actions: Tensor) -> Normal:
        """State and actions f32 [B, H, A] in units of the statistics."""

    def resolution(self) -> Tensor:
        """The largest error f64 [A] that rounding makes to an action; 0 but for tokens."""
