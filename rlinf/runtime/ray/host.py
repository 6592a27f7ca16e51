"""Host: one process of a plan seen from inside; its workers, its log, and what it tells the driver of failures.

Ray runs it as an actor (runtime/ray.py). Nothing here knows of Ray.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlinf.config.schema import Config
from rlinf.placement.plan import Plan
from rlinf.runtime.process_group import connect, join_store, open_store
from rlinf.runtime.ray.devices import crowded_teams, device_variables, egl_cuda_numbers
from rlinf.runtime.ray.messages import Call, num_bytes
from rlinf.runtime.ray.session import LOOPBACK
from rlinf.runtime.worker import Process, Worker

LAST_WORDS = 20_000  # characters of a log that tell of its end


@dataclass(frozen=True)
class Failure:
    """A call that raised, as a value: calls that wait for it hand it on, and whoever asks for a result raises it."""

    process: int
    number: int  # of the failures of the process
    where: str  # e.g. rollout rank 1 on node 0
    error: Exception
    trace: str


@dataclass(frozen=True)
class Notice:
    """A warning that a worker logged."""

    where: str
    text: str


@dataclass(frozen=True)
class HostInfo:
    """What the driver remembers of a process, to name it when it is gone."""

    pid: int
    machine: str
    log: Path


class Host:
    """Workers are added role by role; each is called by one thread only, control methods by another."""

    def __init__(
        self, cfg: Config, plan: Plan, index: int, *, address: str, folder: Path, devices: Sequence[str] | None
    ) -> None:
        self.cfg, self.plan, self.index, self.address = cfg, plan, index, address
        self.slot = plan.processes[index].slot
        self.name = f"process {index} on node {self.slot.node}"
        if folder.is_dir():
            os.chdir(folder)  # relative paths of the config mean the same as in the driver
        if devices is not None:  # before anything asks CUDA
            os.environ.update(device_variables(devices, egl_cuda_numbers() if devices else []))
        if address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.log = open_log(cfg, plan, index)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own waits for calls that may wait for a dead peer
        faulthandler.register(signal.SIGTERM, file=2, chain=True)
        self._workers: dict[str, Worker] = {}
        self._events: queue.SimpleQueue[Failure | Notice] = queue.SimpleQueue()
        self._failures, self._bytes, self._stopped = 0, 0, False
        self._lock = threading.Lock()
        self._current = threading.local()  # which worker this thread runs
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger().addHandler(_Forward(self))
        torch.set_num_threads(cfg.cluster.torch_threads or self._fair_threads())

    def describe(self) -> HostInfo:
        """Who this is."""
        return HostInfo(os.getpid(), socket.gethostname(), self.log)

    def open_store(self) -> int | Failure:
        """Become the meeting point of all processes; its port."""
        try:
            self._store, port = open_store(self.address)
            return port
        except Exception as error:
            return self._failed(self.name, error)

    def connect(self, address: str, port: int) -> Failure | None:
        """Meet the other processes and form the plan's teams; port 0 where no two processes talk directly."""
        try:
            device = self._device()
            teams = {}
            if port:
                store = self._store if self.index == 0 else join_store(address, port)
                size, crowded = len(self.plan.processes), crowded_teams(self.plan)
                teams = connect(store, self.index, size, self.plan.teams, device, crowded=crowded)
            self._process = Process(device, teams)
            return None
        except Exception as error:
            return self._failed(self.name, error)

    def add(self, worker_cls: type[Worker], role: str, rank: int) -> Failure | None:
        """A worker moves in."""
        try:
            self._workers[role] = worker_cls(self.cfg, self.plan, rank, self._process)
            return None
        except Exception as error:
            return self._failed(self.name, error)

    def call(self, role: str, call: Call, *values: Any) -> Any:
        """Run one call of the worker in `role`; a failure is the call's value, and is told to the driver at once."""
        for value in values:
            if isinstance(value, Failure):
                return value
        worker = self._workers[role]
        self._current.where = where = f"{role} rank {worker.rank} on node {self.slot.node}"
        if self._stopped and call.method != "close":
            return Failure(self.index, 0, where, RuntimeError("the run is over"), "")
        try:
            if worker.device.type == "cuda":
                torch.cuda.set_device(worker.device)
            self._count(values, call.sources)
            return worker.invoke(call.method, *call.arguments(values), **call.kwargs)
        except Exception as error:
            return self._failed(where, error)

    def watch(self) -> Failure | Notice:
        """The next thing the driver should know of; the driver waits for it all the time."""
        return self._events.get()

    def drain_bytes(self) -> int:
        """Bytes of the values received from other processes since the last call."""
        with self._lock:
            count, self._bytes = self._bytes, 0
        return count

    def stop(self) -> None:
        """Calls that have not begun fail; only `close` is still carried out."""
        self._stopped = True

    def notice(self, text: str) -> None:
        """Tell the driver of a warning."""
        self._events.put(Notice(getattr(self._current, "where", self.name), text))

    def _count(self, values: tuple[Any, ...], sources: tuple[int, ...]) -> None:
        received = sum(num_bytes(v) for v, source in zip(values, sources, strict=True) if source != self.index)
        with self._lock:
            self._bytes += received

    def _failed(self, where: str, error: Exception) -> Failure:
        trace = traceback.format_exc()
        print(f"{where} failed:\n{trace}", file=sys.stderr, flush=True)
        with self._lock:
            self._failures += 1
            number = self._failures
        failure = Failure(self.index, number, where, _portable(error), trace)
        self._events.put(failure)
        return failure

    def _device(self) -> torch.device:
        """The first accelerator of the slot, where it is a real one."""
        real = bool(self.slot.devices) and not self.cfg.cluster.virtual_devices and torch.cuda.is_available()
        return torch.device("cuda", 0) if real else torch.device("cpu")

    def _fair_threads(self) -> int:
        """This machine's cores, shared with the other processes of the plan on the node."""
        neighbours = sum(p.slot.node == self.slot.node for p in self.plan.processes)
        return max(1, len(os.sched_getaffinity(0)) // neighbours)


class _Forward(logging.Handler):
    """Warnings of any logger go to the driver too."""

    def __init__(self, host: Host) -> None:
        super().__init__(logging.WARNING)
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        self._host.notice(record.getMessage())


def open_log(cfg: Config, plan: Plan, index: int) -> Path:
    """Send everything this process prints, its crash reports included, to its file; per_worker_log adds a link by rank.

    Workers that share a process share its output: their links point to the same file.
    """
    root = Path(cfg.runner.per_worker_log_path or Path(cfg.runner.logger.log_path) / "worker_logs").resolve()
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"process_{index}.log"
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    workers = plan.processes[index].workers
    names = ", ".join(f"{w.role} rank {w.rank}" for w in workers)
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()}: {names}", flush=True)
    if cfg.runner.per_worker_log:
        groups = {
            "env": cfg.env.group_name,
            "rollout": cfg.rollout.group_name,
            "actor": cfg.actor.group_name,
        }
        for role, rank in workers:
            link = root / groups[role] / f"rank_{rank}.log"
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / path.name)
    return path


