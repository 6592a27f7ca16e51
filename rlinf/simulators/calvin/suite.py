"""What CALVIN offers: its options and the shape of its suites. Neither Bullet nor the user's files are touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rlinf.errors import did_you_mean
from rlinf.simulators.calvin.starts import CHAIN_SLOT, SCENES, ids_of
from rlinf.simulators.calvin.symbolic import CHAIN_LENGTH, NUM_SEQUENCES
from rlinf.simulators.calvin.tasks import TASKS, check_task
from rlinf.simulators.contract import DEMO_LAYOUTS, EVAL_LAYOUTS, TRAIN_LAYOUTS, EnvSpec, image_side
from rlinf.typed import Pixels, Within

SUITES = ("calvin_d", "calvin_abc", "calvin_abcd")
OFFICIAL_STEPS = 360  # per subtask
STEP_LENGTH, STEP_ANGLE = 0.02, 0.05  # m and rad of an action of 1


@dataclass(frozen=True)
class Options:
    """`init_params` of CALVIN."""

    task_suite_name: str = "calvin_d"
    """calvin_ and the letters of the scenes played: calvin_d, calvin_abc, calvin_abcd, or one such as calvin_a; or a
    task, open_drawer, played alone in the scenes of task_scenes. In the block itself it may be a list of tasks."""
    tasks: tuple[str, ...] = ()
    """Play these tasks one at a time, each from a start where it can be done; empty plays chains of five. A task that
    task_suite_name names takes their place."""
    in_a_row: Annotated[int, Within(1, CHAIN_LENGTH)] = 1
    """Of `tasks`, how many an episode of training or evaluation holds; the next begins where the last one ended."""
    expert_first: Annotated[float, Within(0, 1)] = 0.0
    """Share of the episodes of `tasks`, demonstrations too, that begin where the expert has just solved another of
    them: as a later task of a chain does, not with the arm at rest."""
    shaped_reward: Annotated[float, Within(0.0, 100.0)] = 0.0
    """Weight of the way to a task's solution beside success: the hand's to what it moves, and how far that moved."""
    task_scenes: str = "d"
    """Letters of the scenes in which tasks named by task_suite_name are played: d, abc, abcd."""
    protocol: Literal["rl", "official"] = "rl"
    """official: 360 steps a subtask, a failed one ends the chain, a solved one the chunk of an evaluation. rl: none."""
    instructions: Literal["auto", "validation", "training"] = "auto"
    """Sentences: one per task, or one of 7-20 drawn per subtask; auto: validation in scene D, training elsewhere."""
    eval_sequences: Annotated[int, Within(1, NUM_SEQUENCES)] = NUM_SEQUENCES
    """Evaluation plays the first this many of the benchmark's 1000 sequences."""
    image_size: Pixels | None = None
    """Pixels of the square image of the fixed camera; null is 200."""
    camera_heights: Pixels | None = None
    """The guides' name for image_size."""
    camera_widths: Pixels | None = None
    """Another name for image_size: those given must be equal."""
    wrist_image_size: Pixels | None = None
    """Pixels of the square image of the gripper camera; null is 84."""
    render: Literal["exact", "fast"] = "exact"
    """exact draws the published meshes; fast draws the robot with a hundredth of the triangles."""
    renderer: Literal["auto", "tiny", "egl"] = "auto"
    """tiny is Bullet's software renderer, egl draws on a GPU (brighter, with shadows); auto takes the GPU if there."""
    whole_chunks: bool = False
    """Play chunks to their end in the official protocol too; set for training, where a chunk is one action of the
    policy."""
    compat: bool = False
    """As published: scene D's blocks and door in A-C, chunks played to their end; set by `compat: rlinf-0.4`."""
    data_path: str | None = None
    """Folder with CALVIN's files; null takes the variable CALVIN_PATH, else data/calvin, where install.sh puts them."""
    listed: tuple[str, ...] = ()
    """Set by rlinf where task_suite_name is a list: all of it."""

    def __post_init__(self) -> None:
        self._check_name()
        try:
            object.__setattr__(self, "tasks", tuple(check_task(task) for task in self.tasks))
        except ValueError as error:
            raise ValueError(f"tasks={list(self.tasks)}: {error}") from error
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={list(self.tasks)} names a task twice")
        if self.in_a_row > 1 and len(self.tasks) < 2:
            raise ValueError(f"in_a_row={self.in_a_row} must be 1 where `tasks` names fewer than two")
        if self.expert_first > 0 and len(self.tasks) < 2:
            raise ValueError(f"expert_first={self.expert_first} must be 0 where `tasks` names fewer than two")
        if self.expert_first > 0 and self.in_a_row > 1:
            raise ValueError(f"expert_first={self.expert_first} must be 0 with in_a_row={self.in_a_row}: choose one")
        _ = self.size, self.wrist_size  # refuse sizes that are too small or differ

    def _check_name(self) -> None:
        """Refuse what is neither a suite nor a task, and a suite among the tasks of a list."""
        name, order = self.task_suite_name, "out of a, b, c, d in this order"
        if name in TASKS:
            if not _in_order(self.task_scenes.upper()):
                raise ValueError(f"task_scenes={self.task_scenes!r} must be letters of scenes {order}")
            if self.tasks:
                raise ValueError(f"tasks={list(self.tasks)} must be [] where task_suite_name names tasks itself")
        elif not name.startswith("calvin_") or not _in_order(name.removeprefix("calvin_").upper()):
            hint = did_you_mean(name, (*SUITES, *TASKS))
            raise ValueError(
                f"task_suite_name={name!r} must be {', '.join(SUITES)}, or calvin_ and other scenes {order}; or one of "
                f"the {len(TASKS)} tasks{hint}"
            )
        elif self.listed:
            raise ValueError(
                f"task_suite_name={name} plays chains of tasks and stands alone; a list holds tasks, such as "
                "[open_drawer, turn_on_led], and init_params.task_scenes the letters of their scenes"
            )

    @property
    def single_tasks(self) -> tuple[str, ...]:
        """The tasks that are played one at a time; empty where chains are played."""
        return (self.task_suite_name,) if self.task_suite_name in TASKS else self.tasks

    @property
    def scenes(self) -> tuple[str, ...]:
        """Letters of the scenes that the suite plays."""
        letters = self.task_scenes if self.task_suite_name in TASKS else self.task_suite_name.removeprefix("calvin_")
        return tuple(letters.upper())

    @property
    def size(self) -> int:
        """Pixels of the fixed camera's square image, whichever key gave it."""
        return image_side(
            200, image_size=self.image_size, camera_heights=self.camera_heights, camera_widths=self.camera_widths
        )

    @property
    def wrist_size(self) -> int:
        """Pixels of the gripper camera's square image."""
        return image_side(84, wrist_image_size=self.wrist_image_size)

    @property
    def sentences(self) -> str:
        """Which annotations are told: validation or training."""
        if self.instructions != "auto":
            return self.instructions
        return "validation" if self.scenes == ("D",) else "training"

    @property
    def looks_after_subtask(self) -> bool:
        """Whether a solved subtask ends the chunk of actions."""
        return self.protocol == "official" and not self.compat and not self.whole_chunks

    @property
    def step_limit(self) -> int:
        """Control steps after which a subtask has failed; 0: no limit."""
        return OFFICIAL_STEPS if self.protocol == "official" else 0


