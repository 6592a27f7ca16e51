"""Draws what the cameras of MetaWorld tasks see, several images before any is fetched. Imports MuJoCo."""

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
MAX_GEOMS = 1000  # a task has about 40
SHEET_PIXELS = 2048  # side of a framebuffer for several images
FONT = mujoco.mjtFontScale.mjFONTSCALE_150
SHARED_BUFFERS = (  # what a task's MjrContext takes from its canvas
    *("offWidth", "offHeight", "offSamples", "offFBO", "offFBO_r", "offColor", "offColor_r"),
    *("offDepthStencil", "offDepthStencil_r", "shadowSize", "shadowFBO", "shadowTex"),
)


class Sheet:
    """Images drawn side by side on one framebuffer: fetched together, when the first is asked for."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas, self.count = canvas, 0
        self.pixels: Array | None = None

    def image(self, tile: int) -> Array:
        """The camera image u8 [size, size, 3]; corner2 hangs upside-down, and only rows are already reversed."""
        if self.pixels is None:
            self.pixels = self.canvas.read(self.count)
        size, (row, column) = self.canvas.size, divmod(tile, self.canvas.across)
        return self.pixels[row * size : (row + 1) * size, column * size : (column + 1) * size][:, ::-1]


class Canvas:
    """The GL context, framebuffers and shadow map with which a process draws all its tasks: about 100 MB in all.

    A read waits for the process's next turn on the GPU. So every image is drawn in the same place, whatever was drawn
    before, then copied to its place on a sheet; and a sheet, of any tasks, is read at once.
    """

    def __init__(self, options: Options, vis: mujoco.MjVisual, across: int | None = None) -> None:
        """`vis` is MuJoCo's description of the quality; `across` images make a row of the sheet, and as many rows a
        sheet; None: one where the CPU draws and nothing is waited for."""
        self.size, fast = options.size, options.render == "fast"
        self._gl = mujoco.GLContext(self.size, self.size)
        self._gl.make_current()
        self.across = across or (1 if draws_in_software() else max(1, min(8, SHEET_PIXELS // self.size)))
        width, height = max(self.size, vis.global_.offwidth), max(self.size, vis.global_.offheight)
        samples, shadows = (0, 0) if fast else (vis.quality.offsamples, vis.quality.shadowsize)
        self._buffers = _buffers(width, height, samples, shadows)
        self._sheet_buffer = _buffers(self.across * self.size, self.across * self.size)
        self._own: dict[mujoco.MjrContext, dict[str, int]] = {}  # the buffers a context was made with
        self._sheet = Sheet(self)

    def context(self, model: mujoco.MjModel) -> mujoco.MjrContext:
        """Upload the meshes and textures of a task; it draws on the buffers of this canvas."""
        self._gl.make_current()
        buffer, quality = model.vis.global_, model.vis.quality
        kept = buffer.offwidth, buffer.offheight, quality.offsamples, quality.shadowsize
        buffer.offwidth, buffer.offheight, quality.offsamples, quality.shadowsize = 1, 1, 0, 0  # MuJoCo insists on some
        context = mujoco.MjrContext(model, FONT)
        buffer.offwidth, buffer.offheight, quality.offsamples, quality.shadowsize = kept
        self._own[context] = {name: getattr(context, name) for name in SHARED_BUFFERS}
        for name in SHARED_BUFFERS:
            setattr(context, name, getattr(self._buffers, name))
        return context

    def free(self, context: mujoco.MjrContext) -> None:
        """Free the meshes and textures of a task; the buffers stay."""
        self._gl.make_current()
        for name, value in self._own.pop(context).items():
            setattr(context, name, value)
        context.free()

    def draw(self, scene: mujoco.MjvScene, context: mujoco.MjrContext) -> Callable[[], Array]:
        """Draw a scene on the next free place of the sheet; the function returns the image, now or later."""
        if self._sheet.pixels is not None or self._sheet.count == self.across**2:
            self._finish()
        sheet, tile = self._sheet, self._sheet.count
        sheet.count += 1
        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        mujoco.mjr_render(mujoco.MjrRect(0, 0, self.size, self.size), scene, context)
        self._copy_to_sheet(tile)
        return partial(sheet.image, tile)

    def read(self, count: int) -> Array:
        """The first `count` images, u8 [rows * size, columns * size, 3] from the bottom up."""
        rows, columns = -(-count // self.across), min(count, self.across)
        pixels = np.empty((rows * self.size, columns * self.size, 3), np.uint8)
        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._sheet_buffer)
        mujoco.mjr_readPixels(pixels, None, mujoco.MjrRect(0, 0, *pixels.shape[1::-1]), self._sheet_buffer)
        return pixels

    def close(self) -> None:
        """Fetch what was drawn and free the GL context."""
        self._finish()
        self._gl.make_current()
        self._buffers.free()
        self._sheet_buffer.free()
        self._gl.free()

    def _copy_to_sheet(self, tile: int) -> None:
        """Copy the image just drawn, the mean of its samples where there are several, without waiting for the GPU."""
        from OpenGL import GL  # which asks for a back end when it is imported

        row, column = divmod(tile, self.across)
        x, y, size = column * self.size, row * self.size, self.size
        GL.glBindFramebuffer(GL.GL_READ_FRAMEBUFFER, self._buffers.offFBO)
        GL.glBindFramebuffer(GL.GL_DRAW_FRAMEBUFFER, self._sheet_buffer.offFBO)
        GL.glReadBuffer(GL.GL_COLOR_ATTACHMENT0)
        GL.glDrawBuffer(GL.GL_COLOR_ATTACHMENT0)
        GL.glBlitFramebuffer(0, 0, size, size, x, y, x + size, y + size, GL.GL_COLOR_BUFFER_BIT, GL.GL_NEAREST)
        GL.glFlush()  # the GPU draws while this process simulates the next scene

    def _finish(self) -> None:
        """Fetch the images of this sheet and begin another."""
        if self._sheet.count:
            self._sheet.image(0)
        self._sheet = Sheet(self)


_canvases: dict[tuple[object, ...], Canvas] = {}  # of this process, by quality


def canvas_for(options: Options, vis: mujoco.MjVisual) -> Canvas:
    """The canvas of this process for images of this size and quality."""
    kept, quality = vis.global_, vis.quality
    key = (options.size, options.render, kept.offwidth, kept.offheight, quality.offsamples, quality.shadowsize)
    if key not in _canvases:
        _canvases[key] = Canvas(options, vis)
    return _canvases[key]


def close_canvases() -> None:
    """Free the GL contexts of this process, after its renderers."""
    for canvas in _canvases.values():
        canvas.close()
    _canvases.clear()


class Renderer:
    """The camera of one task, drawing on a canvas."""

    def __init__(self, model: mujoco.MjModel, options: Options, canvas: Canvas) -> None:
        self._canvas = canvas
        self._model = decimated(model) if options.decimated else model
        self._scene = mujoco.MjvScene(self._model, maxgeom=MAX_GEOMS)
        if options.render == "fast":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._camera, self._visible = mujoco.MjvCamera(), mujoco.MjvOption()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, CAMERA
        self._context = canvas.context(self._model)

    def draw(self, data: mujoco.MjData) -> Callable[[], Array]:
        """Draw what the camera sees; the function returns it, now or later."""
        mujoco.mjv_updateScene(
            self._model, data, self._visible, None, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        return self._canvas.draw(self._scene, self._context)

    def close(self) -> None:
        """Free the meshes and textures."""
        self._canvas.free(self._context)


def _buffers(width: int, height: int, samples: int = 0, shadows: int = 0) -> mujoco.MjrContext:
    """A framebuffer, with several samples per pixel and a shadow map of `shadows` pixels a side where asked for."""
    blank = mujoco.MjModel.from_xml_string("<mujoco/>")
    buffer, quality = blank.vis.global_, blank.vis.quality
    buffer.offwidth, buffer.offheight, quality.offsamples, quality.shadowsize = width, height, samples, shadows
    return mujoco.MjrContext(blank, FONT)


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
