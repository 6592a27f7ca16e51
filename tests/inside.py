"""The inside of a run that tests look at, in one place: workers of a local run, processes, joined layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlinf.models.nn.packed import Packed
from rlinf.runner import Runner
from rlinf.runtime.local import LocalGroup
from rlinf.runtime.ray.cluster import RayCluster


def worker(runner: Runner, role: str, rank: int = 0) -> Any:
    """A worker of a run in one process."""
    group = {"env": runner.env, "rollout": runner.rollout, "actor": runner.actor}[role]
    assert isinstance(group, LocalGroup)
    return group.workers[rank]


def pids(runner: Runner) -> list[int]:
    """The processes of a run on Ray."""
    assert isinstance(runner.cluster, RayCluster)
    return [process.pid for process in runner.cluster.processes]


def still_joined(module: nn.Module) -> list[bool]:
    """For every group of layers that were joined: whether their weights still lie in one tensor."""
    return [found.is_current(part._layers(group)) for part, group, found in _joined(module)]


def joined_weights(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every group of layers that were joined: the joined weight, and that of the first layer."""
    return [(found.weight, part._layers(group)[0].weight) for part, group, found in _joined(module)]


def _joined(module: nn.Module) -> list[tuple[Packed, Any, Any]]:
    blocks = [part for part in module.modules() if isinstance(part, Packed)]
    return [(part, group, found) for part in blocks for group, found in part._joined.items()]
