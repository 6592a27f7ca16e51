"""CALVIN: a robot arm at a table with a drawer, a sliding door, a button, a switch and three blocks.

An episode is a chain of five tasks out of 34; the instruction is that of the current one and changes the moment it is
solved. `init_params.tasks` plays single tasks instead. starts.py says what a reset id means, stage.py is the world,
tasks.py the judge, symbolic.py knows which tasks can follow each other, data.py reads the user's copy of CALVIN,
expert.py does every task by script.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlinf.simulators.calvin.chain import Chain
from rlinf.simulators.calvin.data import check_folder, find_folder, read_annotations
from rlinf.simulators.calvin.expert import Expert as Expert
from rlinf.simulators.calvin.starts import (
    CHAIN_SLOT,
    DEMO_LAYOUTS,
    EVAL_LAYOUTS,
    SCENES,
    TRAIN_LAYOUTS,
    ids_of,
    start_of,
)
from rlinf.simulators.calvin.symbolic import CHAIN_LENGTH, NUM_SEQUENCES
from rlinf.simulators.calvin.tasks import TASKS, check_task, solved
from rlinf.simulators.contract import Array, ChunkResult, EnvSpec, ReplayState

SUITES = ("calvin_d", "calvin_abc", "calvin_abcd")
OFFICIAL_STEPS = 360  # per subtask
CRITIC_STATE = 15 + 24 + len(TASKS) + 1  # robot_obs, scene_obs, the task, the share of the chain that is solved


@dataclass(frozen=True)
class Options:
    """`init_params` of CALVIN."""

    task_suite_name: str = "calvin_d"
    """calvin_ and the letters of the scenes played: calvin_d, calvin_abc, calvin_abcd, or one such as calvin_a."""
    tasks: tuple[str, ...] = ()
    """Play these tasks one at a time, each from a start where it can be done; empty plays chains of five."""
    protocol: Literal["rl", "official"] = "rl"
    """rl leaves the time to max_episode_steps; official gives every subtask 360 steps and ends at the first failure."""
    instructions: Literal["auto", "validation", "training"] = "auto"
    """Sentences: one per task, or one of 7-20 drawn per subtask; auto: validation for calvin_d, training elsewhere."""
    eval_sequences: int = NUM_SEQUENCES
    """Evaluation plays the first this many of the benchmark's 1000 sequences."""
    image_size: int | None = None
    """Pixels of the square image of the fixed camera; null is 200."""
    camera_heights: int | None = None
    """The guides' name for image_size."""
    camera_widths: int | None = None
    """Another name for image_size: those given must be equal."""
    wrist_image_size: int | None = None
    """Pixels of the square image of the gripper camera; null is 84."""
    render: Literal["exact", "fast"] = "exact"
    """exact draws the published meshes; fast draws the robot with a hundredth of the triangles."""
    renderer: Literal["auto", "tiny", "egl"] = "auto"
    """tiny is Bullet's software renderer, egl draws on a GPU (brighter, with shadows); auto takes the GPU if there."""
    compat: bool = False
    """Put blocks and door of scenes A-C where scene D has them, as published; set by `compat: rlinf-0.4`."""
    data_path: str | None = None
    """Folder with CALVIN's files; null takes the variable CALVIN_PATH."""

    def __post_init__(self) -> None:
        letters = self.task_suite_name.removeprefix("calvin_").upper()
        in_order = "".join(scene for scene in SCENES if scene in letters)
        if not self.task_suite_name.startswith("calvin_") or not letters or letters != in_order:
            raise ValueError(
                f"task_suite_name={self.task_suite_name!r} must be {', '.join(SUITES)}, or calvin_ and other scenes "
                "out of a, b, c, d in this order"
            )
        object.__setattr__(self, "tasks", tuple(check_task(task) for task in self.tasks))
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={list(self.tasks)} names a task twice")
        if not 1 <= self.eval_sequences <= NUM_SEQUENCES:
            raise ValueError(f"eval_sequences={self.eval_sequences} must lie between 1 and {NUM_SEQUENCES}")
        given = [(k, v) for k, v in self._sizes().items() if v is not None]
        for (key, value), (other, differs) in itertools.pairwise(given):
            if value != differs:
                raise ValueError(f"{key}={value} and {other}={differs} must be equal: they name one square image")
        for key, pixels in (("image_size", self.size), ("wrist_image_size", self.wrist_size)):
            if pixels < 16:
                raise ValueError(f"{key}={pixels} must be at least 16")

    @property
    def scenes(self) -> tuple[str, ...]:
        """Letters of the suite."""
        return tuple(self.task_suite_name.removeprefix("calvin_").upper())

    @property
    def size(self) -> int:
        """Pixels of the fixed camera's square image, whichever key gave it."""
        return next((v for v in self._sizes().values() if v is not None), 200)

    @property
    def wrist_size(self) -> int:
        """Pixels of the gripper camera's square image."""
        return 84 if self.wrist_image_size is None else self.wrist_image_size

    @property
    def sentences(self) -> str:
        """Which annotations are told."""
        if self.instructions != "auto":
            return self.instructions
        return "validation" if self.task_suite_name == "calvin_d" else "training"

    def _sizes(self) -> dict[str, int | None]:
        return {
            "image_size": self.image_size,
            "camera_heights": self.camera_heights,
            "camera_widths": self.camera_widths,
        }


