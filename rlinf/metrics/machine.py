"""What the machine that a run is started on does: processors, memory, devices, disk. Reads /proc and NVML."""

from __future__ import annotations

import ctypes
import platform
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

STAT, MEMORY, PROCESSORS = Path("/proc/stat"), Path("/proc/meminfo"), Path("/proc/cpuinfo")


class Machine:
    """Samples the machine once per training step; what cannot be read is left out."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where the run writes: the disk that must not fill up."""
        self._folder = folder
        self._ticks = _processor_ticks()

    def sample(self) -> dict[str, float]:
        """`system/...` metrics: processors since the last sample, the rest as it is now."""
        out = {"system/device_memory": float(max(_device_memory(), default=0))}
        now = _processor_ticks()
        if now is not None and self._ticks is not None and now[1] > self._ticks[1]:
            out["system/cpu"] = (now[0] - self._ticks[0]) / (now[1] - self._ticks[1])
        self._ticks = now
        with suppress(OSError, ValueError, KeyError):
            lines = (line.split(":") for line in MEMORY.read_text().splitlines())
            kilobytes = {name: int(value.split()[0]) for name, value in lines}
            out["system/host_memory"] = 1024.0 * (kilobytes["MemTotal"] - kilobytes["MemAvailable"])
        with suppress(OSError):
            out["system/disk_free"] = float(shutil.disk_usage(self._folder).free)
        return out


def processor_name() -> str:
    """The model of this machine's processors, such as `AMD EPYC 7763`; their architecture where it is not told."""
    with suppress(OSError):
        for line in PROCESSORS.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def _processor_ticks() -> tuple[int, int] | None:
    """Clock ticks since the machine started, summed over its processors: those at work, and all."""
    with suppress(OSError, ValueError, IndexError):
        ticks = [int(text) for text in STAT.read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
        return sum(ticks) - idle, sum(ticks)
    return None


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@cache
def _nvml() -> ctypes.CDLL | None:
    """NVIDIA's management library, which opens no context on a device; None where there is none."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            return library
    return None


def _device_memory() -> list[int]:
    """Bytes in use on every NVIDIA device of this machine, by whomever."""
    library, count, used = _nvml(), ctypes.c_uint(), []
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _Memory()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0 and (
            library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
        ):
            used.append(int(memory.used))
    return used
