"""A pixel toy: move a white dot onto the dot the instruction names. Numpy only, a few microseconds a step."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlinf.simulators.contract import TASK_STRIDE, Array, ChunkResult, EnvSpec, IdGrid, ReplayState

COLOURS = {"red": (220, 40, 40), "blue": (50, 80, 230)}
SUITES = {"toy_2": ("red", "blue"), "toy_red": ("red",), "toy_blue": ("blue",)}
BACKGROUND, AGENT = (30, 30, 34), (240, 240, 240)


@dataclass(frozen=True)
class Options:
    """`init_params` of the toy."""

    task_suite_name: str = "toy_2"
    """toy_2 (reach the red or the blue dot, as told), toy_red or toy_blue."""
    image_size: int = 32
    step_size: float = 0.2
    """Distance moved by an action of 1; the world is the square [-1, 1]^2."""
    radius: float = 0.25
    """Distance to the target that counts as success."""
    distance: float = 0.9
    """How far from the agent a target starts."""
    spread: float = 180.0
    """Degrees the target's direction may differ from straight right; a narrow spread is learnt without looking."""
    batched: bool = False
    """Hold all scenes in one object and one process, the way a simulator on a GPU does."""
    fault: Literal["none", "crash", "hang", "raise", "nan"] = "none"
    """Test hook: how the simulator misbehaves."""
    fault_at: Literal["reset", "step"] = "step"
    """Test hook: where it does."""
    fault_file: str = ""
    """Test hook: <fault_file>.0, .1, ... are created one per fault, which counts them across processes and restarts."""
    fault_times: int = 1
    """Test hook: how many faults there are."""

    def __post_init__(self) -> None:
        if self.task_suite_name not in SUITES:
            raise ValueError(f"task_suite_name={self.task_suite_name!r} must be one of {', '.join(SUITES)}")
        if self.image_size < 8:
            raise ValueError(f"image_size={self.image_size} must be at least 8")


def spec(options: Options) -> EnvSpec:
    """The toy's shape."""
    colours = SUITES[options.task_suite_name]
    numbers = tuple(list(COLOURS).index(c) for c in colours)
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=tuple(f"reach-{c}" for c in colours),
        action_dim=2,
        action_names=("x", "y"),
        gripper="none",
        state_dim=2,
        image_size=(options.image_size, options.image_size),
        reset_ids={
            "train": IdGrid(numbers, range(500_000, 1_000_000), interleaved=True),
            "demo": IdGrid(numbers, range(100_000, 500_000), interleaved=True),
            "eval": IdGrid(numbers, range(500)),
        },
        control_hz=10.0,
        critic_state_dim=4,
        batched=options.batched,
    )


class Scene(ReplayState):
    """One toy world."""

    def __init__(self, options: Options) -> None:
        self.options = options
        half = np.linspace(-1, 1, options.image_size, dtype=np.float32)
        self._grid_x, self._grid_y = np.meshgrid(half, half)

    def reset(self, reset_id: int) -> None:
        """Agent and two targets are drawn from the id alone."""
        self._fault("reset")
        self._begin(reset_id)
        number, layout = divmod(int(reset_id), TASK_STRIDE)
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
        return f"reach-{self._colour}"

    @property
    def target(self) -> Array:
        """Where the agent should go, f64 [2]."""
        return self.targets[self._colour]

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """Move the agent, one action after the other."""
        self._fault("step")
        result = ChunkResult.zeros(len(actions))
        for i, action in enumerate(actions):
            move = self.options.step_size * np.clip(action.astype(np.float64), -1, 1)
            self.agent = np.clip(self.agent + move, -1, 1)
            success = bool(np.linalg.norm(self.agent - self.target) <= self.options.radius)
            result.rewards[i], result.success[i], result.steps = float(success), success, i + 1
            if record:
                result.frames.append(self._draw())
            if success and stop_on_success:
                break
        self._remember(actions[: result.steps])
        return result

    def observe(self) -> dict[str, Any]:
        """The picture, where the agent is, and what it should do."""
        states = self.agent.astype(np.float32)
        return {
            "images": self._draw(),
            "wrist_images": None,
            "states": states,
            "task_description": f"reach the {self._colour} dot",
            "critic_state": np.concatenate([states, self.target.astype(np.float32)]),
        }

    def close(self) -> None:
        """Nothing to free."""

    def _draw(self) -> Array:
        size = self.options.image_size
        image = np.empty((size, size, 3), np.uint8)
        image[:] = BACKGROUND
        dots = [(self.targets[c], COLOURS[c], 0.2) for c in COLOURS] + [(self.agent, AGENT, 0.14)]
        for (x, y), colour, radius in dots:
            image[(self._grid_x - x) ** 2 + (self._grid_y - y) ** 2 <= radius**2] = colour
        return image

    def _fault(self, place: str) -> None:
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
    """Several toy worlds behind one interface."""

    def __init__(self, options: Options, num_scenes: int) -> None:
        self.scenes = [Scene(options) for _ in range(num_scenes)]

    def reset(self, rows: Sequence[int], reset_ids: Sequence[int]) -> None:
        for row, reset_id in zip(rows, reset_ids, strict=True):
            self.scenes[row].reset(reset_id)

    def task(self, row: int) -> str:
        return self.scenes[row].task()

    def step_chunk(
        self,
        rows: Sequence[int],
        actions: Array,
        steps: Sequence[int],
        *,
        stop_on_success: bool,
        record: Sequence[bool],
    ) -> list[ChunkResult]:
        return [
            self.scenes[row].step_chunk(actions[r, : steps[r]], stop_on_success=stop_on_success, record=record[r])
            for r, row in enumerate(rows)
        ]

    def observe(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [self.scenes[row].observe() for row in rows]

    def get_state(self, rows: Sequence[int]) -> list[bytes]:
        return [self.scenes[row].get_state() for row in rows]

    def set_state(self, rows: Sequence[int], states: Sequence[bytes]) -> None:
        for row, state in zip(rows, states, strict=True):
            self.scenes[row].set_state(state)

    def close(self) -> None:
        """Nothing to free."""


class Expert:
    """Walks straight to the target."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def act(self, sim: Scene) -> Array:
        """Full speed until the last step."""
        return np.clip((sim.target - sim.agent) / self.options.step_size, -1, 1).astype(np.float32)
