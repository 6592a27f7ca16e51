"""MetaWorld (MT50, ML45 train and test, or one task) as a simulator: what it offers, and one scene of it.

reset id = number of the task in tasks.json * 1,000,000 + layout seed. Layout seeds below 500 are held out for
evaluation, 100,000-499,999 belong to demonstrations, 500,000 and above to training.
"""

from __future__ import annotations

import difflib
import itertools
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlinf.simulators.contract import TASK_STRIDE, Array, ChunkResult, EnvSpec, IdGrid, ReplayState

TRIALS_PER_TASK = {"metaworld_50": 10, "metaworld_45_ind": 10, "metaworld_45_ood": 20}
TRIALS_OF_ONE_TASK = 500
SETTLE_STEPS = 16  # zero actions after a reset, before the policy sees anything


@cache
def task_table() -> dict[str, Any]:
    """Instructions (their order numbers the tasks), the ML45 test tasks, and the difficulty classes."""
    return json.loads(Path(__file__).with_name("tasks.json").read_text())


@cache
def all_tasks() -> tuple[str, ...]:
    """The 50 task names, in the order of the published description table."""
    return tuple(task_table()["descriptions"])


@dataclass(frozen=True)
class Options:
    """`init_params` of MetaWorld."""

    task_suite_name: str = "metaworld_50"
    """metaworld_50, metaworld_45_ind (ML45 train tasks), metaworld_45_ood (ML45 test tasks) or one task: reach-v3."""
    image_size: int | None = None
    """Pixels of the square camera image; null is 480."""
    camera_heights: int | None = None
    """The guides' name for image_size."""
    camera_widths: int | None = None
    """Another name for image_size: those given must be equal."""
    render: Literal["exact", "fast"] = "exact"
    """exact is MuJoCo's default quality, as published policies saw; fast drops shadows, antialiasing, reflections."""
    decimate: bool | None = None
    """Draw meshes with fewer triangles (physics keeps the originals); null does so for fast images up to 128 pixels."""
    gl: Literal["auto", "egl", "osmesa"] = "auto"
    """Headless back end; auto takes EGL when a device answers, else OSMesa."""
    max_loaded_tasks: int = 0
    """Tasks kept in memory per process (100-200 MB each); 0 keeps as many as the process has scenes, at least 4."""

    def __post_init__(self) -> None:
        if self.task_suite_name not in TRIALS_PER_TASK and self.task_suite_name not in all_tasks():
            known = [*TRIALS_PER_TASK, *all_tasks()]
            close = difflib.get_close_matches(self.task_suite_name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"task_suite_name={self.task_suite_name!r} must be {', '.join(TRIALS_PER_TASK)} or one task{hint}"
            )
        given = [(k, v) for k, v in self._sizes().items() if v is not None]
        for (key, value), (other, differs) in itertools.pairwise(given):
            if value != differs:
                raise ValueError(f"{key}={value} and {other}={differs} must be equal: they name one square image")
        if self.size < 16:
            raise ValueError(f"image_size={self.size} must be at least 16")

    @property
    def size(self) -> int:
        """Pixels of the square image, whichever key gave it."""
        return next((v for v in self._sizes().values() if v is not None), 480)

    def _sizes(self) -> dict[str, int | None]:
        return {
            "image_size": self.image_size,
            "camera_heights": self.camera_heights,
            "camera_widths": self.camera_widths,
        }

    @property
    def decimated(self) -> bool:
        """Whether render meshes are thinned out."""
        return self.decimate if self.decimate is not None else self.render == "fast" and self.size <= 128

    @property
    def tasks(self) -> tuple[str, ...]:
        """The suite's tasks, in table order."""
        held_out = task_table()["ml45_test"]
        if self.task_suite_name == "metaworld_50":
            return all_tasks()
        if self.task_suite_name == "metaworld_45_ind":
            return tuple(t for t in all_tasks() if t not in held_out)
        if self.task_suite_name == "metaworld_45_ood":
            return tuple(t for t in all_tasks() if t in held_out)
        return (self.task_suite_name,)


