"""Bridge: a policy's action convention to a simulator's, decided by the two specs alone."""

from __future__ import annotations

import torch

from rlinf.envs.spec import ARM_POSE, drops_rotation
from rlinf.models.config import PolicySpec
from rlinf.simulators.contract import EnvSpec


class Bridge:
    """Converts actions [B, C, A_policy] to [B, C, A_env]: chooses columns, and translates the gripper's."""

    def __init__(self, env: EnvSpec, policy: PolicySpec) -> None:
        self.env, self.policy = env, policy
        self.columns = self._columns()

    def _columns(self) -> list[int]:
        """Numbers of the policy's columns that the simulator takes, in its order."""
        count = self.env.action_dim
        if drops_rotation(self.env, self.policy):
            return [*range(count - 1), ARM_POSE - 1]  # the rotation is left out, the gripper is still last
        return list(range(count))  # the rest is padding

    def from_env(self, actions: torch.Tensor) -> torch.Tensor:
        """Actions f32 [..., A_env] as a dataset of the simulator holds them, in the policy's columns; others are 0."""
        out = actions.new_zeros(*actions.shape[:-1], self.policy.action_dim)
        out[..., self.columns] = actions
        return out

    def to_env(self, actions: torch.Tensor) -> torch.Tensor:
        """Convert actions f32 [B, C, A_policy] to f32 [B, C, A_env]."""
        if actions.shape[-1] != self.policy.action_dim:
            raise ValueError(
                f"actions have {actions.shape[-1]} columns, the policy's spec says {self.policy.action_dim}"
            )
        actions = actions[..., self.columns]  # advanced indexing copies
        if self.env.gripper == "sign":
            gripper = actions[..., -1]
            # a token policy's bins have no meaningful zero; an exact zero of a continuous one is kept, as published
            actions[..., -1] = 2.0 * (gripper > 0) - 1.0 if self.policy.binary_gripper else torch.sign(gripper)
        elif self.env.gripper == "binary_pm1":
            actions[..., -1] = 2.0 * (actions[..., -1] > 0.5) - 1.0
        return actions
