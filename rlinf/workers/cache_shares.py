"""How much device and host memory the prefix cache of a rollout rank may take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlinf.config.schema import RolloutConfig
from rlinf.data.row_cache import Shares
from rlinf.placement.plan import Plan
from rlinf.runtime.memory import DeviceMemory, host_bytes_available

FIRST_SCRATCH = 0.35  # of the device: kept for the first update's activations, before they were measured
MARGIN = 0.04  # of the device: simulators may want more, and memory is never cut without waste
HOST_PART = 0.5  # of what the host has free
CPU_PART = 0.25  # of it, where rollouts run on the CPU and keep their prefixes there


@dataclass
class CacheShares:
    """Measures what is free at the start of every training step; `auto` in the config, else what is written there."""

    cfg: RolloutConfig
    device: torch.device
    ranks: int  # rollout ranks on this device, which share it
    neighbours: int  # rollout ranks on this node, which share its memory
    measured: bool = False  # whether an update has shown what its activations take

    @classmethod
    def of(cls, cfg: RolloutConfig, plan: Plan, rank: int, device: torch.device) -> CacheShares:
        """For rollout rank `rank`."""
        mine = plan.rollout[rank]
        node = [slot for slot in plan.rollout if slot.node == mine.node]
        return cls(cfg, device, sum(slot.devices == mine.devices for slot in node), len(node))

    def __call__(self, held: int) -> Shares:
        """What the cache may take, when it holds `held` bytes of the device."""
        device, host = self.cfg.prefix_cache_bytes, self.cfg.prefix_cache_host_bytes
        on_gpu = self.device.type == "cuda"
        if device == "auto":
            device = self._free_on_gpu(held) if on_gpu else int(CPU_PART * host_bytes_available()) // self.neighbours
        else:
            device //= self.ranks
        if host == "auto":
            host = int(HOST_PART * host_bytes_available()) // self.neighbours if on_gpu else 0
        return Shares(device, host)

    def _free_on_gpu(self, held: int) -> int:
        """What is left after everything else, activations included: guessed at first, then as the last step had them.

        Memory that the allocator keeps in no tensor will serve the activations again.
        """
        memory = DeviceMemory.look(self.device)
        scratch = memory.scratch if self.measured else int(FIRST_SCRATCH * memory.total)
        self.measured = True
        left = memory.free - max(0, scratch - memory.unused) - int(MARGIN * memory.total)
        return max(0, held + left // self.ranks)
