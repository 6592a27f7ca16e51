"""Stacks of blocks, and what is done block by block: gradient checkpointing, and gathering sharded weights.

Gradient checkpointing keeps the input of each block instead of its activations and computes the block again in the
backward pass. Measured with it (docs/benchmarks.md, one H200): an OpenVLA update with LoRA, 80 rows at a time, peaks
at 40.9 GiB.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Unit(NamedTuple):
    """Modules whose weights are needed together, and only while one of them runs."""

    modules: list[nn.Module]
    methods: tuple[str, ...] = ()  # besides forward, that are called from outside


class BlockStack(nn.Module):
    """A network that runs its blocks through `run_block`, so that memory can be traded for time."""

    checkpointing: bool = False  # recompute each block in the backward pass

    def run_block(self, block: nn.Module, *args: Any) -> Any:
        """block(*args), kept or recomputed; nothing to do where no gradient is wanted."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)

    def units(self) -> list[Unit]:
        """Its blocks, as units that sharded weights are gathered for; parts of a unit come before it."""
        return [Unit([block]) for part in self.modules() if isinstance(part, nn.ModuleList) for block in part]

    def keep_dtype(self) -> None:
        """Called before weights are sharded, perhaps in another dtype: go on computing in the present one."""


def set_checkpointing(module: nn.Module, on: bool) -> None:
    """Switch every stack of blocks inside `module`."""
    for part in module.modules():
        if isinstance(part, BlockStack):
            part.checkpointing = on
