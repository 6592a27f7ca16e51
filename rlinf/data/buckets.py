"""Items laid end to end and cut into buckets of equal size: how weights and gradients travel, and wait on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Span(NamedTuple):
    """A run [first, last) of one item's numbers (or bytes)."""

    item: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


def buckets(lengths: Sequence[int], size: int) -> Iterator[list[Span]]:
    """Items of these lengths one after another, cut every `size` numbers; the last bucket may be shorter.

    Example: buckets([3, 7], 4) -> [(0, 0, 3), (1, 0, 1)], [(1, 1, 5)], [(1, 5, 7)]
    """
    bucket: list[Span] = []
    room = size
    for item, length in enumerate(lengths):
        first = 0
        while first < length:
            span = Span(item, first, min(length, first + room))
            bucket.append(span)
            first, room = span.last, room - span.size
            if room == 0:
                yield bucket
                bucket, room = [], size
    if bucket:
        yield bucket


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, u8 [bytes]."""
    return tensor.detach().view(-1).view(torch.uint8)
