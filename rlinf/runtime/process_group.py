"""Teams: processes that exchange tensors directly. Everything torch.distributed is behind this file."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor
TIMEOUT = timedelta(minutes=30)  # of one collective: a rank that waits longer has lost its peers


@dataclass(frozen=True)
class Team:
    """Ranks that call the same collectives in the same order; a team of one talks to nobody."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed.ProcessGroup
    device: torch.device = field(
        default_factory=lambda: torch.device("cpu")
    )  # where the group's tensors travel from and to

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on x's own device."""
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """The largest over all ranks, entry by entry."""
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite x by the source rank's, in place."""
        if self.size == 1:
            return
        there = x.to(self.device)
        dist.broadcast(there, group_src=source, group=self.group)
        if there.data_ptr() != x.data_ptr():
            x.copy_(there)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small plain value (numbers, strings, dicts of them), by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _all_reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return x
        there = x.detach().to(self.device, copy=True)
        dist.all_reduce(there, op, group=self.group)
        return there.to(x.device)


def open_store(address: str) -> tuple[dist.TCPStore, int]:
    """The meeting point of all processes, on a free port of this address of the machine and no other."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=descriptor
    )
    return store, port


def join_store(address: str, port: int) -> dist.TCPStore:
    """The meeting point that another process has opened."""
    return dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)


def connect(
    store: dist.Store,
    index: int,
    size: int,
    teams: Mapping[str, Sequence[int]],
    device: torch.device,
    *,
    crowded: Collection[str] = (),
) -> dict[str, Team]:
    """Meet all processes of a run and form its teams; the calling process gets those it belongs to.

    teams: process indices by name. `crowded`: those of which two share an accelerator, which NCCL does not allow.
    """
    order = [process for members in teams.values() for process in members]
    order = list(dict.fromkeys([*order, *range(size)]))  # torch ranks a group's members as it ranks the processes
    dist.init_process_group("gloo", store=store, rank=order.index(index), world_size=size, timeout=TIMEOUT)
    mine: dict[str, Team] = {}
    for name, members in teams.items():  # every process calls new_group for every team, in the same order
        if len(members) == 1:
            continue
        ranks = [order.index(member) for member in members]
        nccl = device.type == "cuda" and name not in crowded
        assert ranks == sorted(ranks), f"team {name} is ordered unlike those before it"
        group = dist.new_group(ranks, backend="nccl" if nccl else "gloo", timeout=TIMEOUT)
        if index in members:
            where = device if nccl else torch.device("cpu")
            mine[name] = Team(members.index(index), len(members), group, where)
    return mine


def alone(device: torch.device) -> Team:
    """A team of one that has a group all the same, which sharding is made of; also in a process without a run."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group([dist.get_rank()], backend=backend, timeout=TIMEOUT, use_local_synchronization=True)
    return Team(0, 1, group, device)


def disconnect() -> None:
    """Leave the teams."""
    if dist.is_initialized():
        dist.destroy_process_group()