def spec(options: Options) -> EnvSpec:
    """The suite's shape; MetaWorld itself is not imported."""
    numbers = tuple(all_tasks().index(t) for t in options.tasks)
    trials = TRIALS_PER_TASK.get(options.task_suite_name, TRIALS_OF_ONE_TASK)
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=options.tasks,
        action_dim=4,
        action_names=("x", "y", "z", "gripper"),
        gripper="absolute",
        state_dim=4,
        image_size=(options.size, options.size),
        reset_ids={
            "train": IdGrid(numbers, range(500_000, TASK_STRIDE), interleaved=True),
            "demo": IdGrid(numbers, range(100_000, 500_000), interleaved=True),
            "eval": IdGrid(numbers, range(trials)),
        },
        control_hz=80.0,
        task_groups=_difficulty(options.tasks),
        critic_state_dim=39,
    )


def _difficulty(tasks: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The suite's tasks by difficulty class; nothing to tell for a single task."""
    classes = {name: tuple(t for t in tasks if t in members) for name, members in task_table()["difficulty"].items()}
    return {name: members for name, members in classes.items() if members} if len(tasks) > 1 else {}


class Scene(ReplayState):
    """One MetaWorld episode; shares its task's environment object and renderer with the other scenes of the process."""

    def __init__(self, options: Options) -> None:
        from rlinf.simulators.opengl import choose_backend

        choose_backend(options.gl)
        from rlinf.simulators.metaworld.stage import STAGES

        self.options = options
        self._stages = STAGES
        self._stages.num_scenes += 1
        self._stage: Any = None
        self._parked: Any = None  # Snapshot while another scene is on the stage

    def reset(self, reset_id: int) -> None:
        """Build the layout of the id and let it settle."""
        self._begin(reset_id)
        number, layout = divmod(int(reset_id), TASK_STRIDE)
        self._task = all_tasks()[number]
        if self._stage is not None and self._stage.owner is self:
            self._stage.owner = None
        self._parked = None
        self._take_stage().reset(layout)

    def task(self) -> str:
        return self._task

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """Execute the actions; the reward level is MetaWorld's success flag."""
        stage = self._take_stage()
        result = ChunkResult.zeros(len(actions))
        for i, action in enumerate(actions):
            success = stage.step(action)
            result.rewards[i], result.success[i], result.steps = float(success), success, i + 1
            if record:
                result.frames.append(stage.render())
            if success and stop_on_success:
                break
        self._remember(actions[: result.steps])
        return result

    def observe(self) -> dict[str, Any]:
        """The camera, hand position and gripper opening, the sentence, and the full state for a critic."""
        seen = self.observe_soon()
        return seen | {"images": seen["images"]()}

    def observe_soon(self) -> dict[str, Any]:
        """The same with a function in place of the image: drawn now, fetched with those of the other scenes."""
        stage = self._take_stage()
        return {
            "images": stage.draw(),
            "wrist_images": None,
            "states": stage.obs[:4].astype(np.float32),
            "task_description": task_table()["descriptions"][self._task],
            "critic_state": stage.obs.astype(np.float32),
        }

    def full_observation(self) -> Array:
        """The 39-d observation f64, for the scripted expert."""
        return self._take_stage().obs

    def scripted_policy(self) -> Any:
        """MetaWorld's own expert for the running task."""
        return self._take_stage().policy

    def close(self) -> None:
        """Leave the stage; its task stays in memory for other scenes, the last scene turns off the light."""
        if self._stage is not None and self._stage.owner is self:
            self._stage.owner = None
        self._stages.num_scenes -= 1
        if self._stages.num_scenes == 0:
            self._stages.clear()

    def leave_stage(self) -> None:
        """Called by whoever wants the stage next."""
        self._parked = self._stage.save()
        self._stage.owner = None

    def _take_stage(self) -> Any:
        if self._stage is not None and self._stage.owner is self:
            return self._stage
        self._stage = self._stages.get(self._task, self.options)
        if self._stage.owner is not None:
            self._stage.owner.leave_stage()
        if self._parked is not None:
            self._stage.load(self._parked)
        self._stage.owner = self
        return self._stage


class Expert:
    """MetaWorld's scripted policies; they saturate, so their actions are clipped."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def act(self, sim: Scene) -> Array:
        """One action f32 [4] from the full observation."""
        return np.clip(sim.scripted_policy().get_action(sim.full_observation()), -1, 1).astype(np.float32)
