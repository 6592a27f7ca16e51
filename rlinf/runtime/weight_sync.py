"""Weights from the actor to the rollout processes that hold copies of their own.

A sync sends the trainable parameters in flat buckets, straight into the copies, and then compares checksums of a sample
of every tensor, frozen ones and buffers included. If some copy differs all the same (it was built from other frozen
weights, or damaged), everything is sent and compared once more; if that does not help, the run ends with the tensor's
name. A sync overwrites every trainable number, so a copy that missed one is made whole by the next. All members decide
from the same gathered facts, so that they go on, repeat or fail together.
"""

from __future__ import annotations

import logging
import zlib
from itertools import zip_longest

import torch

from rlinf.data.buckets import as_bytes, buckets
from rlinf.errors import UserError
from rlinf.models.policy import Policy
from rlinf.runtime.process_group import ProcessGroup

Tensor = torch.Tensor
BUCKET_BYTES = 64 << 20
SAMPLED = 1024  # numbers of a tensor that enter its checksum, at equal distances
_LOG = logging.getLogger(__name__)


class _Member:
    """What the sender (rank 0 of the group) and the receivers do in step with each other."""

    def __init__(self, policy: Policy, group: ProcessGroup) -> None:
        self.policy, self.group = policy, group

    def _sync(self, *, full: bool) -> int:
        """One sync; `full`, which the sender decides, sends all parameters and buffers. Returns the bytes sent."""
        full = self._agree_on_full(full=full)
        sent = self._transfer(full=full)
        difference = self._compare()
        if difference and not full:
            if self.group.rank == 0:
                _LOG.warning("weight sync: %s; everything is sent", difference)
            sent += self._transfer(full=True)
            difference = self._compare()
        if difference:
            raise RuntimeError(f"weight sync: {difference}, although everything has been sent")
        return sent

    def _agree_on_full(self, *, full: bool) -> bool:
        """Whether the sender wants a full sync; refuses copies whose tensors differ in name, shape or dtype."""
        trained = {name for name, _ in self.policy.trainable_parameters()}
        layout = [f"{n} {list(t.shape)} {t.dtype}{' trained' * (n in trained)}" for n, t in self._tensors().items()]
        (ours, full), *copies = self.group.gather((layout, full))
        for copy, (theirs, _) in enumerate(copies):
            for tensor, other in zip_longest(ours, theirs, fillvalue="nothing"):
                if tensor != other:
                    raise UserError(
                        f"weight sync: the actor's policy has {tensor} where that of rollout copy {copy} has {other}; "
                        "every process must run the same code with the same config"
                    )
        return full

    def _transfer(self, *, full: bool) -> int:
        """Send or receive the tensors of a sync through one flat buffer; returns their bytes."""
        memory = [as_bytes(tensor) for tensor in self._tensors(full=full).values()]
        lengths = [len(part) for part in memory]
        buffer = torch.empty(min(BUCKET_BYTES, sum(lengths)), dtype=torch.uint8, device=self.group.device)
        for spans in buckets(lengths, len(buffer)):
            sizes = [span.size for span in spans]
            parts = [memory[span.item][span.first : span.last] for span in spans]
            pairs = list(zip(parts, buffer[: sum(sizes)].split(sizes), strict=True))
            if self.group.rank == 0:
                for part, place in pairs:
                    place.copy_(part)
            self.group.broadcast(buffer[: sum(sizes)])
            if self.group.rank > 0:
                for part, place in pairs:
                    part.copy_(place)
        return sum(lengths)

    def _compare(self) -> str | None:
        """What differs between the actor's weights and a copy, if anything does."""
        ours, *copies = self.group.gather({name: checksum(tensor) for name, tensor in self._tensors().items()})
        for copy, theirs in enumerate(copies):
            for name, value in ours.items():
                if theirs[name] != value:
                    return f"rollout copy {copy} has another {name} than the actor"
        return None

    def _tensors(self, *, full: bool = True) -> dict[str, Tensor]:
        """All parameters and buffers, or those that train; in the same order everywhere."""
        if full:
            return dict(self.policy.named_parameters()) | dict(self.policy.named_buffers())
        return dict(self.policy.trainable_parameters())


class Sender(_Member):
    """The actor's side: copies become equal to its weights."""

    has_loaded = False  # other weights since the last sync, frozen ones perhaps included: the next one sends everything

    def send(self) -> int:
        """Bring every copy up to date; returns the bytes of parameters sent, 0 where nobody holds a copy."""
        if self.group.size == 1:
            return 0
        sent = self._sync(full=self.has_loaded)
        self.has_loaded = False
        return sent


class Receiver(_Member):
    """A rollout rank with a copy. Weights change in place: views of them and recorded kernels stay valid."""

    def receive(self) -> None:
        """Take part in one sync."""
        self._sync(full=False)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a sample of the tensor's numbers, bit by bit; the same on every device."""
    flat = tensor.detach().reshape(-1)
    # A copy: memory that numpy refers to could never be offloaded again.
    sample = flat[:: max(1, flat.numel() // SAMPLED)].clone(memory_format=torch.contiguous_format)
    return zlib.crc32(sample.view(torch.uint8).cpu().numpy().tobytes())
