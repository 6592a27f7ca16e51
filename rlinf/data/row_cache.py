"""RowCache: what frozen weights gave for each row of a rollout (prefix keys and values), so that updates need not.

Rows go to the device while its share lasts, then to host memory, from where they are copied ahead; what neither holds
is computed again. Where a row lies changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
SLAB_BYTES = 1 << 30  # memory is taken and given back in pieces of at most this size


@dataclass(frozen=True)
class Shares:
    """Bytes that a cache may take."""

    device: int
    host: int = 0


Measure = Callable[[int], Shares]  # from the device bytes that the cache holds now


class Tier:
    """Rows of equal shape in slabs of one memory; a row's slot counts through all slabs."""

    def __init__(self, num_rows: int, like: dict[str, Tensor], *, on_host: bool) -> None:
        """`like` has a row in front: [n, ...]."""
        self.like, self.on_host = like, on_host
        self.row_bytes = max(1, sum(v[0].numel() * v.element_size() for v in like.values()))
        self.slab_rows = max(1, min(num_rows, SLAB_BYTES // self.row_bytes))
        self.slabs: list[dict[str, Tensor]] = []
        self.used = 0  # slots
        self.limit = 0  # slots the tier may have

    @property
    def device(self) -> torch.device:
        """The device that the rows come from."""
        return next(iter(self.like.values())).device

    @property
    def capacity(self) -> int:
        """Slots there is memory for."""
        return sum(len(next(iter(slab.values()))) for slab in self.slabs)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory taken."""
        return sum(tensor.nbytes for slab in self.slabs for tensor in slab.values())

    def allow(self, num_bytes: int) -> None:
        """Set what the tier may take; slabs beyond it are given back, so no row may be used any more."""
        self.limit, self.used = num_bytes // self.row_bytes, 0
        while self.slabs and (
            self.capacity > self.limit or (self.capacity % self.slab_rows and self.capacity < self.limit)
        ):
            self.slabs.pop()  # too many, or a last one that is smaller than the limit asks for now

    def grow(self, slots: int) -> int:
        """How many of `slots` more rows there is room for, after taking memory for them if there is any."""
        while self.capacity < min(self.limit, self.used + slots):
            # All slabs but the last are full ones: slots are found by division.
            if self.slabs and self.capacity % self.slab_rows:
                break
            try:
                self.slabs.append(self._slab(min(self.slab_rows, self.limit - self.capacity)))
            except RuntimeError:  # out of memory: others took it since it was measured
                self.limit = self.capacity
        return min(slots, max(0, self.capacity - self.used))

    def drop_slab(self) -> range:
        """Give the last slab back; the slots it had."""
        last = self.slabs.pop()
        rows, first = len(next(iter(last.values()))), self.capacity
        self.limit = first
        self.used = min(self.used, first)
        return range(first, first + rows)

    def pieces(self, first: int, count: int) -> Iterator[tuple[dict[str, Tensor], slice, slice]]:
        """`count` slots from `first` on: of each slab touched, the slab, the slots in it and the rows they are of."""
        done = 0
        while done < count:
            number, offset = divmod(first + done, self.slab_rows)
            rows = min(count - done, self.slab_rows - offset)
            yield self.slabs[number], slice(offset, offset + rows), slice(done, done + rows)
            done += rows

    def row(self, slot: int) -> tuple[dict[str, Tensor], int]:
        """The slab of a slot, and its place there."""
        number, offset = divmod(slot, self.slab_rows)
        return self.slabs[number], offset

    def _slab(self, rows: int) -> dict[str, Tensor]:
        if not self.on_host:
            return {k: v.new_empty((rows, *v.shape[1:])) for k, v in self.like.items()}
        pinned = self.device.type == "cuda"
        return {k: torch.empty((rows, *v.shape[1:]), dtype=v.dtype, pin_memory=pinned) for k, v in self.like.items()}


class RowCache:
    """Values [n, ...] by row number, in two tiers."""

    def __init__(self, num_rows: int, shares: Shares | Measure) -> None:
        """`shares` may be measured anew at the start of every training step."""
        self.num_rows = num_rows
        self._measure = (lambda _: shares) if isinstance(shares, Shares) else shares
        self._shares = Shares(0)
        self._tiers: tuple[Tier, Tier] | None = None  # device, host; made by the first `put`
        self._tier = torch.full((num_rows,), -1, dtype=torch.int8)  # where a row lies: 0 device, 1 host, -1 nowhere
        self._slot = torch.zeros(num_rows, dtype=torch.long)
        self._side: torch.cuda.Stream | None = None  # of copies from and to the host
        self.clear()

    def clear(self) -> None:
        """Drop all rows and measure what the tiers may take; their memory is used again."""
        self._tier.fill_(-1)
        self._shares = self._measure(self.num_bytes[0])
        if self._tiers is not None:
            self._allow()

    def put(self, rows: Tensor, values: dict[str, Tensor]) -> None:
        """Keep `values` [n, ...] for `rows` i64 [n], as many as still fit."""
        if self._tiers is None:
            device, host = (
                Tier(self.num_rows, {k: v[:1] for k, v in values.items()}, on_host=h) for h in (False, True)
            )
            self._tiers = (device, host)
            self._allow()
        done = 0
        for number, tier in enumerate(self._tiers):
            count = tier.grow(len(rows) - done)
            with self._beside(values, needed=tier.on_host and count > 0):
                for slab, slots, part in tier.pieces(tier.used, count):
                    for name, value in values.items():
                        rest = value[done + part.start : done + part.stop]
                        slab[name][slots].copy_(rest, non_blocking=tier.on_host)
            taken = rows[done : done + count]
            self._tier[taken], self._slot[taken] = number, torch.arange(tier.used, tier.used + count)
            tier.used += count
            done += count

    def held(self, rows: Tensor) -> Tensor:
        """Which of the rows are kept, bool [n]."""
        return self._tier[rows] >= 0

    def counts(self) -> tuple[int, int]:
        """How many rows each tier keeps: device, host."""
        return int((self._tier == 0).sum()), int((self._tier == 1).sum())

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory taken: device, host."""
        return (0, 0) if self._tiers is None else (self._tiers[0].num_bytes, self._tiers[1].num_bytes)

    def get(self, rows: Tensor) -> dict[str, Tensor] | None:
        """The rows' values on the device, or None unless all of them are held."""
        fetched = self.fetch(rows)
        return None if fetched is None else fetched()

    def fetch(self, rows: Tensor) -> Callable[[], dict[str, Tensor]] | None:
        """Begin to bring the rows' values together; the answer gives them, [n, ...], and waits where it must.

        Copies from the host run beside what the device is doing. None unless all rows are held.
        """
        if self._tiers is None or not bool(self.held(rows).all()):
            return None
        tiers, slots = self._tier[rows].tolist(), self._slot[rows]
        device = self._tiers[0]
        if not any(tiers) and len(device.slabs) == 1:
            found = {name: tensor[slots] for name, tensor in device.slabs[0].items()}
            return lambda: found
        out = {name: like.new_empty((len(rows), *like.shape[1:])) for name, like in device.like.items()}
        for number, tier in enumerate(self._tiers):
            mine = [(i, tier.row(slot)) for i, slot in enumerate(slots.tolist()) if tiers[i] == number]
            with self._beside(out, needed=tier.on_host and bool(mine)):
                for i, (slab, offset) in mine:
                    for name, tensor in slab.items():
                        out[name][i].copy_(tensor[offset], non_blocking=tier.on_host)
        arrived = None if self._side is None else self._side.record_event()

        def ready() -> dict[str, Tensor]:
            if arrived is not None:
                torch.cuda.current_stream(device.device).wait_event(arrived)
            return out

        return ready

    def shrink(self) -> bool:
        """Give half of the device's slabs back: their rows move to the host while it has room, else they are dropped.

        Returns whether there was anything to give back. For a device that is out of memory.
        """
        if self._tiers is None or not self._tiers[0].slabs:
            return False
        device, host = self._tiers
        for _ in range(math.ceil(len(device.slabs) / 2)):
            slab = device.slabs[-1]
            slots = device.drop_slab()
            here = (self._tier == 0) & (self._slot >= slots.start)
            rows = here.nonzero().flatten()
            self._tier[rows] = -1
            count = host.grow(len(rows))
            kept = rows[:count]
            with self._beside(slab, needed=count > 0):
                for i, slot in enumerate(self._slot[kept].tolist()):
                    target, offset = host.row(host.used + i)
                    for name, tensor in slab.items():
                        target[name][offset].copy_(tensor[slot - slots.start], non_blocking=True)
            self._tier[kept], self._slot[kept] = 1, torch.arange(host.used, host.used + count)
            host.used += count
            self._wait()
        self._shares = Shares(device.limit * device.row_bytes, self._shares.host)
        return True

    def _allow(self) -> None:
        assert self._tiers is not None
        self._wait()  # for copies into slabs that may be given back
        for tier, share in zip(self._tiers, (self._shares.device, self._shares.host), strict=True):
            tier.allow(min(share, self.num_rows * tier.row_bytes))

    def _wait(self) -> None:
        if self._side is not None:
            self._side.synchronize()

    @contextmanager
    def _beside(self, on_device: dict[str, Tensor], *, needed: bool) -> Iterator[None]:
        """Queue copies from or to the host beside other work of the device, after what it was given so far."""
        first = next(iter(on_device.values()))
        if not needed or not first.is_cuda:
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(first.device)
        self._side.wait_stream(torch.cuda.current_stream(first.device))
        with torch.cuda.stream(self._side):
            yield
        for tensor in on_device.values():
            tensor.record_stream(self._side)
