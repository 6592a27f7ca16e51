"""A small arm as a simulator: a gripper that turns, grasps a cube and lifts it. Every convention can go wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.simulators.contract import Array, EnvSpec, ReplayScene, SceneObservation, split_ids

STEP, TURN = 0.04, 0.2  # m and rad of an action of 1


@dataclass(frozen=True)
class Options:
    """`init_params` of the arm."""

    task_suite_name: str = "lift"
    """The only suite."""
    upside_down: bool = False
    """Whether the camera hangs head down."""


def spec(options: Options) -> EnvSpec:
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=("lift",),
        action_dim=7,
        action_names=("x", "y", "z", "rx", "ry", "rz", "gripper"),
        gripper="sign",
        state_dim=8,
        image_size=(32, 32),
        num_wrist_images=1,
        wrist_image_size=(32, 32),
        reset_ids=split_ids((0,), trials=20),
        control_hz=10.0,
        robot="small_arm",
    )


class Scene(ReplayScene):
    """State: position, quaternion w x y z of a turn about z, opening of the gripper."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def start(self, reset_id: int) -> None:
        rng = np.random.default_rng(reset_id)
        self.hand, self.cube = rng.uniform((-0.2, -0.2, 0.1), (0.2, 0.2, 0.5)), np.append(rng.uniform(-0.2, 0.2, 2), 0)
        self.yaw, self.open, self.held = rng.uniform(-0.9, -0.3), True, False

    def task(self) -> str:
        return "lift"

    def step(self, action: Array) -> tuple[float, bool, bool]:
        action = np.clip(action.astype(np.float64), -1, 1)
        self.hand = self.hand + STEP * action[:3]
        self.yaw += TURN * action[5]
        near = np.linalg.norm(self.hand - self.cube) < 0.02 and abs(self.yaw) < 0.1
        self.held = action[6] < 0 and (self.held or (self.open and near))
        self.open = bool(action[6] >= 0)
        if self.held:
            self.cube = self.hand.copy()
        return float(self.lifted), self.lifted, False

    @property
    def lifted(self) -> bool:
        return self.held and self.cube[2] > 0.1

    def frame(self) -> Array:
        image = _picture(self.hand[:2], self.cube[:2])
        return np.ascontiguousarray(image[::-1, ::-1]) if self.options.upside_down else image

    def observe(self) -> SceneObservation:
        turn = [np.cos(self.yaw / 2), 0.0, 0.0, np.sin(self.yaw / 2)]
        return {
            "images": self.frame(),
            "wrist_images": _picture(self.hand[1:], self.cube[1:])[None, :, :, ::-1],
            "states": np.array([*self.hand, *turn, float(self.open)], np.float32),
            "task_description": "lift the cube",
            "critic_state": None,
        }

    def close(self) -> None:
        """Nothing to free."""


class Expert:
    """Goes to the cube, grasps it and lifts it."""

    def __init__(self, options: Options) -> None:
        """Nothing to know."""

    def act(self, sim: Scene) -> Array:
        way, turn = (np.array([0, 0, 1.0]), 0.0) if sim.held else ((sim.cube - sim.hand) / STEP, -sim.yaw / TURN)
        there = np.linalg.norm(way) < 0.3 and abs(turn) < 0.3
        return np.array([*way, 0, 0, turn, -1.0 if sim.held or there else 1.0], np.float32)


def _picture(*places: Array) -> Array:
    """u8 [32, 32, 3]: red falls from the top, green grows to the right, and a square is at each place."""
    image = np.zeros((32, 32, 3), np.uint8)
    image[..., 0], image[..., 1] = np.linspace(120, 0, 32)[:, None], np.linspace(0, 60, 32)
    for shade, place in zip((255, 160), places, strict=True):
        row, column = (int(np.clip(32 * (0.5 + x), 0, 28)) for x in place)
        image[row : row + 4, column : column + 4] = shade
    return image
