"""What ManiSkill's put-on-plate tasks offer: options and shape. Neither SAPIEN nor the user's files are touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlinf.errors import did_you_mean
from rlinf.simulators.contract import EnvSpec, files_digest, versions_of
from rlinf.simulators.maniskill.assets import find_assets
from rlinf.simulators.maniskill.constants import CONTROL_FREQ, CONTROL_MODE, NATIVE_SIZE, SIM_FREQ
from rlinf.simulators.maniskill.observation import CRITIC_COLUMNS
from rlinf.simulators.maniskill.reset_ids import (
    OOD,
    OOD_ROWS,
    numbered_rows,
    reset_ids,
    rows_of,
    task_groups,
    task_names,
)
from rlinf.simulators.maniskill.tasks import ENV_IDS, PREFIX, variant
from rlinf.simulators.vulkan import driver_name
from rlinf.typed import Pixels, Within

SHADERS = ("minimal", "default")


@dataclass(frozen=True)
class Options:
    """`init_params` of ManiSkill."""

    id: str = PREFIX + "Main-v3"
    """Environment id, or ood: the published out-of-distribution evaluation, 16 environments in one run; or one of these
    by its name there: Carrot-v1, MultiCarrot-v1-train."""
    obj_set: Literal["train", "test", "all"] = "train"
    """Which objects, plates and images an id chooses from."""
    image_size: Pixels | tuple[Pixels, Pixels] | None = None
    """Pixels of the image, a square's side or [height, width]; null is 480 x 640. The field of view stays."""
    state: Literal["qpos", "qpos+target"] = "qpos"
    """qpos: the 8 joints, as published; qpos+target appends the pose that actions move, in the base's frame (7)."""
    reward_mode: Literal["default", "only_success", "raw"] = "default"
    """default: 0.1 grasped + 0.1 held + 1.0 on the plate after a grasp; only_success: 1 on the plate; raw: always 0."""
    shaped_reward: Annotated[float, Within(0.0, 100.0)] = 0.0
    """Weight, beside reward_mode, of how near the hand is to the object, and then the object it holds to the plate."""
    sim_backend: Literal["auto", "cpu", "physx_cpu", "gpu", "physx_cuda"] = "auto"
    """gpu steps all scenes of a process in one batch; auto is cpu: one scene at a time, equal everywhere."""
    sim_config: dict[str, Any] = field(default_factory=dict)
    """sim_freq (500) and control_freq (5), Hz."""
    sensor_configs: dict[str, Any] = field(default_factory=dict)
    """shader_pack: minimal or default."""
    control_mode: str | None = None
    """Only that of WidowX, which null stands for."""
    trials_per_task: Annotated[int, Within(1, 10**6)] = 64
    """Held-out episodes of each environment of the suite ood, or of a list of ids."""
    task_suite_name: str | None = None
    """Another name for id."""
    listed: tuple[str, ...] = ()
    """Set by rlinf where task_suite_name is a list: all of it."""

    def __post_init__(self) -> None:
        if self.task_suite_name is not None:
            object.__setattr__(self, "id", self.task_suite_name)
        self._check_id()
        if self.control_mode == "None":  # how the published YAML writes null
            object.__setattr__(self, "control_mode", None)
        if self.control_mode not in (None, CONTROL_MODE):
            raise ValueError(f"control_mode={self.control_mode!r} must be null or {CONTROL_MODE}, the only controller")
        if self.state != "qpos" and self.on_gpu:
            raise ValueError(f"state={self.state} needs sim_backend: cpu; a batch on a GPU gives qpos")
        if self.shaped_reward and self.on_gpu:
            raise ValueError(
                f"shaped_reward={self.shaped_reward} needs sim_backend: cpu; a GPU batch pays reward_mode alone"
            )
        if self.on_gpu and (self.listed or self.id not in ENV_IDS):
            what = f"task_suite_name={list(self.listed)}" if self.listed else f"id={self.id}"
            raise ValueError(f"{what} needs sim_backend: cpu: a batch on a GPU plays one environment id")
        _check_keys("sim_config", self.sim_config, ("sim_freq", "control_freq"))
        _check_keys("sensor_configs", self.sensor_configs, ("shader_pack",))
        if self.shader not in SHADERS:
            hint = did_you_mean(self.shader, SHADERS)
            raise ValueError(f"sensor_configs.shader_pack={self.shader!r} must be {' or '.join(SHADERS)}{hint}")
        for name, value in (("sim_freq", self.sim_freq), ("control_freq", self.control_freq)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"sim_config.{name}={value!r} must be a whole number of Hz above 0")
        if self.sim_freq % self.control_freq:
            raise ValueError(
                f"sim_config.sim_freq={self.sim_freq} must be a multiple of control_freq={self.control_freq}"
            )

    def _check_id(self) -> None:
        """Refuse an id that is none, and in a list the suite, whose name stands for 16 of them."""
        if self.listed and self.id == OOD:
            raise ValueError(
                f"task_suite_name={OOD} stands alone; in a list name its environments: {', '.join(OOD_ROWS)}"
            )
        try:
            for row in rows_of(self.id, self.obj_set):
                variant(*row)
        except ValueError as error:
            if self.task_suite_name is None or not str(error).startswith("id="):
                raise
            raise ValueError(f"task_suite_name={str(error).removeprefix('id=')}") from None

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
        return self.sim_config.get("sim_freq", SIM_FREQ)

    @property
    def control_freq(self) -> int:
        """Actions a second."""
        return self.sim_config.get("control_freq", CONTROL_FREQ)


def spec(options: Options) -> EnvSpec:
    """The shape of an environment, or of the out-of-distribution suite."""
    return EnvSpec(
        suite=options.id,
        tasks=task_names(options.id),
        action_dim=7,
        action_names=("x", "y", "z", "rx", "ry", "rz", "gripper"),
        gripper="binary_pm1",
        state_dim=8 if options.state == "qpos" else 8 + 7,
        image_size=options.size,
        reset_ids=reset_ids(options.id, options.obj_set, options.trials_per_task, listed=bool(options.listed)),
        control_hz=float(options.control_freq),
        robot="widowx",
        task_groups=task_groups(options.id),
        critic_state_dim=CRITIC_COLUMNS,
        batched=options.on_gpu,
    )


def check_setup(options: Options) -> None:
    """Refuse to start where files that the environments need are missing."""
    find_assets([row for _, row in numbered_rows(options.id, options.obj_set, options.listed).values()])


def protocol(options: Options) -> dict[str, Any]:
    """Versions, a digest of the files that are read, the device that draws, and what the options stand for.

    What training alone is paid for, shaped_reward, is no part of it.
    """
    rows = [row for _, row in numbered_rows(options.id, options.obj_set, options.listed).values()]
    assets = find_assets(rows)
    resolved = {
        "image_size": list(options.size),
        "sim_backend": "gpu" if options.on_gpu else "cpu",
        "sim_config": {"sim_freq": options.sim_freq, "control_freq": options.control_freq},
        "sensor_configs": {"shader_pack": options.shader},
        "renderer": driver_name(),
        "assets": files_digest(assets.urdf.parent, assets.files([variant(*row) for row in rows])),
    }
    return {"control_mode": None, "shaped_reward": None, **resolved, **versions_of("mani_skill", "sapien")}


def _check_keys(name: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keys of a block that are not known."""
    for key in given:
        if key not in known:
            raise ValueError(f"{name}.{key} is not an option{did_you_mean(key, known)}; known: {', '.join(known)}")