def spec(options: Options) -> EnvSpec:
    """The suite's shape; neither Bullet nor the data folder is touched. Demonstrations are always of single tasks."""
    tasks = options.tasks or TASKS
    slots = [TASKS.index(task) for task in tasks]
    if options.tasks:
        train, held_out = ids_of(options.scenes, slots, TRAIN_LAYOUTS, interleaved=True), EVAL_LAYOUTS
        eval_ids = ids_of(options.scenes, slots, held_out)
    else:
        train = ids_of(options.scenes, [CHAIN_SLOT], TRAIN_LAYOUTS, interleaved=True)
        eval_ids = ids_of(options.scenes, [CHAIN_SLOT], range(options.eval_sequences), interleaved=True)
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=tasks,
        action_dim=7,
        action_names=("x", "y", "z", "rx", "ry", "rz", "gripper"),
        gripper="sign",
        state_dim=7,
        image_size=(options.size, options.size),
        reset_ids={
            "train": train,
            "demo": ids_of(options.scenes, slots, DEMO_LAYOUTS, interleaved=True),
            "eval": eval_ids,
        },
        control_hz=30.0,
        num_wrist_images=1,
        wrist_image_size=(options.wrist_size, options.wrist_size),
        critic_state_dim=CRITIC_STATE,
        pays_events=True,
        min_episode_steps=OFFICIAL_STEPS * (1 if options.tasks else CHAIN_LENGTH) if _official(options) else 0,
    )


def _official(options: Options) -> bool:
    return options.protocol == "official"


class Scene(ReplayState):
    """One play table and the chain played at it."""

    def __init__(self, options: Options) -> None:
        folder = find_folder(options.data_path)
        check_folder(folder, options.scenes)
        self.options = options
        self._sentences = read_annotations(folder, options.sentences)
        from rlinf.simulators.calvin.stage import Stage

        self.stage = Stage(
            folder,
            image_size=options.size,
            wrist_size=options.wrist_size,
            renderer=options.renderer,
            low_poly=options.render == "fast",
        )

    def reset(self, reset_id: int) -> None:
        """Build the world of the id, let a seeded one come to rest, and begin its chain."""
        self._begin(reset_id)
        start = start_of(reset_id, compat=self.options.compat)
        if start.scene not in self.options.scenes:
            raise ValueError(f"reset id {reset_id} is of scene {start.scene}, not of {self.options.task_suite_name}")
        self.stage.reset(start.scene, start.robot_obs, start.scene_obs)
        for _ in range(start.settle_steps):
            self.stage.step(np.array([0, 0, 0, 0, 0, 0, start.gripper]))
        self.chain = Chain(start.tasks, step_limit=OFFICIAL_STEPS if _official(self.options) else 0)
        self._before = self.stage.facts()  # when the current task began

    def task(self) -> str:
        return f"chain-{self.stage.scene}" if len(self.chain.tasks) > 1 else self.chain.task

    @property
    def instruction(self) -> str:
        """The sentence of the current task; drawn anew for each, from the reset id alone."""
        sentences = self._sentences[self.chain.task]
        return sentences[int(np.random.default_rng([self._reset_id, self.chain.position]).integers(len(sentences)))]

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """Execute the actions; a reward of 1 each time a task of the chain is solved, success once all are."""
        result, chain = ChunkResult.zeros(len(actions)), self.chain
        for i, action in enumerate(actions):
            self.stage.step(action)
            if not chain.over:
                result.rewards[i] = float(self._judge())
            result.success[i], result.done[i], result.steps = chain.complete, chain.failed, i + 1
            if record:
                result.frames.append(self.stage.static_image())
            if chain.over and stop_on_success:
                break
        self._remember(actions[: result.steps])
        result.info = chain.metrics()
        return result

    def observe(self) -> dict[str, Any]:
        """Both cameras, where the gripper is, the sentence, and everything for a critic."""
        stage, chain = self.stage, self.chain
        robot = stage.robot_obs()
        progress = np.zeros(len(TASKS) + 1)
        progress[TASKS.index(chain.task)], progress[-1] = 1.0, chain.solved / len(chain.tasks)
        return {
            "images": stage.static_image(),
            "wrist_images": stage.wrist_image()[None],
            "states": robot[:7].astype(np.float32),
            "task_description": self.instruction,
            "critic_state": np.concatenate([robot, stage.scene_obs(), progress]).astype(np.float32),
        }

    def close(self) -> None:
        """Free the world."""
        self.stage.close()

    def _judge(self) -> bool:
        """Whether this step solved the current task; the next one is measured from here."""
        now = self.stage.facts()
        happened = solved(self.chain.task, self._before, now)
        if happened:
            self._before = now
        self.chain.count_step(happened)
        return happened
