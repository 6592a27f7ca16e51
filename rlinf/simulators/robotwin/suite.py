"""What RoboTwin offers: options and shape. Neither RoboTwin nor SAPIEN is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rlinf.simulators.contract import EnvSpec, SetupError
from rlinf.simulators.robotwin.assets import (
    are_others,
    asset_hash,
    check_files,
    check_platform,
    commit_of,
    find_assets,
    find_checkout,
    warn_of_commit,
)
from rlinf.simulators.robotwin.seeds import FIRST, FORMAT, MAX_SUBSTITUTES, SPLITS, seeds_of
from rlinf.simulators.robotwin.tasks import check_task, listed_id, task_table
from rlinf.simulators.vulkan import has_nvidia
from rlinf.typed import Within

DEFAULT_TASK = "place_empty_cup"
ARM_JOINTS = 6
ACTION_DIM = STATE_DIM = 2 * (ARM_JOINTS + 1)
CROPPED = (224, 224)
CAMERAS = {"D435": (240, 320), "Large_D435": (480, 640), "L515": (180, 320), "Large_L515": (360, 640)}  # height, width
SIM_FREQ = 250  # physics steps a second
SAVE_FREQ = 15  # physics steps between the targets of a demonstration, RoboTwin's own choice
SETTINGS: dict[str, dict[str, Any]] = {  # task_config.domain_randomization of RoboTwin's files of these names
    "demo_clean": {
        "random_background": False,
        "cluttered_table": False,
        "clean_background_rate": 1,
        "random_head_camera_dis": 0,
        "random_table_height": 0,
        "random_light": False,
        "crazy_random_light_rate": 0,
    },
    "demo_randomized": {
        "random_background": True,
        "cluttered_table": True,
        "clean_background_rate": 0.02,
        "random_head_camera_dis": 0,
        "random_table_height": 0.03,
        "random_light": True,
        "crazy_random_light_rate": 0.02,
    },
}
SIDES = ("left", "right")
ACTION_NAMES = tuple(f"{side}_{part}" for side in SIDES for part in ("j1", "j2", "j3", "j4", "j5", "j6", "gripper"))


@dataclass(frozen=True)
class Options:
    """`init_params` of RoboTwin."""

    task_suite_name: str | None = None
    """One of the 46 tasks; in the block itself it may be a list of them; null takes task_config.task_name, else
    place_empty_cup."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """RoboTwin's own settings, as its task_config files and the guides write them: task_name, step_lim, embodiment,
    camera, domain_randomization, data_type, planner_backend, ..."""
    assets_path: str | None = None
    """Folder in which RoboTwin's assets/ lies; null is ASSETS_PATH, else data/robotwin or the checkout."""
    seeds_path: str | None = None
    """File of seeds that the expert solves; null takes the published list, or all seeds with other assets."""
    center_crop: bool = False
    """Crop pictures to 0.9 of their area and scale them to 224 x 224, as published for OpenVLA-OFT."""
    use_custom_reward: bool = False
    """Published name for the reward of this adapter: reward_coef on success. Without it RoboTwin's own, which is 1."""
    robotwin_path: str | None = None
    """Checkout of RoboTwin's branch RLinf_support; null is ROBOTWIN_PATH, else data/robotwin/RoboTwin."""
    render: Literal["exact", "fast"] = "exact"
    """exact is ray traced with 32 samples a pixel, as published, and needs an NVIDIA GPU; fast is rasterised without
    shadows."""
    shader: Literal["auto", "rt", "default", "minimal"] = "auto"
    """SAPIEN's shader pack; auto is rt for exact and minimal for fast. With exact shadows stay on."""
    instruction: Literal["seen", "unseen"] = "seen"
    """Which of RoboTwin's sentences the instruction is drawn from."""
    reward: Literal["sparse", "dense"] = "sparse"
    """sparse: 1 on success; dense: RoboTwin's shaped level of 0 to 1 after each chunk, of the tasks that have one."""
    max_unstable: Annotated[int, Within(0, MAX_SUBSTITUTES)] = 6
    """Seeds tried in place of one whose objects do not come to rest, before the reset fails."""
    compat: bool = False
    """As published: the instruction is made for the first seed of a scene, and an unstable seed is followed by the next
    number; set by `compat: rlinf-0.4`."""
    max_growth_mb: Annotated[int, Within(0, 10**6)] = 8000
    """Memory by which a simulator process may grow before it is started anew at a reset; 0 never."""
    setting: Literal["demo_clean", "demo_randomized"] | None = None
    """RoboTwin's Easy or Hard, in place of task_config.domain_randomization; null leaves that as it is."""
    trials_per_task: Annotated[int, Within(1, 10**6)] = 100
    """Held-out episodes of each task, RoboTwin's own number."""
    listed: tuple[str, ...] = ()
    """Set by rlinf where task_suite_name is a list: all of it."""

    def __post_init__(self) -> None:
        if self.setting is not None:
            randomised = {"domain_randomization": dict(SETTINGS[self.setting])}
            object.__setattr__(self, "task_config", {**self.task_config, **randomised})
        named = self.task_config.get("task_name")
        if named is not None and not self.listed and self.task_suite_name not in (None, named):
            raise ValueError(
                f"task_suite_name={self.task_suite_name!r} and task_config.task_name={named!r} must not differ"
            )
        check_task(self.task, "task_suite_name" if self.task_suite_name is not None else "task_config.task_name")
        for name in self.listed:
            check_task(name, "task_suite_name")
        if self.reward == "dense" and not task_table()[self.task]["dense_reward"]:
            having = ", ".join(name for name, row in task_table().items() if row["dense_reward"])
            raise ValueError(f"reward=dense: RoboTwin has none for {self.task}; it has one for {having}")
        if self.reward == "dense" and self.use_custom_reward:
            raise ValueError("use_custom_reward=True pays success only; leave it out with init_params.reward: dense")
        self._check_task_config()

    def _check_task_config(self) -> None:
        """Refuse settings under which no scene could be made."""
        step_lim = self.task_config.get("step_lim")
        if step_lim is not None and (not isinstance(step_lim, int) or isinstance(step_lim, bool) or step_lim < 1):
            raise ValueError(f"task_config.step_lim={step_lim!r} must be a whole number above 0")
        robots = [part for part in self.embodiment if isinstance(part, str)]
        if [type(part) for part in self.embodiment] not in ([str], [str, str, float], [str, str, int]):
            raise ValueError(
                f"task_config.embodiment={list(self.embodiment)} must be [aloha-agilex], a robot with two arms, or two "
                "robots and their distance in metres: [piper, piper, 0.6]"
            )
        if "franka-panda" in robots:
            raise ValueError("task_config.embodiment: franka-panda has 7 joints an arm, RoboTwin's chunks take 6")
        for key in ("head_camera_type", "wrist_camera_type"):
            if self.camera.get(key, "D435") not in CAMERAS:
                raise ValueError(f"task_config.camera.{key}={self.camera[key]!r} must be {', '.join(CAMERAS)}")
        if not self.camera.get("collect_head_camera", True):
            raise ValueError("task_config.camera.collect_head_camera=False: policies look through the head camera")

    @property
    def task(self) -> str:
        """The task, whichever key named it; the first of a list."""
        return self.task_suite_name or self.task_config.get("task_name", DEFAULT_TASK)

    @property
    def embodiment(self) -> tuple[Any, ...]:
        """Robot with two arms, or two robots and the distance between them."""
        return tuple(self.task_config.get("embodiment", ("aloha-agilex",)))

    @property
    def camera(self) -> dict[str, Any]:
        """RoboTwin's camera settings."""
        return self.task_config.get("camera", {})

    @property
    def wrist_cameras(self) -> bool:
        """Whether each hand has a camera."""
        return bool(self.camera.get("collect_wrist_camera", False))

    @property
    def shader_pack(self) -> str:
        """SAPIEN's shader pack."""
        if self.shader != "auto":
            return self.shader
        return "rt" if self.render == "exact" else "minimal"

    def step_limit(self, task: str) -> int:
        """Actions after which an episode of a task is cut, at the latest."""
        return self.task_config.get("step_lim") or task_table()[task]["step_limit"]

    def picture_size(self, camera_key: str) -> tuple[int, int]:
        """Height and width of a camera's picture as policies see it."""
        return CROPPED if self.center_crop else CAMERAS[self.camera.get(camera_key, "D435")]


