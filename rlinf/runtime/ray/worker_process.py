"""WorkerProcess: one process of a plan, seen from inside. Ray runs it as an actor; nothing here imports Ray."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import torch

from rlinf.config.schema import Config
from rlinf.data.struct import num_bytes
from rlinf.errors import SimulatorError, UserError
from rlinf.placement.plan import Plan
from rlinf.runtime.cluster import Route, merge
from rlinf.runtime.process_group import connect, join_store, open_store
from rlinf.runtime.ray.devices import device_variables, groups_without_nccl
from rlinf.runtime.ray.session import LOOPBACK, ignore_read_only_warnings
from rlinf.runtime.worker import Process, Worker
from rlinf.simulators.opengl import egl_cuda_numbers

EXPLAINED = (UserError, SimulatorError, FloatingPointError)  # the command line shows these in one line


@dataclass(frozen=True)
class ProcessInfo:
    """What the driver remembers of a process, to name it when it is gone."""

    pid: int
    machine: str
    log: Path
    port: int  # of the store through which processes meet, in the first process of a plan where some do; else 0


class WorkerProcess:
    """The workers of one process, at most one of each role, and the log file they share.

    Ray calls each worker from one thread, in order, and the other methods from threads of their own.
    """

    def __init__(
        self, cfg: Config, plan: Plan, index: int, *, address: str, folder: Path, devices: Sequence[str] | None
    ) -> None:
        """`address`: of this node. `folder`: the driver's. `devices`: ids for CUDA; None leaves the environment."""
        self.cfg, self.plan, self.index = cfg, plan, index
        self.slot = plan.processes[index].slot
        self.name = f"process {index} on node {self.slot.node}"
        if folder.is_dir():
            os.chdir(folder)  # relative paths of the config mean the same as in the driver
        if devices is not None:  # before anything asks CUDA
            os.environ.update(device_variables(devices, egl_cuda_numbers() if devices else []))
        if address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.log = open_log(cfg, plan, index)
        for number in (signal.SIGTERM, signal.SIGHUP):  # sent to every process of a job: the driver still saves
            signal.signal(number, signal.SIG_IGN)
        ignore_read_only_warnings()
        self._port = 0
        if index == 0 and any(len(members) > 1 for members in plan.process_groups.values()):
            self._store, self._port = open_store(address)
        self._workers: dict[str, Worker] = {}
        self._warnings: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._bytes, self._stopped = 0, False
        self._lock = threading.Lock()  # of _bytes
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for_driver = QueueHandler(self._warnings)
        for_driver.setLevel(logging.WARNING)
        logging.getLogger().addHandler(for_driver)
        torch.set_num_threads(cfg.cluster.torch_threads or self._fair_threads())

    def describe(self) -> ProcessInfo:
        """Process id, machine and log file; also the answer to whether this process is alive."""
        return ProcessInfo(os.getpid(), socket.gethostname(), self.log, self._port)

    def connect(self, address: str, port: int) -> None:
        """Form the plan's process groups, if any, through the store of the first process."""
        with self._naming_errors(self.name):
            real = bool(self.slot.devices) and not self.cfg.cluster.virtual_devices and torch.cuda.is_available()
            device, groups = torch.device("cuda", 0) if real else torch.device("cpu"), {}
            if port:
                store = self._store if self.index == 0 else join_store(address, port)
                size, on_gloo = len(self.plan.processes), groups_without_nccl(self.plan)
                groups = connect(store, self.index, size, self.plan.process_groups, device, on_gloo=on_gloo)
            self._process = Process(device, groups)

    def add(self, worker_cls: type[Worker], role: str, rank: int) -> None:
        """Construct a worker in this process."""
        with self._naming_errors(self.name):
            self._workers[role] = worker_cls(self.cfg, self.plan, rank, self._process)

    def call(self, role: str, method: str, kwargs: dict, sources: Sequence, route: Route | None, *values: Any) -> Any:
        """Call a method of the worker in `role` with `values`, or with the rows of them that `route` names, as one.

        sources: for each value the index of the process that made it, None for the driver.
        """
        worker = self._workers[role]
        if self._stopped and method != "close":
            raise RuntimeError("the run is over")
        where = f"{role} rank {worker.rank} on node {self.slot.node}"
        threading.current_thread().name = where  # warnings that are logged here carry it
        with self._naming_errors(where):
            if worker.device.type == "cuda":
                torch.cuda.set_device(worker.device)
            foreign = [v for v, source in zip(values, sources, strict=True) if source not in (None, self.index)]
            with self._lock:
                self._bytes += sum(map(num_bytes, foreign))
            args = values if route is None else (merge(values, route),)
            return worker.invoke(method, *args, **kwargs)

    def next_warning(self) -> logging.LogRecord:
        """Wait for the next warning that a worker logs; one such call is always under way."""
        return self._warnings.get()

    def drain_bytes(self) -> int:
        """Bytes of the values received from other processes since the last call."""
        with self._lock:
            count, self._bytes = self._bytes, 0
        return count

    def stop(self) -> None:
        """Let calls that have not begun fail, all but `close`."""
        self._stopped = True

    @contextmanager
    def _naming_errors(self, where: str) -> Iterator[None]:
        """Add the worker's name to an error on its way to the driver, and the traceback to this process's log."""
        try:
            yield
        except Exception as error:
            trace = traceback.format_exc()
            print(f"{where} failed:\n{trace}", file=sys.stderr, flush=True)
            if isinstance(error, EXPLAINED):
                error.args = (f"{error} ({where})",)
            else:
                error.add_note(f"in {where}:\n{trace}")
            raise

    def _fair_threads(self) -> int:
        """This machine's cores, divided by the processes of the plan on this node."""
        neighbours = sum(p.slot.node == self.slot.node for p in self.plan.processes)
        return max(1, len(os.sched_getaffinity(0)) // neighbours)


def open_log(cfg: Config, plan: Plan, index: int) -> Path:
    """Send everything this process prints, crash reports of native code included, to process_<index>.log.

    With runner.per_worker_log there is also a link by rank; workers of one process share its file.
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
    run = f" run {cfg.runner.run_id}" if cfg.runner.run_id else ""
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}{run} pid {os.getpid()}: {names}", flush=True)
    if cfg.runner.per_worker_log:
        group_names = {"env": cfg.env.group_name, "rollout": cfg.rollout.group_name, "actor": cfg.actor.group_name}
        for role, rank in workers:
            link = root / group_names[role] / f"rank_{rank}.log"
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / path.name)
    return path
