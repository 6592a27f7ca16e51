"""What evaluations and replays execute, seen by tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlinf.envs.vec import VecEnv


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], bytes]:
    """(reset id, call of the episode) -> the actions that were executed while the test runs."""
    executed: dict[tuple[int, int], bytes] = {}
    step = VecEnv.chunk_step

    def chunk_step(self: VecEnv, given: torch.Tensor | None) -> Any:
        for episode, row in zip(self._episodes, () if given is None else given, strict=given is not None):
            if not episode.waiting:
                executed[episode.reset_id, episode.calls] = row.float().numpy().tobytes()
        return step(self, given)

    monkeypatch.setattr(VecEnv, "chunk_step", chunk_step)
    return executed
