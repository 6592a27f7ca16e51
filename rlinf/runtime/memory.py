"""How much memory a device and its host have left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one GPU: what the driver has free, and what this process's allocator holds."""

    total: int
    free: int
    unused: int  # held by the allocator, in no tensor
    scratch: int  # the most that was in tensors since the last look, beyond what is now

    @classmethod
    def look(cls, device: torch.device) -> DeviceMemory:
        """Measure, and begin to watch for the next look."""
        free, total = torch.cuda.mem_get_info(device)
        now = torch.cuda.memory_allocated(device)
        unused = torch.cuda.memory_reserved(device) - now
        scratch = torch.cuda.max_memory_allocated(device) - now
        torch.cuda.reset_peak_memory_stats(device)
        return cls(total, free, unused, scratch)


def host_bytes_available() -> int:
    """What programs may still take of the host's memory: of the machine, and of the control group that limits us."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return machine
    return machine if limit == "max" else min(machine, max(0, int(limit) - int(used)))
