"""Between a simulator's units and the model's: images, prompts, ALOHA geometry, relative actions.

Letters: M images, B rows, S state columns, A action columns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional as F

Tensor = torch.Tensor
_FIXED_POINT = 22  # fractional bits of Pillow's integer resampling


def resize_with_pad(images: Tensor, size: int) -> Tensor:
    """u8 [M, h, w, 3] -> u8 [M, size, size, 3], aspect kept, black borders; bit-equal to Pillow's bilinear resize."""
    height, width = images.shape[1:3]
    if (height, width) == (size, size):
        return images
    new_h, new_w = _fit(height, width, size)
    out = _resample(images, new_w, dim=2)
    out = _resample(out, new_h, dim=1)
    top, left = (size - new_h) // 2, (size - new_w) // 2
    return F.pad(out, (0, 0, left, size - new_w - left, top, size - new_h - top))


def resize_with_pad_float(images: Tensor, size: int) -> Tensor:
    """f32 [M, h, w, 3] in [-1, 1] -> [M, size, size, 3]: plain bilinear, the published rule for float images."""
    new_h, new_w = _fit(images.shape[1], images.shape[2], size)
    out = F.interpolate(images.movedim(-1, 1), (new_h, new_w), mode="bilinear", align_corners=False).clamp(-1.0, 1.0)
    top, left = (size - new_h) // 2, (size - new_w) // 2
    return F.pad(out, (left, size - new_w - left, top, size - new_h - top), value=-1.0).movedim(1, -1)


def _fit(height: int, width: int, size: int) -> tuple[int, int]:
    ratio = max(width / size, height / size)
    return int(height / ratio), int(width / ratio)


def _resample(images: Tensor, size: int, dim: int) -> Tensor:
    """One pass of an antialiased triangle filter in integers, rounded back to u8."""
    if images.shape[dim] == size:
        return images
    taps, weights = _filter(images.shape[dim], size, images.device)
    shape = [1] * images.dim()
    shape[dim] = size
    total = torch.full((), 1 << (_FIXED_POINT - 1), dtype=torch.int32, device=images.device)
    for tap, weight in zip(taps, weights, strict=True):
        total = total + images.index_select(dim, tap).int() * weight.view(shape)
    return (total >> _FIXED_POINT).clamp(0, 255).to(torch.uint8)


@lru_cache(maxsize=64)
def _filter(old: int, new: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Source indices i64 [taps, new] and fixed-point weights i32 [taps, new] of the triangle filter."""
    scale = old / new
    support = max(scale, 1.0)
    centre = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    first = (centre - support + 0.5).long().clamp(min=0)
    last = (centre + support + 0.5).long().clamp(max=old)
    taps = first[:, None] + torch.arange(int((last - first).max()))  # [new, taps]
    distance = ((taps - centre[:, None] + 0.5) / support).abs()
    weights = torch.where(taps < last[:, None], (1.0 - distance).clamp(min=0.0), 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    fixed = (weights * (1 << _FIXED_POINT) + 0.5).int()
    return taps.clamp(max=old - 1).T.contiguous().to(device), fixed.T.contiguous().to(device)


def clean_prompt(text: str) -> str:
    """The instruction as the tokenizer sees it; its case is kept."""
    return text.strip().replace("_", " ").replace("\n", " ")


def state_prompt(text: str, state: Tensor) -> str:
    """π0.5 prompt with the normalised state f32 [S] written as bins 0-255 (-1 below the range)."""
    edges = torch.linspace(-1.0, 1.0, 257, dtype=torch.float64)[:-1]
    bins = torch.bucketize(state.double().cpu(), edges, right=True) - 1
    return f"Task: {clean_prompt(text)}, State: {' '.join(map(str, bins.tolist()))};\nAction: "


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
