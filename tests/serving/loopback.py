"""A small policy behind a server in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from websockets.sync.client import ClientConnection, connect

from rlinf.data.noise import Noise
from rlinf.data.types import Observation, PolicyOutput
from rlinf.models.config import PolicySpec
from rlinf.models.policy import Policy
from rlinf.serving.batcher import Batcher
from rlinf.serving.messages import pack, unpack
from rlinf.serving.metadata import describe
from rlinf.serving.policy import LoadedPolicy
from rlinf.serving.server import PolicyServer, Settings, bind


class MeanPixel(Policy):
    """Actions: the mean pixel, the state and noise, weighed; `gate` holds calls back, `faults` are raised first."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = PolicySpec(2, 3, 8, 1, 2, False, False, 1, 0)
        self.weight = torch.nn.Parameter(torch.tensor([0.5, -2.0]))
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # a call has begun
        self.faults: list[Exception] = []
        self.calls: list[Observation] = []

    def predict(self, obs: Observation, *, mode: Literal["train", "eval"], noise: Noise) -> PolicyOutput:
        self.entered.set()
        assert self.gate.wait(30)
        if self.faults:
            raise self.faults.pop()
        self.calls.append(obs)
        assert obs.states is not None
        seen = obs.images.float().mean((1, 2, 3))[:, None] + obs.states
        actions = (seen * self.weight)[:, None] + noise.normal((3, 2))
        return PolicyOutput(actions, torch.zeros_like(actions), None, {})


def observation(number: int = 0, **changes: Any) -> dict[str, Any]:
    """What a client of LIBERO sends."""
    rng = np.random.default_rng(number)
    image, state = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), rng.random(2, dtype=np.float32)
    return {"observation/image": image, "observation/state": state, "prompt": "go"} | changes


class Client:
    """A plain websocket client."""

    def __init__(self, port: int, **options: Any) -> None:
        opening = connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, **options)
        self.connection: ClientConnection = opening.__enter__()
        self.metadata = unpack(self.connection.recv(timeout=30))

    def ask(self, message: dict[str, Any] | bytes | str) -> Any:
        """The answer: a map, or a line of text."""
        self.connection.send(pack(message) if isinstance(message, dict) else message)
        return self.answer()

    def answer(self) -> Any:
        found = self.connection.recv(timeout=30)
        return found if isinstance(found, str) else unpack(found)


class Running:
    """A server that runs."""

    def __init__(self, policy: Policy, settings: Settings, **options: Any) -> None:
        self.policy = policy
        self.loaded = LoadedPolicy(policy)
        self.batcher = Batcher(self.loaded, **options)
        self.server = PolicyServer(self.batcher, settings, describe(self.loaded, self.batcher.max_batch))
        at, started = bind("127.0.0.1", 0), threading.Event()
        self.port: int = at.getsockname()[1]
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.run(at, started.set)), daemon=True)
        self.thread.start()
        assert started.wait(30)

    def client(self, **options: Any) -> Client:
        return Client(self.port, **options)


@contextmanager
def serving(policy: Policy | None = None, settings: Settings = Settings(), **options: Any) -> Iterator[Running]:
    """A server for the block."""
    running = Running(policy or MeanPixel(), settings, **options)
    try:
        yield running
    finally:
        running.server.stop()
        running.thread.join(30)
        running.batcher.close()
        assert not running.thread.is_alive()
