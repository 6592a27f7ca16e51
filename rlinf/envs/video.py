"""Videos of several envs: frames tiled into a grid, with captions, written to an mp4 file as they come.

Captions, tiling and encoding are done by a thread, so that simulators do not wait for them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlinf.envs.config import VideoConfig
from rlinf.errors import UserError, install_line
from rlinf.simulators.tiles import MIN_TILE, grid_shape, shrink, shrinking

logger = logging.getLogger(__name__)
WAITING = 16  # frames of a grid that may wait for the thread before a simulator waits for it
LETTERS, LINE = 10, 11  # height of letters and distance between lines on a tile of 128 pixels; both grow with it


class VideoRecorder:
    """Writes `<video_base_dir>/seed_<seed>/<count>.mp4`; a new file begins after each `flush`.

    A file that cannot be written, as on a full disk, is given up with one warning: a video never ends a run.
    """

    def __init__(
        self, cfg: VideoConfig, *, seed: int = 0, control_hz: float, run_id: str = "", name: str | None = None
    ) -> None:
        """`run_id` is the comment of every file; a `name` gives `<video_base_dir>/<name>.mp4`, `<name>-2.mp4`, ..."""
        self._comment = f"rlinf run {run_id}" if run_id else ""
        self.max_envs = cfg.max_envs
        self._captions_wanted = cfg.info_on_video
        self._fps = cfg.fps or max(1, round(control_hz))
        self._name, self._folder = name, Path(cfg.video_base_dir)
        if name is None:
            self._folder /= f"seed_{seed}"
        self._count = 0
        self._container: Any = None
        self._stream: Any = None
        self._tiles: list[np.ndarray] = []
        self._begun = self._given_up = False  # of the file being written
        self._warned = False  # of any
        self.path: Path | None = None  # the file being written, or the last one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="video")
        self._waiting: deque[Future[None]] = deque()

    def write(self, frames: Sequence[np.ndarray | None], captions: Sequence[Sequence[str]]) -> None:
        """Add one frame: an image u8 [H, W, 3] per env with its caption lines; None keeps an env's last image."""
        _packages()  # where one is missing, the run is told, not the thread
        if not self._begun:
            self._begun = True
            self._try(self._choose_name)  # now: who asks for the path of this file may do so at once
        kept = [None if frame is None else frame.copy() for frame in frames]  # their memory is used again
        while len(self._waiting) >= WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._try, lambda: self._write(kept, captions)))

    def flush(self) -> None:
        """Finish the file; until then it is named `<count>.part.mp4`."""
        self._waiting.clear()
        self._thread.submit(self._try, self._finish).result()  # after all frames
        self._container, self._stream, self._tiles = None, None, []
        self._begun = self._given_up = False

    def _try(self, action: Callable[[], None]) -> None:
        """Do something with the file; if that fails the file is deleted, and nothing is tried until the next one."""
        if self._given_up:
            return
        try:
            action()
        except UserError:  # a package is missing
            raise
        except Exception as error:
            self._given_up = True
            if not self._warned:
                where = self.path or self._folder
                logger.warning("video %s cannot be written (%s); the run goes on without it", where, error)
            self._warned = True
            container, self._container = self._container, None
            with suppress(Exception):
                container.close()
            with suppress(OSError):
                if self.path is not None:
                    self.path.with_suffix(".part.mp4").unlink(missing_ok=True)

    def _write(self, frames: Sequence[np.ndarray | None], captions: Sequence[Sequence[str]]) -> None:
        if not self._tiles:
            blank = np.zeros_like(fit(next(f for f in frames if f is not None), len(frames)))
            self._tiles = [blank for _ in frames]
        for i, frame in enumerate(frames):
            if frame is not None:
                self._tiles[i] = draw_lines(fit(frame, len(frames)), captions[i] if self._captions_wanted else ())
        self._encode(tile(self._tiles))

    def _finish(self) -> None:
        if self._container is not None:
            for packet in self._stream.encode():
                self._container.mux(packet)
            self._container.close()
            assert self.path is not None
            self.path.with_suffix(".part.mp4").rename(self.path)

    def _encode(self, image: np.ndarray) -> None:
        """Add an image u8 [H, W, 3] to the file, which is begun where there is none."""
        av = _packages().av
        if self._container is None:
            self._open(av, image.shape[1], image.shape[0])
        for packet in self._stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
            self._container.mux(packet)

    def _file_name(self) -> str:
        """The name of the file that is begun next, unless it is taken."""
        if self._name is None:
            return f"{self._count}.mp4"
        return f"{self._name}-{self._count + 1}.mp4" if self._count else f"{self._name}.mp4"

    def _choose_name(self) -> None:
        """Take the next name that is free."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while (path := self._folder / self._file_name()).exists():
            self._count += 1
        self.path = path

    def _open(self, av: Any, width: int, height: int) -> None:
        """Begin the file."""
        assert self.path is not None
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        self._container = av.open(str(self.path.with_suffix(".part.mp4")), "w", format="mp4")
        self._container.metadata["comment"] = self._comment
        quick = {"preset": "veryfast"} if codec == "libx264" else {}
        self._stream = self._container.add_stream(
            codec, self._fps, options=quick, width=width, height=height, pix_fmt="yuv420p"
        )
        self._stream.codec_context.thread_count = 1


def tile(images: Sequence[np.ndarray]) -> np.ndarray:
    """A grid of equal images with int(sqrt(n)) rows, padded to even sides as video codecs want."""
    rows, columns = grid_shape(len(images))
    height, width = images[0].shape[:2]
    grid = np.zeros((height * rows + height * rows % 2, width * columns + width * columns % 2, 3), np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * height, i % columns * width
        grid[y : y + height, x : x + width] = image
    return grid


def fit(image: np.ndarray, count: int) -> np.ndarray:
    """The image at the size it has among `count` in a grid.

    It is enlarged by a whole factor where a side is below MIN_TILE pixels, and made smaller by one where the grid would
    be too wide.
    """
    shortest = min(image.shape[:2])
    if (larger := -(-MIN_TILE // shortest)) > 1:
        return image.repeat(larger, 0).repeat(larger, 1)
    return shrink(image, shrinking((image.shape[0], image.shape[1]), count))


def draw_lines(image: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """A copy of the image with white lines of text on a darkened band at its top; what does not fit is cut."""
    image = image.copy()
    if not lines:
        return image
    scale = max(1, image.shape[1] // MIN_TILE)
    band = image[: (LINE * len(lines) + 1) * scale]
    band //= 3
    for n, line in enumerate(lines):
        letters = _letters(line, scale, image.shape[1])[: max(0, len(band) - LINE * n * scale)]
        rows = band[LINE * n * scale :][: len(letters)]
        np.maximum(rows, letters[: len(rows)], out=rows)
    return image


@lru_cache(maxsize=256)  # a line stays for many frames; drawing it takes as long as encoding a tile
def _letters(line: str, scale: int, width: int) -> np.ndarray:
    """White letters on black: u8 [height of a line, width, 1]."""
    pillow = _packages()
    drawn = pillow.Image.new("L", (width, (LINE + 1) * scale))
    pillow.ImageDraw.Draw(drawn).text((scale, 0), line, font=_font(scale), fill=255)
    return np.asarray(drawn)[:, :, None]


@lru_cache(maxsize=8)
def _font(scale: int) -> Any:
    return _packages().ImageFont.load_default(LETTERS * scale)


def _packages() -> SimpleNamespace:
    """PyAV, and the modules of Pillow that draw captions."""
    try:
        import av
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError as error:
        raise UserError(
            f"video_cfg.save_video=true needs the Python package {error.name}: {install_line('video')}"
        ) from None
    return SimpleNamespace(av=av, Image=Image, ImageDraw=ImageDraw, ImageFont=ImageFont)
