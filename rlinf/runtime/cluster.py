"""Groups of workers and the futures that pass between them: what local.py and ray/cluster.py both offer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rlinf.config.schema import Config
from rlinf.data.layout import Piece
from rlinf.data.struct import TensorStruct
from rlinf.errors import UserError, install_line
from rlinf.placement.plan import Plan

Route = Sequence[Piece]  # the pieces of several ranks' batches that, one after another, are a rank's own batch


class Group(Protocol):
    """All ranks of one worker class. A call returns futures at once; its positional arguments may be futures."""

    def __len__(self) -> int: ...

    def one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """One rank; its future."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Every rank with the same arguments; a future per rank."""

    def map(self, method: str, futures: Sequence[Any], routes: Sequence[Route], **kwargs: Any) -> list[Any]:
        """Each rank with its own rows of a batch that the ranks of another group make; `routes` has one per rank."""


class Cluster(Protocol):
    """Where workers live. Each worker is a FIFO queue: calls issued earlier run earlier, so nothing can deadlock."""

    def launch(self, worker_cls: type, role: str) -> Group:
        """Construct every rank of `role` in its process and set it up."""

    def get(self, futures: Sequence[Any]) -> list[Any]:
        """Values of futures, in order; the first failure is raised here."""

    def drain_bytes(self) -> int:
        """Bytes that workers passed to workers of other processes since the last call."""

    def shutdown(self) -> None:
        """Close every worker and end every process."""


def merge(values: Sequence[Any], route: Route) -> Any:
    """The rows of each value that its piece of the route names, one after another; a single whole one is not copied.

    None for a rank without rows: its route has no pieces.
    """
    if not route:
        return None
    if len(values) == 1 and route[0][1:] == (0, len(values[0])):
        return values[0]
    parts = [value[first:end] for value, (_, first, end) in zip(values, route, strict=True)]
    if isinstance(parts[0], TensorStruct):
        return type(parts[0]).cat(parts)
    return torch.cat(parts)


def check_backend(plan: Plan) -> None:
    """Refuse a plan whose backend is not installed."""
    if not plan.one_process and importlib.util.find_spec("ray") is None:
        raise UserError(
            f"cluster: this plan has {len(plan.processes)} processes, which Ray runs, and the Python package ray is "
            f"not installed: {install_line('ray')}; or place everything in one process with "
            "cluster.component_placement={'actor,env,rollout': '0'}"
        )


def make_cluster(cfg: Config, plan: Plan) -> Cluster:
    """One process where that is enough, else Ray."""
    check_backend(plan)
    if plan.one_process:
        from rlinf.runtime.local import LocalCluster

        return LocalCluster(cfg, plan)
    from rlinf.runtime.ray.cluster import RayCluster

    return RayCluster(cfg, plan)
