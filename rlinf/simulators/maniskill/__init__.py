"""ManiSkill's put-on-plate tasks: a WidowX arm puts one of 25 objects on a plate, as a sentence asks.

family.py says what every published episode id means, suite.py which ids are trained on, assets.py finds the user's
files. stage.py is the world on SAPIEN's CPU physics, arm.py its robot, studio.py draws, picture.py composes, expert.py
plays by script. registered.py and batched.py are the same tasks as ManiSkill environments, many at once on a GPU.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np

from rlinf.simulators.contract import Array, ChunkResult, EnvSpec, ReplayState
from rlinf.simulators.maniskill.assets import find_assets
from rlinf.simulators.maniskill.batched import Batch as Batch
from rlinf.simulators.maniskill.expert import Expert as Expert
from rlinf.simulators.maniskill.family import PREFIX, Episode, episode, variant
from rlinf.simulators.maniskill.suite import OOD, STRIDE, reset_ids, rows_of, task_groups, task_names

CONTROL_MODE = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
SHADERS = ("minimal", "default")
NATIVE_SIZE = (480, 640)
SIM_DEFAULTS = {"sim_freq": 500, "control_freq": 5}
FAR = 3.0  # metres; what a critic sees of places ends there
# object 7 (position, quaternion), plate 3, gripper 7, gripper to object 3, object to plate 3, size of the object 3,
# qpos 8, grasped now, steps held / 5 up to 1, grasped once, held once
CRITIC_STATE = 7 + 3 + 7 + 3 + 3 + 3 + 8 + 4


@dataclass(frozen=True)
class Options:
    """`init_params` of ManiSkill."""

    id: str = PREFIX + "Main-v3"
    """Environment id, or ood: the published out-of-distribution evaluation, 16 environments in one run."""
    obj_set: Literal["train", "test", "all"] = "train"
    """Which objects, plates and images an id chooses from."""
    image_size: int | tuple[int, int] | None = None
    """Pixels of the image, a square's side or [height, width]; null is 480 x 640. The field of view stays."""
    state: Literal["qpos", "qpos+target"] = "qpos"
    """qpos: the 8 joints, as published; qpos+target appends the pose that actions move, in the base's frame (7)."""
    reward_mode: Literal["default", "only_success", "raw"] = "default"
    """default: 0.1 grasped + 0.1 held + 1.0 on the plate after a grasp; only_success: 1 on the plate; raw: always 0."""
    sim_backend: Literal["auto", "cpu", "physx_cpu", "gpu", "physx_cuda"] = "auto"
    """gpu steps all scenes of a process in one batch; auto is cpu: one scene at a time, equal everywhere."""
    sim_config: dict[str, Any] = field(default_factory=dict)
    """sim_freq (500) and control_freq (5), Hz."""
    sensor_configs: dict[str, Any] = field(default_factory=dict)
    """shader_pack: minimal or default."""
    control_mode: str | None = None
    """Only that of WidowX, which null stands for."""
    obs_mode: Literal["rgb+segmentation"] = "rgb+segmentation"
    """Accepted for compatibility: the segmentation cuts the robot out of its background."""
    num_envs: int | None = None
    """Accepted for compatibility; total_num_envs counts the environments."""
    max_episode_steps: int | None = None
    """Accepted for compatibility; max_episode_steps of the env block counts."""
    render_mode: str | None = None
    """Accepted for compatibility; nothing is shown on a screen."""
    use_multiple_plates: bool = False
    """Accepted for compatibility; MultiPlate-v1 has two plates."""
    trials_per_task: int = 64
    """Episodes of each environment of the suite ood."""
    task_suite_name: str | None = None
    """Another name for id."""

    def __post_init__(self) -> None:
        if self.task_suite_name is not None:
            object.__setattr__(self, "id", self.task_suite_name)
        for row in rows_of(self.id, self.obj_set):
            variant(*row)
        if self.control_mode == "None":  # how the published YAML writes null
            object.__setattr__(self, "control_mode", None)
        if self.control_mode not in (None, CONTROL_MODE):
            raise ValueError(f"control_mode={self.control_mode!r} must be null or {CONTROL_MODE}, the only controller")
        if self.num_envs not in (None, 1):
            raise ValueError(
                f"num_envs={self.num_envs} must be null: total_num_envs counts the environments, and a CPU process "
                "steps one scene at a time"
            )
        if self.use_multiple_plates:
            raise ValueError(f"use_multiple_plates=True is not offered; id: {PREFIX}MultiPlate-v1 has two plates")
        if self.state != "qpos" and self.on_gpu:
            raise ValueError(f"state={self.state} needs sim_backend: cpu; a batch on a GPU gives qpos")
        if self.id == OOD and self.on_gpu:
            raise ValueError(f"id={OOD} needs sim_backend: cpu: a batch on a GPU plays one environment id")
        if self.trials_per_task < 1:
            raise ValueError(f"trials_per_task={self.trials_per_task} must be at least 1")
        _check_keys("sim_config", self.sim_config, SIM_DEFAULTS)
        _check_keys("sensor_configs", self.sensor_configs, ("shader_pack",))
        if self.shader not in SHADERS:
            close = difflib.get_close_matches(self.shader, SHADERS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"sensor_configs.shader_pack={self.shader!r} must be {' or '.join(SHADERS)}{hint}")
        self._check_frequencies()
        self._check_size()

    def _check_frequencies(self) -> None:
        for name in SIM_DEFAULTS:
            value = self._sim(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"sim_config.{name}={value!r} must be a whole number of Hz above 0")
        if self.sim_freq % self.control_freq:
            raise ValueError(
                f"sim_config.sim_freq={self.sim_freq} must be a multiple of control_freq={self.control_freq}"
            )

    def _check_size(self) -> None:
        size = self.image_size
        pair = (size,) * 2 if size is None or isinstance(size, int) else tuple(size)
        if len(pair) != 2 or any(p is not None and (not isinstance(p, int) or p < 16) for p in pair):
            raise ValueError(f"image_size={size!r} must be a side or [height, width], at least 16 pixels each")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the picture."""
        if self.image_size is None:
            return NATIVE_SIZE
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)  # type: ignore[return-value]

    @property
    def shader(self) -> str:
        """SAPIEN's shader pack; minimal is ManiSkill's own choice."""
        return str(self.sensor_configs.get("shader_pack", SHADERS[0]))

    @property
    def on_gpu(self) -> bool:
        """Whether one batch on a GPU holds all scenes."""
        return self.sim_backend in ("gpu", "physx_cuda")

    @property
    def sim_freq(self) -> int:
        """Physics steps a second."""
        return self._sim("sim_freq")

    @property
    def control_freq(self) -> int:
        """Actions a second."""
        return self._sim("control_freq")

    def _sim(self, name: str) -> Any:
        return self.sim_config.get(name, SIM_DEFAULTS[name])


def spec(options: Options) -> EnvSpec:
    """The shape of an environment; neither SAPIEN nor the assets are touched."""
    return EnvSpec(
        suite=options.id,
        tasks=task_names(options.id, options.obj_set),
        action_dim=7,
        action_names=("x", "y", "z", "rx", "ry", "rz", "gripper"),
        gripper="binary_pm1",
        state_dim=8 if options.state == "qpos" else 8 + 7,
        image_size=options.size,
        reset_ids=reset_ids(options.id, options.obj_set, options.trials_per_task),
        control_hz=float(options.control_freq),
        task_groups=task_groups(options.id),
        critic_state_dim=CRITIC_STATE,
        batched=options.on_gpu,
    )


def check_setup(options: Options) -> None:
    """The files that the ids need must be there."""
    find_assets(rows_of(options.id, options.obj_set))


class Scene(ReplayState):
    """One put-on-plate episode; shares meshes, renderer and kinematics with the other scenes of its process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._rows = rows_of(options.id, options.obj_set)
        self._names = task_names(options.id, options.obj_set)
        self.assets = find_assets(self._rows)
        _prepare_sapien()
        from rlinf.simulators.maniskill.stage import Stage
        from rlinf.simulators.maniskill.studio import studio

        self.stage = Stage(self.assets, sim_freq=options.sim_freq, control_freq=options.control_freq)
        self._studio = studio(self.assets, options.size, options.shader)
        self._picture: Array | None = None  # of the current state

    @property
    def episode(self) -> Episode:
        """What is being played."""
        return self.stage.episode

    def reset(self, reset_id: int) -> None:
        """Build the world of the id."""
        self._begin(reset_id)
        self._row, episode_id = divmod(int(reset_id), STRIDE)
        if not 0 <= self._row < len(self._rows):
            raise ValueError(f"reset id {reset_id} is not one of {self.options.id}")
        self.stage.reset(episode(*self._rows[self._row], episode_id))
        self._picture = None

    def task(self) -> str:
        return self._names[self._row]

    @property
    def instruction(self) -> str:
        """The sentence of the episode."""
        objects, plates, now = self.assets.objects, self.assets.plates, self.episode
        return now.instruction(objects[now.object.index].name, plates[now.plate.index].name)

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """Execute the actions; the reward is the published level, which callers take the differences of."""
        result = ChunkResult.zeros(len(actions))
        for i, action in enumerate(actions):
            judged = self.stage.step(action)
            self._picture = None
            result.rewards[i] = level(self.options.reward_mode, judged._asdict())
            result.success[i], result.steps = judged.success, i + 1
            if record:
                result.frames.append(self._look())
            if judged.success and stop_on_success:
                break
        self._remember(actions[: result.steps])
        result.info = self._info()
        return result

    def observe(self) -> dict[str, Any]:
        """The camera, the joints, the sentence, and everything for a critic."""
        return {
            "images": self._look(),
            "wrist_images": None,
            "states": self._state(),
            "task_description": self.instruction,
            "critic_state": self._critic_state(),
        }

    def close(self) -> None:
        """Free the world; the process keeps its renderer."""
        self.stage.close()

    def _look(self) -> Array:
        if self._picture is None:
            self._picture = self._studio.picture(self.stage.view(), self.episode)
        return self._picture

    def _info(self) -> dict[str, float]:
        """The published quantities of an episode."""
        stage = self.stage
        object_, plate, gripper = (pose[:3] for pose in (stage.object_pose, stage.plate_pose, stage.gripper_pose))
        flags = {name: float(flag) for name, flag in stage.judgement._asdict().items() if name != "success"}
        return flags | {
            "gripper_carrot_dist": float(np.linalg.norm(gripper - object_)),
            "gripper_plate_dist": float(np.linalg.norm(gripper - plate)),
            "carrot_plate_dist": float(np.linalg.norm(object_ - plate)),
        }

    def _state(self) -> Array:
        arm = self.stage.arm
        columns = [arm.qpos] if self.options.state == "qpos" else [arm.qpos, arm.target.p, arm.target.q]
        return np.concatenate(columns).astype(np.float32)

    def _critic_state(self) -> Array:
        stage = self.stage
        object_, plate, gripper = stage.object_pose, stage.plate_pose[:3], stage.gripper_pose
        held, judged = stage.grasped_steps, stage.judgement
        flags = [held > 0, min(held / 5, 1.0), judged.is_src_obj_grasped, judged.consecutive_grasp]
        between = [object_[:3] - gripper[:3], plate - object_[:3]]
        size = self.assets.objects[self.episode.object.index].size
        columns = [object_, plate, gripper, *between, size, stage.arm.qpos, flags]
        # What was knocked off the table, or shot away between the fingers, must not blind a critic.
        return np.concatenate([np.asarray(c, np.float32) for c in columns]).clip(-FAR, FAR)


def level(reward_mode: str, judged: Mapping[str, Any]) -> float:
    """How far an episode has come, by the published flags."""
    if reward_mode == "raw":
        return 0.0
    if reward_mode == "only_success":
        return float(judged["success"])
    grasped = judged["is_src_obj_grasped"]
    return 0.1 * grasped + 0.1 * judged["consecutive_grasp"] + 1.0 * (judged["success"] and grasped)


@cache
def _prepare_sapien() -> None:
    """Choose the Vulkan driver before SAPIEN is imported; a driver it would refuse is an error here."""
    from rlinf.simulators.vulkan import check_driver

    check_driver()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SAPIEN tells where it found its libraries
        import sapien  # noqa: F401


def _check_keys(name: str, given: Mapping[str, Any], known: Any) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, list(known), n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{name}.{key} is not an option{hint}; known: {', '.join(known)}")
