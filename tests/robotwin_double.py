"""A small double of RoboTwin's checkout and assets: the parts of its task API that the adapter touches, no physics.

A task is solved where the left arm's first joint has come to 1. `faults` maps seeds to what goes wrong when they are
reset: unstable (always), hang and die (the first time), leak (every time).
"""

from __future__ import annotations

import json
from pathlib import Path

ROBOT = """
import numpy as np
class Robot:
    def __init__(self):
        self.left, self.right = [0.0] * 6 + [1.0], [0.0] * 6 + [1.0]
        self.left_camera = self.right_camera = self
    def get_pose(self): return 0
    def get_left_arm_jointState(self): return list(self.left)
    def get_right_arm_jointState(self): return list(self.right)
    def get_left_ee_pose(self): return [self.left[0]] * 7
    def get_right_ee_pose(self): return [self.right[0]] * 7
    def is_left_gripper_open(self): return self.left[6] > 0.8
    def is_right_gripper_open(self): return self.right[6] > 0.8
"""
BASE = """
import json, os, time
from pathlib import Path
import numpy as np
from envs.utils.create_actor import UnStableError
from envs.robot import Robot
HERE = Path(__file__).resolve().parents[1]
LEAKED = []
class Camera:
    def __init__(self, task): self.task, self.drawn = task, 0
    def take_picture(self): self.drawn += 1
    def get_picture(self, name):
        picture = np.zeros((240, 320, 4), np.float32)
        picture[0, 0, 0] = self.drawn / 255 + 1e-4
        picture[0, 1, 0] = self.task.scene.updates / 255 + 1e-4
        return picture
class Cameras:
    def __init__(self, task):
        self.static_camera_name = ["front_camera", "head_camera"]
        self.static_camera_list = [None, Camera(task)]
        self.left_camera, self.right_camera = Camera(task), Camera(task)
    def update_wrist_camera(self, left, right): pass
class Scene:
    updates = 0
    def update_render(self): self.updates += 1
    def get_entities(self): return []
class Reward:
    def __init__(self, task): self.task = task
    def update(self): self.updated = True
    def compute_reward(self): return min(0.9, self.task.robot.left[0])
class Base_Task:
    def get_cluttered_table(self, xlim=[0.0]): xlim[0] += 1; return xlim[0]
    def setup_scene(self, **given): self.shadow = given.get("shadow", True)
    def setup_demo(self, seed, now_ep_num, **given):
        faults = json.loads((HERE / "faults.json").read_text())
        what, marker = faults.get(str(seed)), HERE / f"had_{seed}"
        if what == "unstable": raise UnStableError(f"seed {seed}")
        if what in ("hang", "die") and not marker.exists():
            marker.touch()
            if what == "die": os._exit(9)
            time.sleep(600)
        if what == "leak": LEAKED.append(np.ones(110 << 20, np.uint8))
        assert given["left_robot_file"].endswith("piper") and given["embodiment_dis"] == 0.6
        np.random.seed(seed)
        self.drift = self.get_cluttered_table()
        self.setup_scene()
        self.scene, self.robot, self.cameras = Scene(), Robot(), Cameras(self)
        self.crazy_random_light, self.eval_success, self.plan_success = 0, False, True
        self.place, self.save_freq, self.reward, self.seed = np.random.rand(), 15, Reward(self), seed
        self.robot.right[0] = float(self.place)
    def get_info(self): return {"{A}": f"block {self.seed}"}
    def _update_render(self): self.scene.update_render()
    def _take_picture(self, reward=None): raise AssertionError("RoboTwin's own pictures are not wanted")
    def check_success(self): return self.robot.left[0] >= 1.0
    def gen_sparse_reward_data(self, actions):
        self._update_render()
        success = False
        for action in actions:
            for _ in range(10):
                self._update_render()
            self.robot.left, self.robot.right = list(map(float, action[:7])), list(map(float, action[7:]))
            if self.check_success():
                self.eval_success = success = True
                break
        return [float(success)], [int(success)], [0], {"success": success}
    def play_once(self):
        self._take_picture()
        for _ in range(40):
            self.robot.left[0] += 0.025
            self._update_render()
            self._take_picture()
        self._take_picture()
    def close_env(self, clear_cache=False): self.scene = self.robot = self.cameras = None
"""
WORDS = """
def generate_episode_descriptions(task_name, episodes, max_descriptions, seed):
    return [{"seen": [f"{task_name} {episodes[0]['{A}']} {seed}"], "unseen": ["nothing seen"]}]
"""
SAPIEN = """
import types
render = types.SimpleNamespace(set_camera_shader_dir=lambda _: None, RenderSystem=object, RenderBodyComponent=object)
"""


def write_double(folder: Path, faults: dict[int, str] | None = None) -> Path:
    """Write a checkout with assets beside its code; returns the folder, which is robotwin_path and assets_path."""
    tasks = ("stack_blocks_two", "click_bell")
    files = {
        "sapien/__init__.py": SAPIEN,
        "envs/__init__.py": "",
        "envs/robot.py": ROBOT,
        "envs/_base_task.py": BASE,
        "envs/utils/__init__.py": "",
        "envs/utils/create_actor.py": "class UnStableError(Exception): pass\n",
        "description/__init__.py": "",
        "description/utils/__init__.py": "",
        "description/utils/generate_episode_instructions.py": WORDS,
        "description/task_instruction/stack_blocks_two.json": "{}",
        "robotwin/envs/vector_env.py": "",
        "task_config/_embodiment_config.yml": "piper: {file_path: ./assets/embodiments/piper}\n",
        "assets/embodiments/piper/config.yml": "{}",
        "assets/objects/same.json": "{}",
        "assets/objects/objaverse/list.json": json.dumps({"item_names": []}),
        "faults.json": json.dumps(faults or {}),
    }
    files |= {f"envs/{t}.py": f"from envs._base_task import Base_Task\nclass {t}(Base_Task): pass\n" for t in tasks}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
