"""One MetaWorld task in memory: its environment object and its renderer, which scenes hold in turns.

A MjModel with its meshes costs about 25 MB and its copy for drawing 40: a process keeps one world per task.
The episode of a scene that does not hold its world is a `Snapshot` of a few kilobytes. Imports MuJoCo, so only `Scene`
imports this file.
"""

from __future__ import annotations

import copy
import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import mujoco
import numpy as np
from metaworld import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

from rlinf.simulators.contract import Array
from rlinf.simulators.metaworld.renderer import CAMERA, Renderer, canvas_for, close_canvases
from rlinf.simulators.metaworld.scene import Scene
from rlinf.simulators.metaworld.suite import Options
from rlinf.simulators.metaworld.tasks import all_tasks

SETTLE_STEPS = 16  # zero actions after a reset, before the policy sees anything
CAMERA_POS = (0.75, 0.075, 0.7)  # where the published policies saw it from
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
STARTS_KEPT = 64  # remembered per task: members of a group start from the same one


@dataclass(frozen=True)
class Snapshot:
    """A saved episode: physics state, what a layout writes into the model, and the env's own Python attributes."""

    state: Array
    body_pos: Array
    site_pos: Array
    attributes: dict[str, Any]


class TaskWorld:
    """Physics and renderer of one task, held by one scene at a time."""

    def __init__(self, task: str, options: Options) -> None:
        self.task, self.options = task, options
        self.number = all_tasks().index(task)
        # MetaWorld has no public way to set a layout or to ask for the goal: what it calls private is used throughout
        self.env: Any = ALL_V3_ENVIRONMENTS[task]()
        self.env._set_task_called = True
        self.env._partially_observable = False  # the goal is part of the 39-d observation, as experts expect
        self.env.__dict__.pop("sawyer_observation_space", None)  # cached for the other observability
        self.model, self.data = self.env.model, self.env.data
        self.model.cam_pos[CAMERA] = CAMERA_POS
        self.holder: Scene | None = None  # whose episode is in it
        self.policy = cast(Any, ENV_POLICY_MAP[task])()
        self._renderer: Renderer | None = None  # made when the first image is asked for
        self._start = lru_cache(STARTS_KEPT)(self._play_start)

    def reset(self, layout: int) -> None:
        """Start the episode of a layout seed: bit-equal wherever and after whatever it is called."""
        self.load(self._start(layout))

    def _play_start(self, layout: int) -> Snapshot:
        """Play the start of an episode until it has settled."""
        env = self.env
        self._place(layout)
        # The published reset runs reset_model twice; only the second counts, and it differs from a single one just by
        # finding the layout already in the model, where _place has put it.
        mujoco.mj_resetData(self.model, self.data)
        with _patched(env, _reset_hand=self._reset_hand):
            obs = env.reset_model()
        env._prev_obs = obs[:18].copy()
        for _ in range(SETTLE_STEPS):
            self.step(np.zeros(4, np.float32))
        return self.save()

    def step(self, action: Array) -> tuple[bool, float]:
        """One control step; returns MetaWorld's success flag and its own shaped reward, 0 to 10."""
        self.env.curr_path_length = 0  # its own 500-step limit counts settling steps; ours is max_episode_steps
        _, reward, *_, info = self.env.step(action)
        return bool(info["success"]), float(reward)

    @property
    def obs(self) -> Array:
        """The 39-d observation after the last step."""
        return self.env._last_stable_obs

    def save(self) -> Snapshot:
        """A snapshot of the running episode."""
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, self.data, state, _STATE)
        kept = {k: copy.copy(v) for k, v in vars(self.env).items() if _belongs_to_episode(v)}
        return Snapshot(state, self.model.body_pos.copy(), self.model.site_pos.copy(), kept)

    def load(self, snapshot: Snapshot) -> None:
        """Continue a saved episode."""
        self.model.body_pos[:], self.model.site_pos[:] = snapshot.body_pos, snapshot.site_pos
        vars(self.env).update({k: copy.copy(v) for k, v in snapshot.attributes.items()})
        mujoco.mj_setState(self.model, self.data, snapshot.state, _STATE)
        mujoco.mj_forward(self.model, self.data)  # positions for camera and expert
        mujoco.mj_setState(self.model, self.data, snapshot.state, _STATE)  # forward moved the solver's warm start

    def draw(self) -> Callable[[], Array]:
        """Draw the camera image; the function returns it, u8 [size, size, 3]."""
        if self._renderer is None:
            canvas = canvas_for(self.options, self.model.vis)
            self._renderer = Renderer(self.model, self.options, canvas)
        return self._renderer.draw(self.data)

    def close(self) -> None:
        """Free what is drawn with, and the model."""
        if self._renderer is not None:
            self._renderer.close()
        self.env.close()

    def _place(self, layout: int) -> None:
        """Draw the layout from (task, seed) and write it into the model, without moving the hand.

        Several tasks redraw until object and goal are apart, so the draws come from a generator, then the last is kept.
        """
        env, space = self.env, self.env._random_reset_space
        rng = np.random.default_rng([self.number, layout])
        drawn = []

        def draw() -> Array:
            drawn.append(rng.uniform(space.low, space.high))
            return drawn[-1]

        def stay(steps: int = 0) -> None:
            env.init_tcp = env.tcp_center

        with _patched(env, _get_state_rand_vec=draw, _reset_hand=stay):
            env.reset_model()
        env._freeze_rand_vec, env._last_rand_vec = True, drawn[-1]

    def _reset_hand(self, steps: int = 50) -> None:
        """Move the hand to its start as the env's own method does, in one call: nothing else changes meanwhile."""
        env, mocap = self.env, self.model.body_mocapid[self.data.body("mocap").id]
        self.data.mocap_pos[mocap] = env.hand_init_pos
        self.data.mocap_quat[mocap] = (1, 0, 1, 0)
        self.data.ctrl[:] = (-1, 1)
        mujoco.mj_step(self.model, self.data, nstep=steps * env.frame_skip)
        mujoco.mj_rnePostConstraint(self.model, self.data)
        env.init_tcp = env.tcp_center