def cause_of_death(reason: str, log: Path | None) -> str:
    """One phrase of what Ray says of a dead process, or of its last words in its log."""
    if "No module named 'rlinf'" in reason:
        return "rlinf is not installed there"
    if "its node" in reason:
        return "its node is gone"
    if "unavailable" in reason:
        return "it does not answer: its raylet is gone, or the network"
    if "OutOfMemory" in reason or "low on memory" in reason:
        return "its machine ran out of memory"
    if log is None:
        return reason.splitlines()[-1]
    last_words = log.read_text(errors="replace")[-LAST_WORDS:] if log.is_file() else ""
    what = first_line(reason)
    if crash := re.findall(r"\*\*\* (SIG\w+) received", last_words):
        what = crash[-1]
    elif "(most recent call first)" in last_words:  # Host asks for these lines on SIGTERM
        what = "SIGTERM"
    elif "Worker unexpectedly exits" in reason:
        what = "SIGKILL, for it left no report (from the kernel, if memory ran out: see dmesg)"
    return f"{what}; its log is {log}"


def first_line(error: object) -> str:
    """What matters of a long message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _portable(error: Exception) -> Exception:
    """The same error if it survives a trip to another process, else one that says as much."""
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    same = type(copy) is type(error) and str(copy) == str(error)
    return error if same else RuntimeError(f"{type(error).__name__}: {error}")
