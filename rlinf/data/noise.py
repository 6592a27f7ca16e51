"""Random numbers keyed by their purpose, so that placement, stage and rank never change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from rlinf.data.types import ChunkIndex

MASK64 = (1 << 64) - 1
_STREAMS = {"train": 0, "eval": 1, "reset": 2, "shuffle": 3, "sft": 4, "init": 5, "demo": 6, "tasks": 7}


def generator(seed: int, stream: str, step: int, *counter: int) -> np.random.Generator:
    """A generator for (seed, stream, step, up to three counters): Philox, so equal keys give equal numbers anywhere."""
    words = [0, *(c & MASK64 for c in counter), 0, 0, 0][:4]  # word 0 counts the draws
    key = [seed & MASK64, ((step << 8) | _STREAMS[stream]) & MASK64]
    return np.random.Generator(np.random.Philox(counter=np.array(words, np.uint64), key=np.array(key, np.uint64)))


class Noise:
    """Draws for one policy call: row i belongs to env `env_ids[i]`, whatever else is in the batch.

    Example: Noise(seed=0, at=ChunkIndex(step=3, epoch=0, chunk=7), env_ids=[4, 5]).normal((5, 32)) -> f32 [2, 5, 32]
    """

    def __init__(
        self,
        *,
        seed: int,
        at: ChunkIndex,
        env_ids: Sequence[int],
        device: torch.device | str = "cpu",
        stream: str = "train",
    ) -> None:
        self.device = torch.device(device)
        self._generators = [generator(seed, stream, at.step, env, at.chunk, at.epoch) for env in env_ids]

    @classmethod
    def of_rows(cls, generators: Sequence[np.random.Generator], device: torch.device | str = "cpu") -> Self:
        """Draws whose row i comes from a generator of its own."""
        noise = cls.__new__(cls)
        noise.device, noise._generators = torch.device(device), list(generators)
        return noise

    @classmethod
    def of_trials(cls, trials: torch.Tensor, *, seed: int, device: torch.device | str = "cpu") -> Self:
        """Draws of an evaluation, by EnvStep.trials: a trial meets the same noise in any env and batch."""
        noise = cls.of_rows([generator(seed, "eval", 0, reset_id, call) for reset_id, call in trials.tolist()], device)
        return noise

    def on_host(self) -> Noise:
        """The same draws, left on the host, for a caller who brings several things to a device at once."""
        return Noise.of_rows(self._generators)

    def __len__(self) -> int:
        return len(self._generators)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Standard normal f32 [B, *shape]."""
        return self._draw(lambda g: g.standard_normal(shape, dtype=np.float32))

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Uniform in [0, 1) f32 [B, *shape]."""
        return self._draw(lambda g: g.random(shape, dtype=np.float32))

    def integers(self, high: int, shape: tuple[int, ...] = ()) -> torch.Tensor:
        """Uniform integers in [0, high) i64 [B, *shape]."""
        return self._draw(lambda g: np.asarray(g.integers(0, high, shape, dtype=np.int64)))

    def _draw(self, draw) -> torch.Tensor:
        return torch.from_numpy(np.stack([draw(g) for g in self._generators])).to(self.device)


class BatchNoise(Noise):
    """Draws for a batch whose rows belong to no env, by a generator of the device itself: nothing waits for it.

    Equal keys give equal numbers on one kind of device; on a GPU they are others than `Noise` draws.
    """

    def __init__(self, *, seed: int, step: int, rows: int, device: torch.device, stream: str = "sft") -> None:
        self.device, self._rows = device, rows
        key = int(generator(seed, stream, step).integers(1 << 63))
        self._generator = torch.Generator(device).manual_seed(key)

    def on_host(self) -> Noise:
        """Itself: the device draws."""
        return self

    def __len__(self) -> int:
        return self._rows

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """As Noise.normal."""
        return torch.randn((self._rows, *shape), generator=self._generator, device=self.device)

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        """As Noise.uniform."""
        return torch.rand((self._rows, *shape), generator=self._generator, device=self.device)

    def integers(self, high: int, shape: tuple[int, ...] = ()) -> torch.Tensor:
        """As Noise.integers."""
        return torch.randint(high, (self._rows, *shape), generator=self._generator, device=self.device)