def spec(options: Options) -> EnvSpec:
    """The shape of a task."""
    task, root = options.task, assets_root(options)
    others = root is not None and are_others(root)
    known = asset_hash(root) if root is not None and options.seeds_path else None
    seeds = seeds_of(task, options.seeds_path, assets=known, others=others)
    seeds["eval"] = seeds["eval"][: options.trials_per_task]
    if options.listed:
        seeds = {split: _moved(numbers, listed_id(task, 0)) for split, numbers in seeds.items()}
    return EnvSpec(
        suite=task,
        tasks=(task,),
        action_dim=ACTION_DIM,
        action_names=ACTION_NAMES,
        gripper="absolute",
        state_dim=STATE_DIM,
        image_size=options.picture_size("head_camera_type"),
        reset_ids=seeds,
        control_hz=SIM_FREQ / options.task_config.get("save_freq", SAVE_FREQ),
        num_wrist_images=2 if options.wrist_cameras else 0,
        wrist_image_size=options.picture_size("wrist_camera_type") if options.wrist_cameras else (0, 0),
        robot="+".join(dict.fromkeys(part for part in options.embodiment if isinstance(part, str))),
        step_limits={task: options.step_limit(task)},
        action_bound=float("inf"),
        expert_drives=True,
    )


def _moved(numbers: Sequence[int], by: int) -> Sequence[int]:
    """The same numbers, each larger by `by`; a range stays one."""
    if isinstance(numbers, range):
        return range(numbers.start + by, numbers.stop + by, numbers.step)
    return [number + by for number in numbers]