def _in_order(letters: str) -> bool:
    """Whether these are letters of scenes, each once, in their order."""
    return bool(letters) and letters == "".join(scene for scene in SCENES if scene in letters)


def spec(options: Options) -> EnvSpec:
    """The suite's shape. Demonstrations are always of single tasks."""
    tasks = options.single_tasks or TASKS
    slots = [TASKS.index(task) for task in tasks]
    played = slots if options.single_tasks else [CHAIN_SLOT]
    held_out = EVAL_LAYOUTS if options.single_tasks else range(options.eval_sequences)
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=tasks,
        action_dim=7,
        action_names=("x", "y", "z", "rx", "ry", "rz", "gripper"),
        gripper="sign",
        state_dim=7,
        image_size=(options.size, options.size),
        reset_ids={
            "train": ids_of(options.scenes, played, TRAIN_LAYOUTS, interleaved=True),
            "demo": ids_of(options.scenes, slots, DEMO_LAYOUTS, interleaved=True),
            "eval": ids_of(options.scenes, played, held_out, interleaved=not options.single_tasks),
        },
        control_hz=30.0,
        robot="franka_panda",
        num_wrist_images=1,
        wrist_image_size=(options.wrist_size, options.wrist_size),
        critic_state_dim=15 + 24 + len(TASKS) + 1,  # robot_obs, scene_obs, the task, the share of the chain solved
        pays_events=True,
        min_episode_steps=options.step_limit * (options.in_a_row if options.single_tasks else CHAIN_LENGTH),
    )
