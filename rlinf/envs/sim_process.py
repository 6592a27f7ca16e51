"""A simulator process seen from the parent: start it, ask it with a deadline, kill it, start it again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from typing import Any

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import find_simulator
from rlinf.errors import NotInstalledError, SimulatorError, UserError
from rlinf.plugins import source_folder
from rlinf.simulators import child_program
from rlinf.simulators.contract import EnvSpec

START_DEADLINE_S = 300.0  # importing a simulator on a loaded machine
CLOSE_DEADLINE_S = 5.0
LAST_BYTES = 2000  # of what a child printed, shown when it died

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # array name -> dtype, shape
Answer = dict[str, Any]


class SimulatorDiedError(RuntimeError):
    """One simulator process died, hung or answered nonsense; the text says which and shows what it printed last."""


def own_interpreter(module: Any) -> str | None:
    """The interpreter of a simulator that has an environment of its own; None where it runs in this one."""
    return module.own_interpreter() if "own_interpreter" in vars(module) else None


class SharedArrays:
    """Arrays that a parent and its simulator processes share: any of them may write any row."""

    def __init__(self, layout: Layout) -> None:
        self.offsets: dict[str, tuple[str, list[int], int]] = {}  # dtype, shape, first byte
        size = 0
        for key, (dtype, shape) in layout.items():
            self.offsets[key] = (dtype, list(shape), size)
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64
        self.size = max(size, 64)
        self.fd = os.memfd_create("rlinf")  # memory without a name: nothing is left behind
        os.posix_fallocate(self.fd, 0, self.size)  # running out of memory later would be a bus error, not an exception
        self.arrays = child_program.map_arrays(self.fd, self.size, self.offsets)

    def close(self) -> None:
        """Release the memory: `arrays` become invalid."""
        self.arrays = {}  # unmapped when the last of them is gone
        os.close(self.fd)


class SimProcess:
    """One simulator process with the scenes of several rows, which lie in arrays that it shares with its parent."""

    def __init__(
        self,
        cfg: EnvConfig,
        options: Any,
        *,
        name: str,
        rows: Sequence[int],
        shared: SharedArrays,
        spec: EnvSpec,
        routed: bool,
    ) -> None:
        """`rows` are those it begins with; where episodes are `routed`, others follow."""
        module = find_simulator(cfg.env_type)
        self.name, self._simulator, self._python = name, cfg.env_type, cfg.python or own_interpreter(module)
        self._fd = shared.fd
        self._process: subprocess.Popen[bytes] | None = None
        self._first_message = {
            "parent": os.getpid(),
            "module": module.__name__,
            "folder": source_folder(module),
            "options": asdict(options),
            "rows": list(rows),
            "batched": spec.batched,
            "routed": routed,
            "action_bound": spec.action_bound,
            "fd": shared.fd,
            "size": shared.size,
            "arrays": shared.offsets,
        }

    @property
    def pid(self) -> int:
        """Process id of the running child."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Launch the child without waiting for it; `wait_ready` does."""
        environment = {"LP_NUM_THREADS": "1"} | dict(os.environ, OMP_NUM_THREADS="1")  # one core per process
        if self._python is not None:
            environment.pop("PYTHONPATH", None)  # another interpreter must not see this one's packages
            if not os.access(self._python, os.X_OK):
                raise UserError(f"python={self._python!r} of simulator {self._simulator!r} is not an executable file")
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        self.connection, child_end = Pipe()
        # A child does not get the signals that clusters send to all processes at once: its state is still to be saved.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
        try:
            self._process = subprocess.Popen(
                [self._python or sys.executable, child_program.__file__, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=(self._fd, child_end.fileno()),
                env=environment,
                start_new_session=True,  # a Ctrl-C goes to the parent, which closes its children in order
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child_end.close()
        self.send(self._first_message)

    def wait_ready(self) -> None:
        """Wait until the child has imported its simulator; what is missing on this machine becomes a UserError."""
        reply = exchange({self: None}, START_DEADLINE_S)[self]
        if isinstance(reply, SimulatorDiedError):
            raise reply
        if "ready" in reply:
            return
        self.kill()
        name = f"simulator {self._simulator!r}"
        if "missing_module" in reply:
            raise NotInstalledError(
                f"{name} needs the Python package {reply['missing_module']!r}: "
                f"{self._python or sys.executable} -m pip install -r requirements/envs/{self._simulator}.txt"
            )
        if "absent" in reply:
            raise NotInstalledError(f"{name}: {reply['absent']}")
        if "setup" in reply:
            raise UserError(f"{name}: {reply['setup']}")
        raise self.fault(f"failed to start: {reply.get('error', reply)}")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message to the child, which waits for it; raises SimulatorDiedError when it is gone."""
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise self.fault("died") from None

    def receive(self) -> Answer:
        """Read the next message, when `connection` is readable; raises SimulatorDiedError when the child is gone."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self.fault("died") from None

    def fault(self, what: str) -> SimulatorDiedError:
        """End the child and describe what it did, with the last lines it printed."""
        self.kill()
        assert self._process is not None
        text = f"simulator {self._simulator!r} process {self.name} {what} (exit status {self._process.returncode})"
        size = os.fstat(self._printed.fileno()).st_size
        tail = os.pread(self._printed.fileno(), LAST_BYTES, max(0, size - LAST_BYTES)).decode(errors="replace").strip()
        return SimulatorDiedError(f"{text}; it printed:\n{tail}" if tail else text)

    def kill(self) -> None:
        """End the child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.connection.close()

    def close(self) -> None:
        """Ask the child to end, and kill it if it does not."""
        if self._process is not None and self._process.poll() is None:
            self.connection.close()  # which ends it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_DEADLINE_S)
        self.kill()
        self._process = None


def start_all(processes: Sequence[SimProcess]) -> None:
    """Start every process and wait until all have imported their simulator; SimulatorError when one cannot."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready()
    except SimulatorDiedError as fault:
        raise SimulatorError(str(fault)) from None


def exchange(
    messages: Mapping[SimProcess, Mapping[str, Any] | None], deadline_s: float
) -> dict[SimProcess, Answer | SimulatorDiedError]:
    """Send every message first, then wait for all answers (None sends nothing and only waits).

    The deadline counts from the last sign of life of each process: busy children report between scenes.
    """
    answers: dict[SimProcess, Answer | SimulatorDiedError] = {}
    due: dict[SimProcess, float] = {}
    with selectors.DefaultSelector() as selector:
        for process, message in messages.items():
            try:
                if message is not None:
                    process.send(message)
                selector.register(process.connection, selectors.EVENT_READ, process)
                due[process] = time.monotonic() + deadline_s
            except SimulatorDiedError as fault:
                answers[process] = fault
        try:
            while due:
                for key, _ in selector.select(max(0.0, min(due.values()) - time.monotonic())):
                    process, due[key.data] = key.data, time.monotonic() + deadline_s
                    try:
                        answer: Answer | SimulatorDiedError = process.receive()
                    except SimulatorDiedError as fault:
                        answer = fault
                    if isinstance(answer, SimulatorDiedError) or "progress" not in answer:
                        answers[process] = answer
                        selector.unregister(key.fd)
                        del due[process]
                for process in [p for p, t in due.items() if t <= time.monotonic()]:
                    selector.unregister(process.connection)
                    del due[process]
                    answers[process] = process.fault(f"gave no sign of life for {deadline_s:g} s")
        except BaseException:  # interrupted: the answers still to come would be taken for those of the next command
            for process in due:
                process.kill()
            raise
    return answers
