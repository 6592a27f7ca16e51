"""One process: each worker rank is a thread with a queue, and futures pass between them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from rlinf.config.schema import Config
from rlinf.placement.plan import Plan
from rlinf.runtime.cluster import Route, merge
from rlinf.runtime.process_group import disconnect
from rlinf.runtime.worker import Process, Worker, limit_threads

SWITCH_S = 0.0005  # a thread that computes in Python yields to others this often; Python's own 5 ms leave GPUs idle


class LocalGroup:
    """The ranks of one worker class, a thread each."""

    def __init__(self, workers: Sequence[Worker], role: str) -> None:
        self.workers = workers  # by rank
        self._threads = [
            ThreadPoolExecutor(1, f"{role}-{w.rank}", initializer=_use_device, initargs=(w.device,)) for w in workers
        ]

    def __len__(self) -> int:
        return len(self.workers)

    def one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future:
        worker = self.workers[rank]
        return self._threads[rank].submit(lambda: worker.invoke(method, *map(_value, args), **kwargs))

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        return [self.one(rank, method, *args, **kwargs) for rank in range(len(self))]

    def map(self, method: str, futures: Sequence[Future], routes: Sequence[Route], **kwargs: Any) -> list[Future]:
        def run(worker: Worker, route: Route) -> Any:
            values = [futures[piece.rank].result() for piece in route]
            return worker.invoke(method, merge(values, route), **kwargs)

        ranks = zip(self._threads, self.workers, routes, strict=True)
        return [thread.submit(run, worker, route) for thread, worker, route in ranks]

    def close(self) -> None:
        """Drop calls that have not begun, stop the threads, and let every worker free what it holds."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
        for worker in self.workers:
            worker.close()


class LocalCluster:
    """Threads and futures in the running process."""

    def __init__(self, cfg: Config, plan: Plan) -> None:
        self.cfg, self.plan = cfg, plan
        limit_threads(cfg)
        sys.setswitchinterval(SWITCH_S)
        self.process = Process(actor_device(cfg, plan))
        self._groups: list[LocalGroup] = []

    def launch(self, worker_cls: type[Worker], role: str) -> LocalGroup:
        """Construct every rank of `role` and set it up."""
        ranks = range(len(self.plan.slots(role)))
        group = LocalGroup([worker_cls(self.cfg, self.plan, rank, self.process) for rank in ranks], role)
        self._groups.append(group)
        self.get(group.call("setup"))
        return group

    def get(self, futures: Sequence[Future]) -> list[Any]:
        return [f.result() for f in futures]

    def drain_bytes(self) -> int:
        return 0  # workers of one process pass references

    def shutdown(self) -> None:
        for group in reversed(self._groups):
            group.close()
        self._groups.clear()
        disconnect()  # sharding may have made a group of one


def actor_device(cfg: Config, plan: Plan) -> torch.device:
    """The accelerator the plan names for the actor, else the first one there is; virtual ones are the CPU."""
    if cfg.cluster.virtual_devices or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", next(iter(plan.actor[0].devices), 0))


def _use_device(device: torch.device) -> None:
    """Send the kernels, streams and recordings of this thread to the worker's accelerator."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _value(arg: Any) -> Any:
    return arg.result() if isinstance(arg, Future) else arg
