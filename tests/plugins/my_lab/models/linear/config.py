"""The `actor.model` block of the linear policy; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.models.config import ModelConfig, PolicySpec


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A Gaussian policy, linear in the state."""

    state_dim: int = 2
    """State columns it reads."""
    std: float = 0.3
    """Standard deviation of its actions."""

    def num_parameters(self) -> dict[str, int]:
        return {"mean": (self.state_dim + 1) * self.action_dim * self.num_action_chunks}

    def spec(self) -> PolicySpec:
        return PolicySpec(
            action_dim=self.action_dim,
            num_action_chunks=self.num_action_chunks,
            image_size=8,
            num_images=1,
            state_dim=self.state_dim,
            has_logprob=True,
            has_value=False,
            values_per_chunk=1,
            critic_state_dim=0,
        )
