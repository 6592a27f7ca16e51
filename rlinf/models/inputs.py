"""What every policy reads of an observation, in the shapes of its network: cameras, state columns, padded prompts.

Letters: B rows, n cameras, L prompt slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from rlinf.data.types import Observation
from rlinf.errors import UserError

Tensor = torch.Tensor


def camera_images(
    obs: Observation, count: int, resize: Callable[[Tensor], Tensor], device: torch.device, *, key: str
) -> Tensor:
    """The main camera and the first `count - 1` wrist cameras, resized: u8 [B, count, size, size, 3].

    A main camera that is alone, on `device` and of the right size is not copied. `key` is the config key that sets
    `count`, for the error where the simulator has fewer.
    """
    available = 0 if obs.wrist_images is None else obs.wrist_images.shape[1]
    if count - 1 > available:
        raise UserError(f"{key}={count} needs {count - 1} wrist cameras; the simulator has {available}")
    main = resize(obs.images.to(device))[:, None]
    if count == 1:
        return main
    assert obs.wrist_images is not None
    wrist = obs.wrist_images[:, : count - 1].to(device)
    return torch.cat((main, resize(wrist.flatten(0, 1)).unflatten(0, wrist.shape[:2])), 1)


def state_columns(obs: Observation, count: int, device: torch.device, *, key: str) -> Tensor:
    """The first `count` columns of the robot state, f32 [B, count]; `key` is the config key that sets the count."""
    if obs.states is None or obs.states.shape[1] < count:
        have = "none" if obs.states is None else str(obs.states.shape[1])
        raise UserError(f"{key}={count}: the policy reads {count} state columns, the simulator gives {have}")
    return obs.states[:, :count].to(device, torch.float32)


@dataclass(frozen=True)
class Prompts:
    """Token ids of a batch of prompts, padded to one length."""

    ids: Tensor  # i32 [B, L]
    valid: Tensor  # bool [B, L]; False on pads
    shortest: int  # fewest and most valid slots of a row, known without asking the device
    longest: int
    pads_last: bool  # pads behind the prompt, or else between its first token and the rest

    @classmethod
    def padded(cls, rows: Sequence[tuple[int, ...]], length: int, *, pad: int, pads_last: bool) -> Self:
        """Rows of at most `length` ids, on the CPU."""
        places: dict[tuple[int, ...], int] = {}
        place = [places.setdefault(row, len(places)) for row in rows]  # a batch repeats few sentences many times
        ids = torch.full((len(places), length), pad, dtype=torch.int32)
        valid = torch.zeros(len(places), length, dtype=torch.bool)
        for i, row in enumerate(places):
            slots = list(range(len(row))) if pads_last else [0, *range(length - len(row) + 1, length)]
            ids[i, slots] = torch.tensor(row, dtype=torch.int32)
            valid[i, slots] = True
        lengths = [len(row) for row in places]
        return cls(ids[place], valid[place], min(lengths), max(lengths), pads_last)

    @classmethod
    def stored(cls, ids: Tensor, valid: Tensor, *, pads_last: bool) -> Self:
        """Rows of a replay buffer; their lengths are counted where they lie, so on a GPU this waits for it."""
        shortest, longest = torch.stack(valid.sum(1).aminmax()).tolist()
        return cls(ids, valid, shortest, longest, pads_last)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        ids, valid = (x.to(device, non_blocking=True) for x in (self.ids, self.valid))
        return replace(self, ids=ids, valid=valid)

    def trimmed(self, step: int = 1) -> tuple[Tensor, Tensor | None]:
        """Ids without the pads that all rows share, and which slots count (None: all of them).

        Lengths are rounded up to a multiple of `step`: recorded kernels need few different shapes.
        """
        if self.shortest == self.longest:
            return self._slots(self.ids, self.longest), None
        length = min(-(-self.longest // step) * step, self.ids.shape[1])
        return self._slots(self.ids, length), self._slots(self.valid, length)

    def _slots(self, x: Tensor, length: int) -> Tensor:
        """The `length` columns of [B, L] that any row uses."""
        if self.pads_last or length == x.shape[1]:
            return x[:, :length]
        return torch.cat((x[:, :1], x[:, x.shape[1] - length + 1 :]), 1)


def cut_prompt(row: Sequence[int], length: int, text: str, *, keep_last: bool = False) -> tuple[int, ...]:
    """At most `length` ids of a prompt, with a warning that quotes it; `keep_last` keeps its last id in any case."""
    if len(row) <= length:
        return tuple(row)
    warnings.warn(f"prompt cut from {len(row)} to {length} tokens: {text!r}", stacklevel=2)
    return (*row[: length - 1], row[-1]) if keep_last else tuple(row[:length])
