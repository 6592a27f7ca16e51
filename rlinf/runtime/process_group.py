"""Process groups: processes that exchange tensors directly. Everything torch.distributed is behind this file."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor
TIMEOUT = timedelta(minutes=30)  # of one collective: a rank that waits longer has lost its peers
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that call the same collectives in the same order; in a group of one each returns its own argument."""

    rank: int = 0
    size: int = 1
    handle: Any = None  # torch.distributed.ProcessGroup; None in a group of one that never shards
    device: torch.device = CPU  # of the tensors that the group's backend sends

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on x's own device."""
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """The largest over all ranks, entry by entry."""
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x by rank 0's, in place."""
        if self.size == 1:
            return
        sent = x.to(self.device)
        dist.broadcast(sent, group_src=0, group=self.handle)
        if sent.data_ptr() != x.data_ptr():
            x.copy_(sent)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small plain value (numbers, strings, dicts of them), by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def _all_reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return x
        sent = x.detach().to(self.device, copy=True)
        dist.all_reduce(sent, op, group=self.handle)
        return sent.to(x.device)


def open_store(address: str) -> tuple[dist.TCPStore, int]:
    """The store through which all processes of a run meet, and its port: a free one of this address and no other."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=descriptor
    )
    return store, port


def join_store(address: str, port: int) -> dist.TCPStore:
    """The store that another process has opened."""
    return dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)


def connect(
    store: dist.Store,
    index: int,
    size: int,
    groups: Mapping[str, Sequence[int]],
    device: torch.device,
    *,
    on_gloo: Collection[str] = (),
) -> dict[str, ProcessGroup]:
    """Meet all `size` processes of a run and form its groups; returns those that process `index` belongs to.

    groups: process indices by name. `on_gloo` names those that must not use NCCL even though `device` is a GPU.
    """
    order = [process for members in groups.values() for process in members]
    order = list(dict.fromkeys([*order, *range(size)]))  # torch ranks a group's members as it ranks the processes
    dist.init_process_group("gloo", store=store, rank=order.index(index), world_size=size, timeout=TIMEOUT)
    mine: dict[str, ProcessGroup] = {}
    for name, members in groups.items():  # every process calls new_group for every group, in the same order
        if len(members) == 1:
            continue
        ranks = [order.index(member) for member in members]
        assert ranks == sorted(ranks), f"group {name} is ordered unlike those before it"
        nccl = device.type == "cuda" and name not in on_gloo
        handle = dist.new_group(ranks, backend="nccl" if nccl else "gloo", timeout=TIMEOUT)
        if index in members:
            mine[name] = ProcessGroup(members.index(index), len(members), handle, device if nccl else CPU)
    return mine


def group_of_one(device: torch.device) -> ProcessGroup:
    """A group of one with a torch handle, which FSDP needs; also in a process that has connected to no other."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    backend = "nccl" if device.type == "cuda" else "gloo"
    handle = dist.new_group([dist.get_rank()], backend=backend, timeout=TIMEOUT, use_local_synchronization=True)
    return ProcessGroup(0, 1, handle, device)


def disconnect() -> None:
    """Leave all groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
