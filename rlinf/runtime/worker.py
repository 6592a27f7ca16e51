"""What a worker is: a plain class with blocking methods that knows its rank and its process, not the runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rlinf.config.schema import Config
from rlinf.runtime.placement import Plan


def limit_threads(cfg: Config) -> None:
    """Apply cluster.torch_threads to this process."""
    if cfg.cluster.torch_threads > 0:
        torch.set_num_threads(cfg.cluster.torch_threads)


class Process:
    """The process a worker lives in. Workers that share it share objects by name, parameters above all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._shared: dict[str, Any] = {}
        self._lock = threading.RLock()  # ranks of a group are set up at once, and must not make two policies

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

    def setup(self) -> None:
        """Heavy work: load weights, start simulators. Called once, after every worker exists."""

    def close(self) -> None:
        """Give everything back."""
