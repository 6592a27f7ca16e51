"""Groups of workers and the futures that pass between them; the only place that chooses a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlinf.config.schema import Config
from rlinf.data.struct import TensorStruct
from rlinf.errors import UserError
from rlinf.runtime.placement import COMPONENTS, Plan

Route = list[tuple[int, int, int]]  # pieces of one destination rank: (source rank, first row, end row)


@dataclass(frozen=True)
class Routed:
    """One batch spread over the ranks of a group, and how the next group's ranks cut it."""

    futures: Sequence[Any]  # one per source rank
    routes: Sequence[Route]  # one per destination rank


class Group(Protocol):
    """All ranks of one worker class."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Every rank with the same arguments; a future per rank. Arguments may be futures or lists of futures."""

    def map(self, method: str, routed: Routed, **kwargs: Any) -> list[Any]:
        """Each rank with its own rows of an upstream batch."""


class Cluster(Protocol):
    """Where workers live. Each worker is a FIFO queue: calls issued earlier run earlier, so nothing can deadlock."""

    def launch(self, worker_cls: type, role: str) -> Group: ...

    def get(self, futures: Sequence[Any]) -> list[Any]:
        """Values of futures, in order; the first failure is raised here."""

    def shutdown(self) -> None: ...


def merge(pieces: Sequence[Any], cuts: Sequence[tuple[int, int]]) -> Any:
    """The rows [lo, hi) of each piece, one after another; a single whole piece is passed on untouched."""
    if len(pieces) == 1 and cuts[0] == (0, len(pieces[0])):
        return pieces[0]
    parts = [piece[lo:hi] for piece, (lo, hi) in zip(pieces, cuts, strict=True)]
    if isinstance(parts[0], TensorStruct):
        return type(parts[0]).cat(parts)
    return torch.cat(parts)


def check_backend(cfg: Config, plan: Plan) -> None:
    """Refuse a plan that one process on one accelerator cannot carry out."""
    used = {(s.node, device) for c in COMPONENTS for s in plan.slots(c) for device in s.devices}
    if cfg.cluster.backend == "ray" or len(plan.actor) > 1 or cfg.cluster.num_nodes > 1 or len(used) > 1:
        accelerators = f", {len(used)} accelerators" if len(used) > 1 else ""
        raise UserError(
            f"cluster: this plan needs Ray ({len(plan.actor)} actor ranks, {cfg.cluster.num_nodes} nodes"
            f"{accelerators}), which is not built yet; place everything in one process with "
            "cluster.component_placement={'actor,env,rollout': '0'}"
        )


def make_cluster(cfg: Config, plan: Plan) -> Cluster:
    """One process where that is enough."""
    check_backend(cfg, plan)
    from rlinf.runtime.local import LocalCluster

    return LocalCluster(cfg, plan)
