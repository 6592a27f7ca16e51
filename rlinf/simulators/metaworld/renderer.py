"""Draws what the camera of a MetaWorld task sees, several images before any is fetched. Imports MuJoCo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import mujoco
import numpy as np

from rlinf.simulators.contract import Array
from rlinf.simulators.metaworld.suite import Options
from rlinf.simulators.opengl import draws_in_software

CAMERA = 2  # corner2
DECIMATE_CELLS, DECIMATE_ABOVE = 20, 300  # cells along a mesh's longest side; meshes of more triangles are thinned
MAX_GEOMS = 10_000
SHEET_PIXELS = 1024  # side of a framebuffer for several images


class Sheet:
    """Images drawn side by side on one framebuffer: fetched together, when the first is asked for."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.count = renderer, 0
        self.pixels: Array | None = None

    def image(self, tile: int) -> Array:
        """The camera image u8 [size, size, 3]; corner2 hangs upside-down, and only rows are already reversed."""
        if self.pixels is None:
            self.pixels = self.renderer.read(self.count)
        size, (row, column) = self.renderer.size, divmod(tile, self.renderer.across)
        return self.pixels[row * size : (row + 1) * size, column * size : (column + 1) * size][:, ::-1]


class Renderer:
    """The camera of one task. A read waits until the GPU has finished what the policy gave it: read many at once."""

    def __init__(self, model: mujoco.MjModel, options: Options, across: int | None = None) -> None:
        """`across` images side by side, and as many rows; None: one where the CPU draws and nothing is waited for."""
        self.size = size = options.size
        self._gl = mujoco.GLContext(size, size)
        self._gl.make_current()
        self.across = across or (1 if draws_in_software() else max(1, min(8, SHEET_PIXELS // size)))
        buffer, side = model.vis.global_, self.across * size
        buffer.offwidth, buffer.offheight = max(side, buffer.offwidth), max(side, buffer.offheight)
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
