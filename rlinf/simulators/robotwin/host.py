"""RoboTwin's own code, imported into this process from the user's checkout, whose files stay as they are.

What has to be otherwise is replaced in memory: a module for point clouds that nobody asks for, the shader, and default
arguments that RoboTwin changes from reset to reset.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.simulators.contract import SetupError
from rlinf.simulators.robotwin.assets import INSTALL, find_assets, find_checkout
from rlinf.simulators.robotwin.suite import SAVE_FREQ, Options
from rlinf.simulators.vulkan import check_driver, choose_driver

PLANNER = "envs/robot/planner.py"
NO_LIMIT = 1 << 30  # actions; VecEnv counts them
RAY_TRACING = ("set_ray_tracing_samples_per_pixel", "set_ray_tracing_path_depth", "set_ray_tracing_denoiser")
DEFAULTS: dict[str, Any] = {
    "planner_backend": "mplib",  # curobo, RoboTwin's own choice, needs a GPU and a package of its own
    "domain_randomization": {},
    "camera": {},
    "data_type": {"rgb": True, "qpos": True},
    "save_freq": SAVE_FREQ,
    "clear_cache_freq": 8,
}


class Host:
    """The classes and functions of RoboTwin that scenes use; one for each process."""

    def __init__(self, checkout: Path, root: Path, shader: str) -> None:
        """`root` is the folder that holds assets/."""
        self.checkout, self.root = checkout, root
        if (checkout / PLANNER).is_file() and int(np.__version__.split(".")[0]) > 1:
            raise SetupError(
                f"RoboTwin's planner crashes with numpy {np.__version__} of {sys.executable}; it needs an environment "
                f"of its own with numpy 1.26, which {INSTALL} makes; or set ROBOTWIN_PYTHON, or env.train.python and "
                "env.eval.python"
            )
        os.environ["ASSETS_PATH"] = str(root)  # RoboTwin reads it while it is imported, and later
        sys.path.insert(0, str(checkout))
        choose_driver()
        if importlib.util.find_spec("open3d") is None:
            sys.modules["open3d"] = types.ModuleType("open3d")
        self._choose_shader(shader)
        self._base: Any = importlib.import_module("envs._base_task").Base_Task
        self.unstable_error: type[Exception] = importlib.import_module("envs.utils.create_actor").UnStableError
        describe = importlib.import_module("description.utils.generate_episode_instructions")
        self._describe: Any = describe.generate_episode_descriptions
        self._clutter_defaults = copy.deepcopy(self._base.get_cluttered_table.__defaults__)
        gc.freeze()  # every reset collects what the last scene left; what was imported need not be looked at for that

    def _choose_shader(self, shader: str) -> None:
        """Let every camera use this shader pack, whichever a task asks for."""
        render = importlib.import_module("sapien").render
        choose = render.set_camera_shader_dir
        render.set_camera_shader_dir = lambda _: choose(shader)
        if shader != "rt":
            for name in RAY_TRACING:
                setattr(render, name, lambda *_: None)
        self._render: Any = render
        self._renderer: Any = None

    def keep_renderer(self) -> None:
        """Let SAPIEN's renderer outlive the scenes: it ends with the last one, and a new one takes seconds to draw."""
        self._renderer = self._renderer or self._render.RenderSystem()

    def drawn_bodies(self, scene: Any) -> list[Any]:
        """Everything in a scene that SAPIEN draws."""
        found = (entity.find_component_by_type(self._render.RenderBodyComponent) for entity in scene.get_entities())
        return [body for body in found if body is not None]

    def new_task(self, name: str) -> Any:
        """A task object without a scene."""
        self._base.get_cluttered_table.__defaults__ = copy.deepcopy(self._clutter_defaults)
        return getattr(importlib.import_module(f"envs.{name}"), name)()

    def instruction(self, task: str, info: Mapping[str, str], seed: int, kind: str) -> str:
        """The sentence that RoboTwin gives an episode of this info and seed."""
        try:
            (written,) = self._describe(task, [dict(info)], 1, seed)
        except SystemExit:  # how it reports a missing file, after printing which
            raise SetupError(f"RoboTwin has no description of the objects of {task}: {dict(info)}") from None
        return written[kind][0]

    def arguments(self, task: str, task_config: Mapping[str, Any], embodiment: tuple[Any, ...]) -> dict[str, Any]:
        """What a task's setup takes: task_config, and where the robots' files are; to be copied for each call."""
        known = self._read_yaml(self.checkout / "task_config/_embodiment_config.yml")
        robots = [part for part in embodiment if isinstance(part, str)]
        for name in robots:
            if name not in known:
                raise SetupError(f"task_config.embodiment: RoboTwin knows no {name!r}; it has {', '.join(known)}")
        files = [str(self.root / known[name]["file_path"]) for name in robots]
        left, right = files[0], files[-1]
        given = {**DEFAULTS, **copy.deepcopy(dict(task_config))}
        two_robots = {"embodiment_dis": embodiment[2]} if len(embodiment) == 3 else {}
        return {
            **given,
            **two_robots,
            "task_name": task,
            "left_robot_file": left,
            "right_robot_file": right,
            "left_embodiment_config": self._read_yaml(Path(left) / "config.yml"),
            "right_embodiment_config": self._read_yaml(Path(right) / "config.yml"),
            "dual_arm_embodied": not two_robots,
            "embodiment_name": "_".join(robots),
            "eval_mode": True,  # as RoboTwin's VectorEnv has it in training too: backgrounds are those called unseen
            "eval_video_log": False,
            "render_freq": 0,
        }

    def _read_yaml(self, path: Path) -> dict[str, Any]:
        yaml = importlib.import_module("yaml")
        return yaml.safe_load(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _host(checkout: Path, root: Path, shader: str) -> Host:
    return Host(checkout, root, shader)


def load_host(options: Options) -> Host:
    """RoboTwin, imported once; a shader that differs from the first one's needs another process."""
    checkout = find_checkout(options.robotwin_path)
    return _host(checkout, find_assets(options.assets_path, checkout), options.shader_pack)


def explain(error: RuntimeError) -> None:
    """SetupError where a scene could not be made for want of a driver to draw with; SAPIEN names no cause."""
    if "device" in str(error):
        check_driver()
