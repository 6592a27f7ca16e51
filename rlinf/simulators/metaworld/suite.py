"""What MetaWorld offers: its options and the shape of its suites. MetaWorld itself is not imported.

reset id = number of the task in tasks.json * 1,000,000 + layout seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rlinf.errors import did_you_mean
from rlinf.simulators.contract import EVAL_LAYOUTS, EnvSpec, image_side, split_ids, versions_of
from rlinf.simulators.metaworld.tasks import TRIALS_PER_TASK, all_tasks, difficulty_classes, tasks_of
from rlinf.simulators.opengl import find_backend
from rlinf.typed import Pixels, Within

LOADED_TASK_BYTES = 70 << 20  # measured with software rendering: physics 25 MB, meshes and textures to draw 45


@dataclass(frozen=True)
class Options:
    """`init_params` of MetaWorld."""

    task_suite_name: str = "metaworld_50"
    """metaworld_50, metaworld_45_ind (ML45 train tasks), metaworld_45_ood (ML45 test tasks) or one task: reach-v3. In
    the block itself it may be a list of these."""
    image_size: Pixels | None = None
    """Pixels of the square camera image; null is 480."""
    camera_heights: Pixels | None = None
    """The guides' name for image_size."""
    camera_widths: Pixels | None = None
    """Another name for image_size: those given must be equal."""
    render: Literal["exact", "fast"] = "exact"
    """exact is MuJoCo's default quality, as published policies saw; fast drops shadows, antialiasing, reflections."""
    decimate: bool | None = None
    """Draw meshes with fewer triangles (physics keeps the originals); null does so for fast images up to 128 pixels."""
    gl: Literal["auto", "egl", "osmesa"] = "auto"
    """Headless back end; auto takes EGL when a device answers, else OSMesa."""
    max_loaded_tasks: Annotated[int, Within(0, 1000)] = 0
    """Tasks kept in memory per process (about 70 MB each); 0: six copies of each over all, if they fit."""
    critic_task: bool = False
    """Tell a critic that reads the state (openpi.value_input: state), and sft.state_loss, the task in 50 columns."""
    shaped_reward: Annotated[float, Within(0.0, 100.0)] = 0.0
    """Weight of MetaWorld's own shaped reward (how near a task is to being solved, 0 to 1) beside success."""

    def __post_init__(self) -> None:
        known = [*TRIALS_PER_TASK, *all_tasks()]
        if self.task_suite_name not in known:
            hint = did_you_mean(self.task_suite_name, known)
            raise ValueError(
                f"task_suite_name={self.task_suite_name!r} must be {', '.join(TRIALS_PER_TASK)} or one task{hint}"
            )
        _ = self.size  # refuses sizes that differ

    @property
    def size(self) -> int:
        """Pixels of the square image, whichever key gave it."""
        return image_side(
            480, image_size=self.image_size, camera_heights=self.camera_heights, camera_widths=self.camera_widths
        )

    @property
    def decimated(self) -> bool:
        """Whether meshes are drawn with fewer triangles."""
        return self.decimate if self.decimate is not None else self.render == "fast" and self.size <= 128


def spec(options: Options) -> EnvSpec:
    """The suite's shape."""
    tasks = tasks_of(options.task_suite_name)
    numbers = tuple(all_tasks().index(t) for t in tasks)
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=tasks,
        action_dim=4,
        action_names=("x", "y", "z", "gripper"),
        gripper="absolute",
        state_dim=4,
        image_size=(options.size, options.size),
        reset_ids=split_ids(numbers, TRIALS_PER_TASK.get(options.task_suite_name, len(EVAL_LAYOUTS))),
        control_hz=80.0,
        robot="sawyer",
        task_groups=difficulty_classes(tasks),
        critic_state_dim=39 + options.critic_task * len(all_tasks()),
        loaded_task_bytes=LOADED_TASK_BYTES,
    )


def protocol(options: Options) -> dict[str, Any]:
    """Versions, the picture as it is drawn, and nothing of how tasks are kept in memory or of what training is told."""
    other = dict.fromkeys(("camera_heights", "camera_widths", "max_loaded_tasks", "critic_task", "shaped_reward"))
    drawn = {"image_size": options.size, "decimate": options.decimated, "gl": find_backend(options.gl)}
    return other | drawn | versions_of("metaworld", "mujoco")
