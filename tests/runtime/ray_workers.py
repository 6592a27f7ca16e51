"""Workers without simulators and policies, to look at the runtime itself."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from rlinf.data.types import EnvStep, Observation
from rlinf.errors import SimulatorError, UserError
from rlinf.runtime.worker import Worker


class UnportableError(Exception):
    """An error that does not survive pickling."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


ERRORS: dict[str, Exception] = {
    "user": UserError("key=3 must be even"),
    "simulator": SimulatorError("it keeps failing"),
    "diverged": FloatingPointError("not finite"),
    "bug": KeyError("missing"),
    "unportable": UnportableError("a", "b"),
}


@dataclass(frozen=True)
class Seen:
    """A tensor as its receiver sees it."""

    total: float
    pointer: int


@dataclass(frozen=True)
class Place:
    """Where a worker finds itself."""

    pid: int
    node: str
    devices: str
    folder: str
    threads: int


class Probe(Worker):
    """Does what tests ask for."""

    def setup(self) -> None:
        self.done: list[tuple[str, float]] = []  # name, when

    def where(self) -> Place:
        node = ray.get_runtime_context().get_node_id()
        return Place(os.getpid(), node, os.environ["CUDA_VISIBLE_DEVICES"], str(Path.cwd()), torch.get_num_threads())

    def work(self, *waited: Any, name: str, seconds: float = 0.0) -> str:
        time.sleep(seconds)
        self.done.append((name, time.monotonic()))
        return name

    def history(self) -> list[tuple[str, float]]:
        return self.done

    def fail(self, kind: str) -> None:
        raise ERRORS[kind]

    def warn(self, text: str) -> None:
        print(f"printed by rank {self.rank}")
        logging.getLogger("somewhere").warning(text)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_all(self) -> float:
        """A collective of the actors."""
        return float(self.process.group("actor").sum(torch.ones(())))

    def ones(self, rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), float(self.rank + 1))

    def look(self, *x: torch.Tensor) -> Seen:
        return Seen(sum(float(part.sum()) for part in x), x[0].data_ptr())

    def step(self, num_envs: int) -> EnvStep:
        return make_step(self.rank, num_envs)

    def echo(self, value: Any) -> Any:
        return value


def make_step(rank: int, num_envs: int) -> EnvStep:
    """A message with every kind of field."""
    ids = torch.arange(num_envs) + 100 * rank
    obs = Observation(
        images=ids.to(torch.uint8)[:, None, None, None].expand(-1, 4, 4, 3),
        wrist_images=None,
        states=ids[:, None].to(torch.bfloat16).repeat(1, 2),
        task_descriptions=[f"task {i}" for i in ids.tolist()],
    )
    flags = torch.zeros(num_envs, 2, dtype=torch.bool)
    rewards = ids[:, None].float().repeat(1, 2)
    return EnvStep(obs, rewards, flags, ~flags, flags, flags[:, 0], obs[[1]], torch.tensor([1]))
