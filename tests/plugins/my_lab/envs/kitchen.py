"""A simulator in one file: bring a pot of water to the temperature the instruction names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.simulators.contract import TASK_STRIDE, Array, EnvSpec, ReplayScene, SceneObservation, split_ids

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
        reset_ids=split_ids(tasks=(0, 1), trials=100),
        control_hz=1.0,
    )


class Scene(ReplayScene):
    """One pot."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def start(self, reset_id: int) -> None:
        self.goal = list(GOALS)[reset_id // TASK_STRIDE]
        self.temperature = float(np.random.default_rng(reset_id).uniform(0, 1))

    def task(self) -> str:
        return self.goal

    def step(self, action: Array) -> tuple[float, bool, bool]:
        self.temperature += self.options.power * float(np.clip(action[0], -1, 1))
        reached = abs(self.temperature - GOALS[self.goal]) < 0.1
        return float(reached), reached, False

    def frame(self) -> Array:
        return np.full((8, 8, 3), int(255 * np.clip(self.temperature, 0, 1)), np.uint8)

    def observe(self) -> SceneObservation:
        return {
            "images": self.frame(),
            "wrist_images": None,
            "states": np.array([self.temperature, GOALS[self.goal]], np.float32),
            "task_description": f"make the water {self.goal}",
            "critic_state": None,
        }

    def close(self) -> None:
        """Nothing to free."""
