"""What a worker is: a plain class with blocking methods that knows its rank and its process, not the runtime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlinf.config.schema import Config
from rlinf.placement.plan import Plan
from rlinf.runtime.process_group import Team


def limit_threads(cfg: Config) -> None:
    """Apply cluster.torch_threads to this process."""
    if cfg.cluster.torch_threads > 0:
        torch.set_num_threads(cfg.cluster.torch_threads)


class Process:
    """The process a worker lives in. Workers that share it share objects by name, parameters above all."""

    def __init__(self, device: torch.device, teams: Mapping[str, Team] | None = None) -> None:
        self.device = device
        self._teams = dict(teams or {})
        self._shared: dict[str, Any] = {}
        self._lock = threading.RLock()  # ranks of a group are set up at once, and must not make two policies

    def team(self, name: str) -> Team:
        """The processes this one talks to under `name`, or a team of one."""
        return self._teams.get(name, Team())

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """The object `name` of this process, made by whoever asks first."""
        with self._lock:
            if name not in self._shared:
                self._shared[name] = make()
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
        """Heavy work: load weights, start simulators. Called once, after every worker exists."""

    def close(self) -> None:
        """Give everything back."""