def assets_root(options: Options) -> Path | None:
    """The folder that holds assets/, or None where there is none on this machine."""
    try:
        return find_assets(options.assets_path, find_checkout(options.robotwin_path))
    except SetupError:
        return None


def seed_candidates(split: str) -> Iterable[int]:
    """The seeds of a split ("train" or "eval") in the order in which `rlinf seeds` tries them."""
    return range(FIRST[split], SPLITS[split].stop)


def seed_document(options: Options, found: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What a file of seeds holds: those found by split, and with which assets, robots and randomisation."""
    checkout = find_checkout(options.robotwin_path)
    seeds = sorted(seed for numbers in found.values() for seed in numbers)
    made_with = {key: options.task_config.get(key) for key in ("domain_randomization", "planner_backend")}
    return {
        "format": FORMAT,
        "version": 1,
        "robotwin": commit_of(checkout),
        "assets": asset_hash(find_assets(options.assets_path, checkout)),
        "tasks": {options.task: {"embodiment": list(options.embodiment), **made_with, "seeds": seeds}},
    }


def smallest_task() -> dict[str, Any]:
    """A task_config for one look: a task that needs no objects, with a robot that the assets hold."""
    root = assets_root(Options())
    there = [] if root is None else [path.parent.name for path in (root / "assets/embodiments").glob("*/config.yml")]
    robots = ["piper", "piper", 0.6] if "piper" in there else ["aloha-agilex"]
    return {"task_name": "stack_blocks_two", "embodiment": robots}


def check_setup(options: Options) -> None:
    """Refuse to start where RoboTwin, its assets or a driver that can draw them is missing."""
    check_platform()
    checkout = find_checkout(options.robotwin_path)
    root = find_assets(options.assets_path, checkout)
    randomised = options.task_config.get("domain_randomization", {})
    check_files(root, options.embodiment, textures=bool(randomised.get("random_background", False)))
    if options.shader_pack == "rt" and not has_nvidia():
        raise SetupError(
            "init_params.render=exact is ray traced, which needs an NVIDIA GPU, and none is here; "
            "set init_params.render: fast (rasterised)"
        )
    warn_of_commit(checkout)
