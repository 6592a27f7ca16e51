"""Simulator processes seen from the parent: start, ask with a deadline, kill, start again."""

from __future__ import annotations

import json
import math
import mmap
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlinf.envs.spec import find_simulator
from rlinf.errors import NotInstalledError, SimulatorError, UserError
from rlinf.plugins import source_folder
from rlinf.simulators import child_program

HEADER = struct.Struct("<I")
START_DEADLINE_S = 300.0  # importing a simulator on a loaded machine
CLOSE_DEADLINE_S = 5.0

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # array name -> dtype, shape


class SimulatorDiedError(RuntimeError):
    """One simulator process died, hung or answered nonsense; the text says which and shows what it printed last."""


@dataclass(frozen=True)
class ScenesReply:
    """What a command did, scene by scene."""

    replies: dict[int, dict[str, Any]]
    failed: dict[int, str]  # scene -> traceback; the child has rebuilt these, they wait for a reset


class SimProcess:
    """One child with several scenes and the arrays shared with it."""

    def __init__(
        self,
        *,
        simulator: str,
        options: Any,
        num_scenes: int,
        layout: Layout,
        name: str,
        python: str | None = None,
        batched: bool = False,
    ) -> None:
        self.name = name
        self.num_scenes = num_scenes
        self._simulator, self._options, self._python = simulator, asdict(options), python
        self._batched, self._module = batched, find_simulator(simulator)
        offsets, size = {}, 0
        for key, (dtype, shape) in layout.items():
            offsets[key] = (dtype, list(shape), size)
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64
        self._file, self._size, self._offsets = mapped_file(max(size, 64)), max(size, 64), offsets
        self._memory = mmap.mmap(self._file.fileno(), self._size)
        self.arrays = {
            key: np.frombuffer(self._memory, dtype, math.prod(shape), offset).reshape(shape)
            for key, (dtype, shape, offset) in offsets.items()
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = bytearray()

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
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        self._pending = bytearray()
        fd = self._file.fileno()
        if self._python is not None and not os.access(self._python, os.X_OK):
            raise UserError(f"python={self._python!r} of simulator {self._simulator!r} is not an executable file")
        self._process = subprocess.Popen(
            [self._python or sys.executable, child_program.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=(fd,),
            env=environment,
            start_new_session=True,  # a Ctrl-C goes to the parent, which closes its children in order
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self.send(
            {
                "parent": os.getpid(),
                "module": self._module.__name__,
                "folder": source_folder(self._module),
                "options": self._options,
                "num_scenes": self.num_scenes,
                "batched": self._batched,
                "fd": fd,
                "size": self._size,
                "arrays": self._offsets,
            }
        )

    def wait_ready(self) -> None:
        """Until the child has imported its simulator; what is missing on this machine becomes a UserError."""
        reply = exchange({self: None}, START_DEADLINE_S)[self]
        if isinstance(reply, SimulatorDiedError):
            raise reply
        if "missing_module" in reply:
            self.kill()
            raise NotInstalledError(
                f"simulator {self._simulator!r} needs the Python package {reply['missing_module']!r} in "
                f"{self._python or sys.executable}; pip install -r requirements/envs/{self._simulator}.txt"
            )
        if "absent" in reply:
            self.kill()
            raise NotInstalledError(f"simulator {self._simulator!r}: {reply['absent']}")
        if "setup" in reply:
            self.kill()
            raise UserError(f"simulator {self._simulator!r}: {reply['setup']}")
        if "ready" not in reply:
            raise self.fault(f"failed to start: {reply.get('error', reply)}")

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one message; raises SimulatorDiedError when the child is gone or does not read."""
        assert self._process is not None
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        data = memoryview(HEADER.pack(len(body)) + body)
        fd, deadline = self._process.stdin.fileno(), time.monotonic() + START_DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_WRITE)
            while data:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self.fault("does not read its commands")
                try:
                    data = data[os.write(fd, data) :]
                except BrokenPipeError:
                    raise self.fault("died") from None

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; call when the pipe is readable."""
        assert self._process is not None
        assert self._process.stdout is not None
        piece = os.read(self._process.stdout.fileno(), 1 << 20)
        if not piece:
            raise self.fault("died")
        self._pending += piece
        messages = []
        while len(self._pending) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._pending)
            if len(self._pending) < HEADER.size + length:
                break
            messages.append(json.loads(bytes(self._pending[HEADER.size : HEADER.size + length])))
            del self._pending[: HEADER.size + length]
        return messages

    @property
    def stdout_fd(self) -> int:
        """What to wait on for answers."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def fault(self, what: str) -> SimulatorDiedError:
        """End the child and describe what it did, with the last lines it printed."""
        self.kill()
        assert self._process is not None
        text = f"simulator {self._simulator!r} process {self.name} {what} (exit status {self._process.returncode})"
        tail = self.stderr_tail()
        return SimulatorDiedError(f"{text}; it printed:\n{tail}" if tail else text)

    def stderr_tail(self, num_bytes: int = 2000) -> str:
        """The end of what the child printed."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), num_bytes, max(0, size - num_bytes)).decode(errors="replace").strip()

    def kill(self) -> None:
        """End the child now."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def close(self) -> None:
        """Ask the child to leave, kill it if it does not, and release the shared memory (arrays become invalid)."""
        if self._process is not None and self._process.poll() is None:
            try:
                self.send({"command": "close"})
                self._process.wait(CLOSE_DEADLINE_S)
            except (SimulatorDiedError, subprocess.TimeoutExpired):
                pass
        self.kill()
        self._process = None
        self.arrays = {}
        del self._memory  # unmapped when the last array is gone
        self._file.close()


def start_all(processes: Sequence[SimProcess]) -> None:
    """Start every process and wait until all have imported their simulator; SimulatorError when one cannot."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready()
    except SimulatorDiedError as fault:
        raise SimulatorError(str(fault)) from None


def mapped_file(size: int) -> Any:
    """An unnamed file of `size` reserved bytes, in memory where there is room, else on disk: nothing is left behind."""
    for folder in ("/dev/shm", None):
        if folder is not None and not os.access(folder, os.W_OK):
            continue
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (returned)
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # running out later would be a bus error, not an exception
            return file
        except OSError:
            file.close()
            if folder is None:
                raise
    raise AssertionError("unreachable")


def exchange(
    messages: Mapping[SimProcess, Mapping[str, Any] | None], deadline_s: float
) -> dict[SimProcess, dict[str, Any] | SimulatorDiedError]:
    """Send every message first, then wait for all answers (None sends nothing and only waits).

    The deadline counts from the last sign of life of each process: busy children report between scenes.
    """
    answers: dict[SimProcess, dict[str, Any] | SimulatorDiedError] = {}
    due: dict[SimProcess, float] = {}
    with selectors.DefaultSelector() as selector:
        for process, message in messages.items():
            try:
                if message is not None:
                    process.send(message)
                selector.register(process.stdout_fd, selectors.EVENT_READ, process)
                due[process] = time.monotonic() + deadline_s
            except SimulatorDiedError as fault:
                answers[process] = fault
        try:
            while due:
                for key, _ in selector.select(max(0.0, min(due.values()) - time.monotonic())):
                    process = key.data
                    due[process] = time.monotonic() + deadline_s
                    try:
                        final = [m for m in process.receive() if "progress" not in m]
                    except SimulatorDiedError as fault:
                        final = [fault]
                    if final:
                        answers[process] = final[0]
                        selector.unregister(key.fd)
                        del due[process]
                for process in [p for p, t in due.items() if t <= time.monotonic()]:
                    selector.unregister(process.stdout_fd)
                    del due[process]
                    answers[process] = process.fault(f"gave no sign of life for {deadline_s:g} s")
        except BaseException:  # interrupted: the answers still to come would be taken for those of the next command
            for process in due:
                process.kill()
            raise
    return answers


def command_scenes(
    command: str,
    scenes: Mapping[SimProcess, Sequence[tuple[int, Mapping[str, Any]]]],
    deadline_s: float,
) -> dict[SimProcess, ScenesReply | SimulatorDiedError]:
    """Run one command on scenes of several processes at once: process -> [(scene, arguments)]."""
    messages = {
        p: {"command": command, "scenes": [[i, dict(a)] for i, a in work]} for p, work in scenes.items() if work
    }
    replies: dict[SimProcess, ScenesReply | SimulatorDiedError] = {}
    for process, answer in exchange(messages, deadline_s).items():
        if isinstance(answer, SimulatorDiedError):
            replies[process] = answer
        else:
            replies[process] = ScenesReply(
                {int(k): v for k, v in answer["replies"].items()}, {int(k): v for k, v in answer["failed"].items()}
            )
    return replies
