"""One MetaWorld task in memory: its environment object, its renderer, and the scenes that take turns on it.

A MjModel with its meshes costs tens of megabytes and a GL context over a hundred: a process keeps one stage per task.
A scene that is not on stage is a `Snapshot` of a few kilobytes. Imports MuJoCo, so only `Scene` imports this file.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mujoco
import numpy as np
from metaworld import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

from rlinf.simulators.contract import Array
from rlinf.simulators.metaworld import SETTLE_STEPS, Options, all_tasks
from rlinf.simulators.opengl import draws_in_software

CAMERA = 2  # corner2
CAMERA_POS = (0.75, 0.075, 0.7)  # where the published policies saw it from
DECIMATE_CELLS, DECIMATE_ABOVE = 20, 300
MAX_GEOMS = 10_000
SHEET_PIXELS = 1024  # side of a framebuffer for several images
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_SNAPSHOTS_KEPT = 64  # fresh episodes remembered per task: members of a group start from the same one


@dataclass(frozen=True)
class Snapshot:
    """An episode off stage: physics state, what a layout writes into the model, and the env's own Python attributes."""

    state: Array
    body_pos: Array
    site_pos: Array
    attributes: dict[str, Any]


class Stage:
    """One task: physics and renderer, used by one scene at a time."""

    def __init__(self, task: str, options: Options) -> None:
        self.task, self.options = task, options
        self.number = all_tasks().index(task)
        self.env: Any = ALL_V3_ENVIRONMENTS[task]()
        self.env._set_task_called = True
        self.env._partially_observable = False  # the goal is part of the 39-d observation, as experts expect
        self.env.__dict__.pop("sawyer_observation_space", None)  # cached for the other observability
        self.model, self.data = self.env.model, self.env.data
        self.model.cam_pos[CAMERA] = CAMERA_POS
        self.owner: Any = None
        self.policy = cast(Any, ENV_POLICY_MAP[task])()
        self._canvas: Canvas | None = None
        self._fresh: OrderedDict[int, Snapshot] = OrderedDict()

    def reset(self, layout: int) -> None:
        """Start the episode of a layout seed: bit-equal wherever and after whatever it is called."""
        known = self._fresh.get(layout)
        if known is not None:
            self.load(known)
            self._fresh.move_to_end(layout)
            return
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
        self._fresh[layout] = self.save()
        if len(self._fresh) > _SNAPSHOTS_KEPT:
            self._fresh.popitem(last=False)

    def step(self, action: Array) -> bool:
        """One control step; returns MetaWorld's success flag."""
        self.env.curr_path_length = 0  # its own 500-step limit counts settling steps; ours is max_episode_steps
        *_, info = self.env.step(action)
        return bool(info["success"])

    @property
    def obs(self) -> Array:
        """The 39-d observation after the last step."""
        return self.env._last_stable_obs

    def save(self) -> Snapshot:
        """Take the running episode off the stage."""
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, self.data, state, _STATE)
        kept = {k: copy.copy(v) for k, v in vars(self.env).items() if _belongs_to_episode(v)}
        return Snapshot(state, self.model.body_pos.copy(), self.model.site_pos.copy(), kept)

    def load(self, snapshot: Snapshot) -> None:
        """Put an episode on the stage."""
        self.model.body_pos[:], self.model.site_pos[:] = snapshot.body_pos, snapshot.site_pos
        vars(self.env).update({k: copy.copy(v) for k, v in snapshot.attributes.items()})
        mujoco.mj_setState(self.model, self.data, snapshot.state, _STATE)
        mujoco.mj_forward(self.model, self.data)  # positions for camera and expert
        mujoco.mj_setState(self.model, self.data, snapshot.state, _STATE)  # forward moved the solver's warm start

    def render(self) -> Array:
        """The camera image u8 [size, size, 3]."""
        return self.draw()()

    def draw(self) -> Callable[[], Array]:
        """Draw the camera image; the function returns it."""
        if self._canvas is None:
            self._canvas = Canvas(self.model, self.options)
        return self._canvas.draw(self.data)

    def close(self) -> None:
        """Free the GL context and the model."""
        if self._canvas is not None:
            self._canvas.close()
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
        """What the env's own method does, in one call: mocap target and controls do not change meanwhile."""
        env, mocap = self.env, self.model.body_mocapid[self.data.body("mocap").id]
        self.data.mocap_pos[mocap] = env.hand_init_pos
        self.data.mocap_quat[mocap] = (1, 0, 1, 0)
        self.data.ctrl[:] = (-1, 1)
        mujoco.mj_step(self.model, self.data, nstep=steps * env.frame_skip)
        mujoco.mj_rnePostConstraint(self.model, self.data)
        env.init_tcp = env.tcp_center


