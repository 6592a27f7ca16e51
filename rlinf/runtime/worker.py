"""What a worker is: a plain class with blocking methods that knows its rank and its process, not the runtime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlinf.config.schema import Config
from rlinf.placement.plan import Plan
from rlinf.runtime.process_group import ProcessGroup


def limit_threads(cfg: Config) -> None:
    """Apply cluster.torch_threads to this process."""
    if cfg.cluster.torch_threads > 0:
        torch.set_num_threads(cfg.cluster.torch_threads)


class Process:
    """The process a worker runs in: its device, its process groups, and objects that its workers share by name."""

    def __init__(self, device: torch.device, groups: Mapping[str, ProcessGroup] | None = None) -> None:
        self.device = device
        self._groups = dict(groups or {})
        self._shared: dict[str, Any] = {}
        self._lock = threading.RLock()  # ranks are set up at the same time, and must not make two policies

    def group(self, name: str) -> ProcessGroup:
        """The processes that exchange tensors with this one under `name`, or a group of one."""
        return self._groups.get(name, ProcessGroup())

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """The object `name` that all workers of this process share; the first that asks makes it."""
        with self._lock:
            if name not in self._shared:
                self._shared[name] = make()
            return self._shared[name]

    def find(self, name: str) -> Any:
        """A shared object that some worker of this process has made."""
        return self._shared[name]


class Worker:
    """Base of EnvWorker, RolloutWorker and ActorWorker."""

    def __init__(self, cfg: Config, plan: Plan, rank: int, process: Process) -> None:
        self.cfg, self.plan, self.rank, self.process = cfg, plan, rank, process
        self.device = process.device
        self._seconds: dict[str, float] = {}

    def invoke(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method by name; every backend calls workers this way, so that each call's time is known."""
        start = time.perf_counter()
        try:
            return getattr(self, method)(*args, **kwargs)
        finally:
            self._seconds[method] = self._seconds.get(method, 0.0) + time.perf_counter() - start

    def drain_seconds(self) -> dict[str, float]:
        """Seconds spent in each method since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def setup(self) -> None:
        """Heavy work: load weights, start simulators. Called once, after every worker of the role exists."""

    def close(self) -> None:
        """Free what this worker holds outside of Python's memory: simulator processes, files."""