class TaskWorlds:
    """The worlds of this process: as many as its scenes need; the least recently used is freed first."""

    def __init__(self) -> None:
        self._worlds: OrderedDict[tuple[str, Options], TaskWorld] = OrderedDict()
        self.num_scenes = 0
        self.num_built = 0  # since the process began

    def numbers(self) -> list[int]:
        """Numbers of the tasks in memory, the least recently used first."""
        return [world.number for world in self._worlds.values()]

    def get(self, task: str, options: Options) -> TaskWorld:
        """The world of a task, built when it is not in memory."""
        key = (task, options)
        if key not in self._worlds:
            limit = options.max_loaded_tasks or max(4, self.num_scenes)
            while len(self._worlds) >= limit:
                _, oldest = self._worlds.popitem(last=False)
                if oldest.holder is not None:
                    oldest.holder.save_and_leave()
                oldest.close()
            self._worlds[key] = TaskWorld(task, options)
            self._worlds[key].reset(0)  # defines every attribute an episode may bring along
            self.num_built += 1
            ctypes.CDLL(None).malloc_trim(0)  # what the compiler of the model used: as much again as the model
        self._worlds.move_to_end(key)
        return self._worlds[key]

    def clear(self) -> None:
        """Free every world."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
        close_canvases()


WORLDS = TaskWorlds()


@contextmanager
def _patched(env: Any, **methods: Any) -> Iterator[None]:
    """Replace methods of one env object for a moment."""
    vars(env).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(env)[name]


def _belongs_to_episode(value: Any) -> bool:
    """Plain values and arrays; not the model, nor arrays that look into MuJoCo's memory (those follow the state)."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return value.base is None
    return value is None or isinstance(value, bool | int | float | str | np.generic)
