"""The toy's world, and several of them behind the interface of a batched simulator."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from rlinf.simulators.contract import TASK_STRIDE, Array, ChunkResult, ReplayScene, Rows, SceneObservation
from rlinf.simulators.toy.suite import Options
from rlinf.simulators.toy.tasks import COLOURS, reached, task_name

BACKGROUND, AGENT = (30, 30, 34), (240, 240, 240)
TARGET_RADIUS, AGENT_RADIUS = 0.2, 0.14  # as drawn


class Scene(ReplayScene):
    """One toy world: an agent and a target of each colour in the square [-1, 1]^2."""

    def __init__(self, options: Options) -> None:
        self.options = options
        half = np.linspace(-1, 1, options.image_size, dtype=np.float32)
        self._grid_x, self._grid_y = np.meshgrid(half, half)

    def start(self, reset_id: int) -> None:
        """Draw agent and two targets from the id alone."""
        self._fault("reset")
        number, layout = divmod(reset_id, TASK_STRIDE)
        rng = np.random.default_rng([number, layout])
        self._colour = list(COLOURS)[number]
        self.agent = rng.uniform(-0.2, 0.2, 2)
        spread = np.deg2rad(self.options.spread)
        angle = rng.uniform(-spread, spread)
        apart = rng.uniform(0.5 * np.pi, 1.5 * np.pi)  # the other dot is never in the way
        wanted_first = sorted(COLOURS, key=lambda c: c != self._colour)
        self.targets = {
            c: np.clip(self.agent + self.options.distance * np.array([np.cos(a), np.sin(a)]), -0.95, 0.95)
            for c, a in zip(wanted_first, (angle, angle + apart), strict=True)
        }

    def task(self) -> str:
        return task_name(self._colour)

    @property
    def target(self) -> Array:
        """Where the agent should go, f64 [2]."""
        return self.targets[self._colour]

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """As ReplayScene; a requested fault happens once per chunk."""
        self._fault("step")
        return super().step_chunk(actions, stop_on_success=stop_on_success, record=record)

    def step(self, action: Array) -> tuple[float, bool, bool]:
        """Move the agent."""
        move = self.options.step_size * np.clip(action.astype(np.float64), -1, 1)
        self.agent = np.clip(self.agent + move, -1, 1)
        success = reached(self.agent, self.target, self.options.radius)
        return float(success), success, False

    def observe(self) -> SceneObservation:
        """The picture, where the agent is, and what it should do; a critic also sees the target."""
        states = self.agent.astype(np.float32)
        return {
            "images": self.frame(),
            "wrist_images": None,
            "states": states,
            "task_description": f"reach the {self._colour} dot",
            "critic_state": np.concatenate([states, self.target.astype(np.float32)]),
        }

    def frame(self) -> Array:
        """The picture u8 [H, W, 3]: both targets, then the agent."""
        size = self.options.image_size
        image = np.empty((size, size, 3), np.uint8)
        image[:] = BACKGROUND
        dots = [(self.targets[c], COLOURS[c], TARGET_RADIUS) for c in COLOURS] + [(self.agent, AGENT, AGENT_RADIUS)]
        for (x, y), colour, radius in dots:
            image[(self._grid_x - x) ** 2 + (self._grid_y - y) ** 2 <= radius**2] = colour
        return image

    def close(self) -> None:
        """Nothing to free."""

    def _fault(self, place: str) -> None:
        """Misbehave as the options ask, for tests."""
        o = self.options
        if o.fault == "none" or o.fault_at != place:
            return
        if not any(_created(f"{o.fault_file}.{i}") for i in range(o.fault_times)):
            return
        if o.fault == "crash":
            os.kill(os.getpid(), 9)
        if o.fault == "hang":
            time.sleep(3600)
        if o.fault == "raise":
            raise RuntimeError("toy fault on request")
        if o.fault == "nan":
            self.agent = np.full(2, np.nan)


def _created(path: str) -> bool:
    """Create the file, unless it is there."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Batch:
    """Several toy worlds as one `BatchSimulator`."""

    def __init__(self, options: Options, num_scenes: int) -> None:
        self.scenes = [Scene(options) for _ in range(num_scenes)]

    def reset(self, rows: Rows, reset_ids: Sequence[int]) -> None:
        for row, reset_id in zip(rows, reset_ids, strict=True):
            self.scenes[row].reset(reset_id)

    def task(self, row: int) -> str:
        return self.scenes[row].task()

    def step_chunk(
        self, rows: Rows, actions: Array, steps: Sequence[int], *, stop_on_success: bool, record: Sequence[bool]
    ) -> list[ChunkResult]:
        return [
            self.scenes[row].step_chunk(actions[r, : steps[r]], stop_on_success=stop_on_success, record=record[r])
            for r, row in enumerate(rows)
        ]

    def observe(self, rows: Rows) -> list[SceneObservation]:
        return [self.scenes[row].observe() for row in rows]

    def get_state(self, rows: Rows) -> list[bytes]:
        return [self.scenes[row].get_state() for row in rows]

    def set_state(self, rows: Rows, states: Sequence[bytes]) -> None:
        for row, state in zip(rows, states, strict=True):
            self.scenes[row].set_state(state)

    def close(self) -> None:
        """Nothing to free."""
