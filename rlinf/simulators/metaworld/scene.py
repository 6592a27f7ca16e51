"""One MetaWorld episode. Scenes of a process that play the same task take turns in one `TaskWorld`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlinf.simulators.contract import TASK_STRIDE, Array, ReplayScene, SceneObservation
from rlinf.simulators.metaworld.suite import Options
from rlinf.simulators.metaworld.tasks import all_tasks, task_table
from rlinf.simulators.opengl import choose_backend

if TYPE_CHECKING:
    from rlinf.simulators.metaworld.world import Snapshot, TaskWorld

SHAPED_MOST = 10.0  # MetaWorld's shaped reward where a task is solved


class Scene(ReplayScene):
    """One episode; it holds its task's world while it is used, and is a `Snapshot` while another scene holds it."""

    def __init__(self, options: Options) -> None:
        choose_backend(options.gl)  # before MuJoCo is imported
        from rlinf.simulators.metaworld.world import WORLDS

        self.options, self._worlds = options, WORLDS
        self._worlds.num_scenes += 1
        self._world: TaskWorld | None = None  # where this scene played last
        self._saved: Snapshot | None = None  # the episode, while another scene holds that world
        self._filmed: Array | None = None  # the image of the last step, where a video shows it

    def start(self, reset_id: int) -> None:
        """Build the layout of the id and let it settle."""
        number, layout = divmod(reset_id, TASK_STRIDE)
        self._task = all_tasks()[number]
        self._leave()
        self._saved = self._filmed = None
        self.world().reset(layout)

    def task(self) -> str:
        return self._task

    def world(self) -> TaskWorld:
        """The task's world with this scene's episode in it."""
        if self._world is not None and self._world.holder is self:
            return self._world
        self._world = self._worlds.get(self._task, self.options)
        if self._world.holder is not None:
            self._world.holder.save_and_leave()
        if self._saved is not None:
            self._world.load(self._saved)
        self._world.holder = self
        return self._world

    def save_and_leave(self) -> None:
        """Save the episode and leave the world to another scene."""
        assert self._world is not None
        self._saved = self._world.save()
        self._leave()

    def step(self, action: Array) -> tuple[float, bool, bool]:
        """The reward level is MetaWorld's success flag, and where asked a share of its shaped reward."""
        self._filmed = None
        success, shaped = self.world().step(action)
        level = success + self.options.shaped_reward * min(max(shaped / SHAPED_MOST, 0.0), 1.0)
        return level, success, False

    def frame(self) -> Array:
        """The camera image u8 [size, size, 3]."""
        self._filmed = self.world().draw()()
        return self._filmed

    def observe(self) -> SceneObservation:
        """The camera, hand position and gripper opening, the sentence, and the full state for a critic."""
        world = self.world()
        return {
            "images": world.draw() if self._filmed is None else self._filmed,
            "wrist_images": None,
            "states": world.obs[:4].astype(np.float32),
            "task_description": task_table()["descriptions"][self._task],
            "critic_state": self._critic_state(world),
        }

    def _critic_state(self, world: TaskWorld) -> Array:
        """Everything MetaWorld tells of its state, f32 [39], and where asked which task it is, [50]."""
        state = world.obs.astype(np.float32)
        if not self.options.critic_task:
            return state
        return np.concatenate((state, np.array([task == self._task for task in all_tasks()], np.float32)))

    def close(self) -> None:
        """Leave the world; it stays in memory for other scenes, and the last scene frees all worlds."""
        self._leave()
        self._worlds.num_scenes -= 1
        if self._worlds.num_scenes == 0:
            self._worlds.clear()

    def _leave(self) -> None:
        """Hold the world no longer."""
        if self._world is not None and self._world.holder is self:
            self._world.holder = None


def loaded_tasks() -> tuple[list[int], int]:
    """Numbers of the tasks that this process has in memory, and how many it has built since it began."""
    from rlinf.simulators.metaworld.world import WORLDS

    return WORLDS.numbers(), WORLDS.num_built
