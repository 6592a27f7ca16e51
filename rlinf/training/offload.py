"""Device memory that is given back while others work: weights and optimiser state wait on the host.

Storages leave and return whole: every tensor, view and hook on them stays as it is, so that joined projections, sharded
parameters and optimisers notice nothing. Only the addresses change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from rlinf.data.byte_spans import buckets
from rlinf.training.optim import named_tensors
from rlinf.training.parallel import Alone

Tensor = torch.Tensor
CHUNK_BYTES = 256 << 20  # of pinned memory, which torch hands out in powers of two


class Parking:
    """Host memory in which tensors of one device can wait; pinned beside a GPU, allocated once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[Tensor] = []  # u8 [up to CHUNK_BYTES]
        self._away: list[tuple[torch.UntypedStorage, int]] = []  # with its size in bytes

    @property
    def is_used(self) -> bool:
        return bool(self._away)

    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Move the tensors' memory to the host and free it on the device; bytes moved, 0 when they are away already."""
        if self._away:
            return 0
        self._away = [(storage, storage.nbytes()) for storage in _storages(tensors, self.device)]
        for here, there in self._pairs():
            there.copy_(here, non_blocking=True)
        self._wait()
        for storage, _ in self._away:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # to the driver: other processes want it
        return self._num_bytes

    def come_back(self) -> int:
        """Undo `leave`; bytes moved."""
        for storage, size in self._away:
            storage.resize_(size)
        for here, there in self._pairs():
            here.copy_(there, non_blocking=True)
        self._wait()
        moved, self._away = self._num_bytes, []
        return moved

    @property
    def _num_bytes(self) -> int:
        return sum(size for _, size in self._away)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the storages, and where on the host each of them waits."""
        whole = [torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage) for storage, _ in self._away]
        for number, bucket in enumerate(buckets([size for _, size in self._away], CHUNK_BYTES)):
            chunk, at = self._chunk(number, sum(span.size for span in bucket)), 0
            for span in bucket:
                yield whole[span.item][span.first : span.last], chunk[at : at + span.size]
                at += span.size

    def _chunk(self, number: int, size: int) -> Tensor:
        if number == len(self._chunks):
            self._chunks.append(torch.empty(0, dtype=torch.uint8))
        if len(self._chunks[number]) < size:
            pinned = self.device.type == "cuda"
            self._chunks[number] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._chunks[number]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class ActorMemory:
    """What an actor holds on its device, and which of it can leave during a rollout."""

    def __init__(self, parallel: Alone, device: torch.device, *, weights_leave: bool) -> None:
        """`weights_leave`: nobody else in this process reads the policy's weights."""
        self.parallel, self.policy, self.weights_leave = parallel, parallel.policy, weights_leave
        self._weights, self._state = Parking(device), Parking(device)
        self._moved = 0  # bytes since the last report

    def offload(self) -> int:
        """Shards, fp32 copies, optimiser state and, where nobody else reads them, weights leave; gradients are dropped.

        Returns the bytes moved since the last report.
        """
        self.parallel.zero_gradients()
        self._moved += self._state.leave(self._training_tensors())
        if self.weights_leave:
            self._moved += self._weights.leave(self.policy.parameters())
        return self._report()

    def onload(self) -> int:
        """Everything comes back; bytes moved since the last report."""
        self._moved += self._weights.come_back() + self._state.come_back()
        return self._report()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Holds the weights for the block, without the rest."""
        were_away = self._weights.is_used
        self._moved += self._weights.come_back()
        yield
        if were_away:
            self._moved += self._weights.leave(self.policy.parameters())

    def _report(self) -> int:
        moved, self._moved = self._moved, 0
        return moved

    def _training_tensors(self) -> list[Tensor]:
        """What only the update needs: all but the policy's own parameters."""
        own, optimizer = {id(parameter) for parameter in self.policy.parameters()}, self.parallel.optimizer
        copies = [tensor for _, tensor in named_tensors(optimizer) if id(tensor) not in own]
        state = [x for fields in optimizer.state.values() for x in fields.values() if isinstance(x, Tensor)]
        return [*self.parallel.shard_tensors, *copies, *state]


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The memory of those tensors that are on the device, each once; what numpy refers to cannot leave."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes() > 0 and storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())
