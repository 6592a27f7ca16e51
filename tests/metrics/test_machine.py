"""What the machine does is read as it stands in /proc, and from NVML's answers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from rlinf.metrics import machine
from rlinf.metrics.machine import Machine
from rlinf.metrics.names import find_metric


class TwoDevices:
    """Answers as NVML would for two devices, the second of which cannot be asked."""

    @staticmethod
    def nvmlDeviceGetCount_v2(count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    @staticmethod
    def nvmlDeviceGetHandleByIndex_v2(index: int, device: Any) -> int:  # noqa: N802
        device._obj.value = 100 + index
        return 0

    @staticmethod
    def nvmlDeviceGetMemoryInfo(device: ctypes.c_void_p, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.free, memory._obj.used = 80 << 30, 50 << 30, 30 << 30
        return 0 if device.value == 100 else 15


def test_shares_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, memory = tmp_path / "stat", tmp_path / "meminfo"
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine, "MEMORY", memory)
    monkeypatch.setattr(machine, "_nvml", lambda: TwoDevices)
    memory.write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n")
    stat.write_text("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1 1\n")
    watched = Machine(tmp_path)
    stat.write_text("cpu  130 0 80 830 60 0 0 0 0 0\ncpu0 1 1 1 1\n")
    found = watched.sample()
    assert found.pop("system/disk_free") > 0
    assert found == {"system/cpu": 0.6, "system/host_memory": 600 * 1024.0, "system/device_memory": float(30 << 30)}
    assert all(find_metric(name) for name in found)


def test_what_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STAT", tmp_path / "none")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "none")
    monkeypatch.setattr(machine, "_nvml", lambda: None)
    assert Machine(tmp_path / "none").sample() == {"system/device_memory": 0.0}


def test_a_processor_is_named_by_its_model_or_by_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "PROCESSORS", listed)
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.processor_name() == "aarch64"
    listed.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t: avx2\n\nmodel name\t: other\n")
    assert machine.processor_name() == "AMD EPYC 7763"
    listed.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n")
    assert machine.processor_name() == "aarch64"
