"""Between a simulator's units and the model's: ALOHA geometry, actions relative to the state.

Letters: B rows, S state columns, A action columns.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


# ALOHA as π's pre-training data had it: signs of some joints flipped, grippers as angles instead of linear openings.
_FLIP = (1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0) * 2
_GRIPPERS = [6, 13]
_LINEAR = (0.01844, 0.05800)  # gripper opening in metres
_ANGLE = (0.5476, 1.6296)  # radians of the same encoder range
_COMMAND = (-0.6213, 1.4910)  # radians of the command range
_ARM, _HORN = 0.036, 0.022  # metres of the gripper's linkage


def aloha_state(state: Tensor) -> Tensor:
    """Simulator joints [..., 14] -> π's convention."""
    out = state * torch.tensor(_FLIP, dtype=state.dtype, device=state.device)
    opening = state[..., _GRIPPERS] * (_LINEAR[1] - _LINEAR[0]) + _LINEAR[0]
    angle = torch.asin(((_HORN**2 + opening**2 - _ARM**2) / (2 * _HORN * opening)).clamp(-1.0, 1.0))
    out[..., _GRIPPERS] = (angle - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0])
    return out


def aloha_actions(actions: Tensor) -> Tensor:
    """π's joint targets [..., 14] -> the simulator's."""
    out = actions * torch.tensor(_FLIP, dtype=actions.dtype, device=actions.device)
    angle = actions[..., _GRIPPERS] + _ANGLE[0]  # only shifted: the published rule does not undo the scale here
    out[..., _GRIPPERS] = (angle - _COMMAND[0]) / (_COMMAND[1] - _COMMAND[0])
    return out


def aloha_actions_inverse(actions: Tensor) -> Tensor:
    """Simulator joint targets [..., 14] -> π's, for imitation."""
    out = actions * torch.tensor(_FLIP, dtype=actions.dtype, device=actions.device)
    angle = actions[..., _GRIPPERS] * (_COMMAND[1] - _COMMAND[0]) + _COMMAND[0]
    out[..., _GRIPPERS] = angle - _ANGLE[0]
    return out


def shift_by_state(actions: Tensor, state: Tensor, mask: tuple[bool, ...], sign: float) -> Tensor:
    """Relative to absolute (sign +1) or back (-1) on masked columns: actions [B, H, A], state [B, S] un-normalised."""
    if not any(mask):
        return actions
    n = len(mask)
    out = actions.clone()
    out[..., :n] += sign * state[:, None, :n] * torch.tensor(mask, dtype=actions.dtype, device=actions.device)
    return out