class Sheet:
    """Images drawn side by side on one framebuffer: fetched together, when the first is asked for."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas, self.count = canvas, 0
        self.pixels: Array | None = None

    def image(self, tile: int) -> Array:
        """The camera image u8 [size, size, 3]; corner2 hangs upside-down, so columns are reversed; rows came so."""
        if self.pixels is None:
            self.pixels = self.canvas.read(self.count)
        size, (row, column) = self.canvas.size, divmod(tile, self.canvas.across)
        return self.pixels[row * size : (row + 1) * size, column * size : (column + 1) * size][:, ::-1]


class Canvas:
    """The camera of one task. Each read waits for the GPU's next turn, which the policy may have: read many at once."""

    def __init__(self, model: mujoco.MjModel, options: Options, across: int | None = None) -> None:
        """`across` images side by side, and as many rows; None: one in software, where no turn is waited for."""
        self.size = size = options.size
        self._gl = mujoco.GLContext(size, size)
        self._gl.make_current()
        self.across = across or (1 if draws_in_software() else max(1, min(8, SHEET_PIXELS // size)))
        for field in ("offwidth", "offheight"):
            setattr(model.vis.global_, field, max(self.across * size, getattr(model.vis.global_, field)))
        if options.render == "fast":
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 256  # unused, but the default would reserve 64 MB
        self._model = decimated(model) if options.decimated else model
        self._scene = mujoco.MjvScene(self._model, maxgeom=MAX_GEOMS)
        if options.render == "fast":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._camera, self._visible = mujoco.MjvCamera(), mujoco.MjvOption()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, CAMERA
        self._context = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._sheet = Sheet(self)

    def draw(self, data: mujoco.MjData) -> Callable[[], Array]:
        """Draw what the camera sees; the function returns it, now or later."""
        if self._sheet.pixels is not None or self._sheet.count == self.across**2:
            self._finish()
        sheet, tile = self._sheet, self._sheet.count
        sheet.count += 1
        row, column = divmod(tile, self.across)
        mujoco.mjv_updateScene(
            self._model, data, self._visible, None, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        self._gl.make_current()
        mujoco.mjr_render(
            mujoco.MjrRect(column * self.size, row * self.size, self.size, self.size), self._scene, self._context
        )
        return partial(sheet.image, tile)

    def read(self, count: int) -> Array:
        """The first `count` images, u8 [rows * size, columns * size, 3] from the bottom up."""
        rows, columns = -(-count // self.across), min(count, self.across)
        pixels = np.empty((rows * self.size, columns * self.size, 3), np.uint8)
        self._gl.make_current()
        mujoco.mjr_readPixels(pixels, None, mujoco.MjrRect(0, 0, *pixels.shape[1::-1]), self._context)
        return pixels

    def close(self) -> None:
        """Fetch what was drawn and free the GL context."""
        self._finish()
        self._gl.make_current()
        self._context.free()
        self._gl.free()

    def _finish(self) -> None:
        """Fetch the images of this sheet and begin another."""
        if self._sheet.count:
            self._sheet.image(0)
        self._sheet = Sheet(self)


class Stages:
    """The stages of this process: as many tasks as its scenes need, the least recently used goes first."""

    def __init__(self) -> None:
        self._stages: OrderedDict[tuple[str, Options], Stage] = OrderedDict()
        self.num_scenes = 0

    def get(self, task: str, options: Options) -> Stage:
        """The stage of a task, built when it is not in memory."""
        key = (task, options)
        if key not in self._stages:
            limit = options.max_loaded_tasks or max(4, self.num_scenes)
            while len(self._stages) >= limit:
                _, oldest = self._stages.popitem(last=False)
                if oldest.owner is not None:
                    oldest.owner.leave_stage()
                oldest.close()
            self._stages[key] = Stage(task, options)
            self._stages[key].reset(0)  # defines every attribute an episode may bring along
        self._stages.move_to_end(key)
        return self._stages[key]

    def clear(self) -> None:
        """Free every task."""
        for stage in self._stages.values():
            stage.close()
        self._stages.clear()


STAGES = Stages()


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


def decimated(model: mujoco.MjModel) -> mujoco.MjModel:
    """A copy for drawing only: vertices of each large mesh are clustered on a grid and collapsed triangles dropped."""
    lite = copy.copy(model)
    for mesh in range(model.nmesh):
        first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        if count <= DECIMATE_ABOVE:
            continue
        start = int(model.mesh_vertadr[mesh])
        vertices = model.mesh_vert[start : start + int(model.mesh_vertnum[mesh])]
        low, span = vertices.min(0), max(float(np.ptp(vertices, axis=0).max()), 1e-9)
        cells = np.floor((vertices - low) / span * (DECIMATE_CELLS - 1e-3)).astype(np.int64)
        key = (cells[:, 0] * DECIMATE_CELLS + cells[:, 1]) * DECIMATE_CELLS + cells[:, 2]
        _, representative, cluster = np.unique(key, return_index=True, return_inverse=True)
        rows = slice(first, first + count)
        faces = representative[cluster.reshape(-1)[model.mesh_face[rows]]]
        whole = (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 0] != faces[:, 2])
        _, unique = np.unique(np.sort(faces[whole], axis=1), axis=0, return_index=True)
        keep = np.flatnonzero(whole)[np.sort(unique)]
        lite.mesh_face[first : first + len(keep)] = faces[keep]
        for field in (lite.mesh_facenormal, lite.mesh_facetexcoord):
            field[first : first + len(keep)] = field[rows][keep]
        lite.mesh_facenum[mesh] = len(keep)
    return lite
