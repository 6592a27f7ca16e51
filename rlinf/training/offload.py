"""Device memory that is freed while other components work: weights and optimiser state wait in host memory.

Storages are moved as a whole: every tensor, view and hook on them stays as it is, so that joined projections, sharded
parameters and optimisers notice nothing. Only the addresses change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from rlinf.data.buckets import buckets
from rlinf.training.optim import named_tensors
from rlinf.training.parallel import SingleRank

Tensor = torch.Tensor
CHUNK_BYTES = 256 << 20  # of pinned memory, which torch hands out in powers of two


class HostBuffer:
    """Host memory in which tensors of one device can wait; pinned beside a GPU, allocated once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.chunks: list[Tensor] = []  # u8 [up to CHUNK_BYTES]
        self._held: list[tuple[torch.UntypedStorage, int]] = []  # storages that were moved here, with their bytes

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Move the tensors' memory to the host and free it on the device; bytes moved, 0 if some are here already."""
        if self._held:
            return 0
        self._held = [(storage, storage.nbytes()) for storage in device_storages(tensors, self.device)]
        for on_device, on_host in self._pairs():
            on_host.copy_(on_device, non_blocking=True)
        self._wait()
        for storage, _ in self._held:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # to the driver: other processes want it
        return self._num_bytes

    def restore(self) -> int:
        """Undo `offload`; bytes moved."""
        for storage, size in self._held:
            storage.resize_(size)
        for on_device, on_host in self._pairs():
            on_device.copy_(on_host, non_blocking=True)
        self._wait()
        moved, self._held = self._num_bytes, []
        return moved

    @property
    def _num_bytes(self) -> int:
        return sum(size for _, size in self._held)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the storages, and where on the host each of them waits."""
        memory = [torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage) for storage, _ in self._held]
        for number, spans in enumerate(buckets([size for _, size in self._held], CHUNK_BYTES)):
            sizes = [span.size for span in spans]
            for span, place in zip(spans, self._chunk(number, sum(sizes))[: sum(sizes)].split(sizes), strict=True):
                yield memory[span.item][span.first : span.last], place

    def _chunk(self, number: int, size: int) -> Tensor:
        if number == len(self.chunks):
            self.chunks.append(torch.empty(0, dtype=torch.uint8))
        if len(self.chunks[number]) < size:
            self.chunks[number] = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return self.chunks[number]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class ActorMemory:
    """What an actor holds on its device, and which of it can be moved away during a rollout."""

    def __init__(self, parallel: SingleRank, device: torch.device, *, owns_weights: bool) -> None:
        """`owns_weights`: nobody else in this process reads the policy's weights."""
        self.parallel, self.policy, self.owns_weights = parallel, parallel.policy, owns_weights
        self._weights, self._state = HostBuffer(device), HostBuffer(device)
        self._moved = 0  # bytes since the last report

    def offload(self) -> int:
        """Move shards, fp32 copies, optimiser state and, if owned, weights to the host; gradients are dropped.

        Returns the bytes moved since the last report.
        """
        self.parallel.zero_gradients()
        self._moved += self._state.offload(self._training_tensors())
        if self.owns_weights:
            self._moved += self._weights.offload(self.policy.parameters())
        return self._report()

    def onload(self) -> int:
        """Move everything back; bytes moved since the last report."""
        self._moved += self._weights.restore() + self._state.restore()
        return self._report()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Have the weights on the device for the block, without the rest."""
        restored = self._weights.restore()
        self._moved += restored
        try:
            yield
        finally:
            if restored:
                self._moved += self._weights.offload(self.policy.parameters())

    def _report(self) -> int:
        moved, self._moved = self._moved, 0
        return moved

    def _training_tensors(self) -> list[Tensor]:
        """What only the update needs: all but the policy's own parameters."""
        own, optimizer = {id(parameter) for parameter in self.policy.parameters()}, self.parallel.optimizer
        copies = [tensor for _, tensor in named_tensors(optimizer) if id(tensor) not in own]
        state = [x for fields in optimizer.state.values() for x in fields.values() if isinstance(x, Tensor)]
        return [*self.parallel.shard_tensors, *copies, *state]


def device_storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The memory of those tensors that are on the device, each once; memory that numpy refers to cannot be moved."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes() > 0 and storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())
