"""A simulator in one file: bring a pot of water to the temperature the instruction names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.simulators.contract import Array, ChunkResult, EnvSpec, IdGrid, ReplayState

GOALS = {"warm": 0.4, "hot": 0.8}


@dataclass(frozen=True)
class Options:
    """`init_params` of the kitchen."""

    task_suite_name: str = "kitchen"
    """The only suite."""
    power: float = 0.25
    """Change of temperature by an action of 1."""


def spec(options: Options) -> EnvSpec:
    """What the kitchen offers."""
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=tuple(GOALS),
        action_dim=1,
        action_names=("heat",),
        gripper="none",
        state_dim=2,
        image_size=(8, 8),
        reset_ids={
            "train": IdGrid((0, 1), range(1000, 2000), interleaved=True),
            "demo": IdGrid((0, 1), range(500, 1000), interleaved=True),
            "eval": IdGrid((0, 1), range(100)),
        },
        control_hz=1.0,
    )


class Scene(ReplayState):
    """One pot."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def reset(self, reset_id: int) -> None:
        self._begin(reset_id)
        self._goal = list(GOALS)[reset_id // 1_000_000]
        self._temperature = float(np.random.default_rng(reset_id).uniform(0, 1))

    def task(self) -> str:
        return self._goal

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        result = ChunkResult.zeros(len(actions))
        for i, action in enumerate(actions):
            self._temperature += self.options.power * float(np.clip(action[0], -1, 1))
            done = abs(self._temperature - GOALS[self._goal]) < 0.1
            result.rewards[i], result.success[i], result.steps = float(done), done, i + 1
            if record:
                result.frames.append(self.observe()["images"])
            if done and stop_on_success:
                break
        self._remember(actions[: result.steps])
        return result

    def observe(self) -> dict[str, Any]:
        level = int(255 * np.clip(self._temperature, 0, 1))
        return {
            "images": np.full((8, 8, 3), level, np.uint8),
            "wrist_images": None,
            "states": np.array([self._temperature, GOALS[self._goal]], np.float32),
            "task_description": f"make the water {self._goal}",
            "critic_state": None,
        }

    def close(self) -> None:
        """Nothing to free."""
