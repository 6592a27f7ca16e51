"""One put-on-plate episode on the CPU back end."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np

from rlinf.simulators.contract import Array, ReplayScene, SceneObservation
from rlinf.simulators.maniskill.assets import find_assets
from rlinf.simulators.maniskill.judge import HELD_STEPS, level, nearness
from rlinf.simulators.maniskill.observation import FAR, critic_columns, distances
from rlinf.simulators.maniskill.reset_ids import STRIDE, numbered_rows
from rlinf.simulators.maniskill.suite import Options
from rlinf.simulators.maniskill.tasks import Episode, episode
from rlinf.simulators.vulkan import check_driver


class Scene(ReplayScene):
    """One world; it shares meshes, renderer and kinematics with the other scenes of its process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._rows = numbered_rows(options.id, options.obj_set, options.listed)
        self.assets = find_assets([row for _, row in self._rows.values()])
        _import_sapien()
        from rlinf.simulators.maniskill.cpu.renderer import shared_renderer
        from rlinf.simulators.maniskill.cpu.world import World

        self.world = World(self.assets, sim_freq=options.sim_freq, control_freq=options.control_freq)
        self._renderer = shared_renderer(self.assets, options.size, options.shader)
        self._picture: Array | None = None  # of the current state

    @property
    def episode(self) -> Episode:
        """The episode that is being played."""
        return self.world.episode

    def start(self, reset_id: int) -> None:
        """Build the world of the id."""
        number, episode_id = divmod(reset_id, STRIDE)
        if number not in self._rows:
            raise ValueError(f"reset id {reset_id} is not one of {', '.join(self.options.listed) or self.options.id}")
        self._task, row = self._rows[number]
        self.world.reset(episode(*row, episode_id))
        self._picture = None

    def task(self) -> str:
        return self._task

    def step(self, action: Array) -> tuple[float, bool, bool]:
        """The reward is the published level, of which callers pay differences, and where asked a share of nearness."""
        judged = self.world.step(action)
        self._picture = None
        reward = level(self.options.reward_mode, judged)
        if self.options.shaped_reward:
            reward += self.options.shaped_reward * self._nearness()
        return reward, judged.success, False

    def frame(self) -> Array:
        """The published picture u8 [H, W, 3] of the current state, drawn once."""
        if self._picture is None:
            self._picture = self._renderer.picture(self.world.view(), self.episode)
        return self._picture

    def observe(self) -> SceneObservation:
        """The camera, the joints, the sentence, and everything for a critic."""
        arm = self.world.arm
        states = [arm.qpos] if self.options.state == "qpos" else [arm.qpos, arm.target.p, arm.target.q]
        return {
            "images": self.frame(),
            "wrist_images": None,
            "states": np.concatenate(states).astype(np.float32),
            "task_description": self.assets.instruction(self.episode),
            "critic_state": self._critic_state(),
        }

    def info(self) -> dict[str, float]:
        """The published flags (but success) and distances of the episode."""
        told = self.world.judge.judgement._asdict() | self._distances()
        return {name: float(value) for name, value in told.items() if name != "success"}

    def close(self) -> None:
        """Free the world; the process keeps its renderer."""
        self.world.close()

    def _distances(self) -> dict[str, float]:
        """Metres between gripper, object and plate."""
        world = self.world
        return distances(np.linalg.norm, world.gripper_pose[:3], world.object_pose[:3], world.plate_pose[:3])

    def _nearness(self) -> float:
        """How near the episode is to being solved, 0 to 1."""
        away, judge = self._distances(), self.world.judge
        to_object, to_plate = float(away["gripper_carrot_dist"]), float(away["carrot_plate_dist"])
        return nearness(to_object, to_plate, holding=judge.grasped_steps > 0, success=bool(judge.judgement.success))

    def _critic_state(self) -> Array:
        """The columns of observation.critic_columns, f32 [K]."""
        world, judge = self.world, self.world.judge
        steps, judged = judge.grasped_steps, judge.judgement
        grasp = [steps > 0, min(steps / HELD_STEPS, 1.0), judged.is_src_obj_grasped, judged.consecutive_grasp]
        size, qpos = self.assets.model(world.object_key).size, world.arm.qpos
        columns = critic_columns(world.object_pose, world.plate_pose[:3], world.gripper_pose, size, qpos, grasp)
        return np.concatenate([np.asarray(column, np.float32) for column in columns]).clip(-FAR, FAR)


@cache
def _import_sapien() -> None:
    """Choose the Vulkan driver before SAPIEN is imported; a driver it would refuse is an error here."""
    check_driver()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SAPIEN tells where it found its libraries
        import sapien  # noqa: F401
