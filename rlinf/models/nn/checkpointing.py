"""Gradient checkpointing: keep a block's input only, and compute the block again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class BlockStack(nn.Module):
    """A network that runs its blocks through `run_block`, so that memory can be traded for time."""

    checkpointing: bool = False

    def run_block(self, block: nn.Module, *args: Any) -> Any:
        """block(*args), kept or recomputed; nothing to do where no gradient is wanted."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)


def set_checkpointing(module: nn.Module, on: bool) -> None:
    """Switch every stack of blocks inside `module`."""
    for part in module.modules():
        if isinstance(part, BlockStack):
            part.checkpointing = on
