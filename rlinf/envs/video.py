"""Videos, written frame by frame: a tiled grid with captions, never more than one grid in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.envs.config import VideoConfig
from rlinf.errors import UserError

# 3x5 letters: five rows of three bits, as octal digits
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.:/_=+%"
_ROWS = (
    "2575565656344436555674647746443455355755722271115255655444475775565555255526564425563656553421672222"
    "5555755522557755525555222712477555726227612476121655711746163465271222252522531600700000020202011244"
    "00007070700272051245"
)
_GLYPHS = {letter: _ROWS[5 * i : 5 * i + 5] for i, letter in enumerate(_LETTERS)}
MIN_TILE = 128  # pixels: smaller images are enlarged so that captions can be read


class VideoRecorder:
    """Streams `<video_base_dir>/seed_<seed>/<count>.mp4`; a new file begins after each `flush`."""

    def __init__(self, cfg: VideoConfig, *, seed: int, control_hz: float) -> None:
        self.max_envs = cfg.max_envs
        self._captions_wanted = cfg.info_on_video
        self._fps = cfg.fps or max(1, round(control_hz))
        self._folder = Path(cfg.video_base_dir) / f"seed_{seed}"
        self._count = 0
        self._container: Any = None
        self._stream: Any = None
        self._tiles: list[np.ndarray] = []
        self.path: Path | None = None  # the file being written, or the last one

    def write(self, frames: Sequence[np.ndarray | None], captions: Sequence[Sequence[str]]) -> None:
        """One moment: an image u8 [H, W, 3] per env with its caption lines; None keeps an env's last image."""
        if not self._tiles:
            blank = np.zeros_like(enlarge(next(f for f in frames if f is not None)))
            self._tiles = [blank for _ in frames]
        for i, frame in enumerate(frames):
            if frame is not None:
                self._tiles[i] = draw_lines(enlarge(frame), captions[i] if self._captions_wanted else ())
        self._encode(tile(self._tiles))

    def flush(self) -> None:
        """Finish the file."""
        if self._container is not None:
            for packet in self._stream.encode():
                self._container.mux(packet)
            self._container.close()
            assert self.path is not None
            self.path.with_suffix(".part.mp4").rename(self.path)
            self._container, self._stream, self._tiles = None, None, []

    def _encode(self, image: np.ndarray) -> None:
        av = _import_av()
        if self._container is None:
            self._open(av, image.shape[1], image.shape[0])
        for packet in self._stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
            self._container.mux(packet)

    def _open(self, av: Any, width: int, height: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        while (self._folder / f"{self._count}.mp4").exists():
            self._count += 1
        self.path = self._folder / f"{self._count}.mp4"
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        self._container = av.open(str(self.path.with_suffix(".part.mp4")), "w", format="mp4")
        self._stream = self._container.add_stream(codec, rate=self._fps)
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self._stream.codec_context.thread_count = 1


def tile(images: Sequence[np.ndarray]) -> np.ndarray:
    """A grid of equal images, int(sqrt(n)) rows, padded to even sides as video codecs want."""
    rows = max(1, math.isqrt(len(images)))
    columns = -(-len(images) // rows)
    height, width = images[0].shape[:2]
    grid = np.zeros((height * rows + height * rows % 2, width * columns + width * columns % 2, 3), np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * height, i % columns * width
        grid[y : y + height, x : x + width] = image
    return grid


def enlarge(image: np.ndarray) -> np.ndarray:
    """A small image by a whole factor, to at least MIN_TILE pixels."""
    factor = -(-MIN_TILE // min(image.shape[:2]))
    return image.repeat(factor, 0).repeat(factor, 1) if factor > 1 else image


def draw_lines(image: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """A copy of the image with lines of capitals on a darkened band at its top; what does not fit is cut."""
    image = image.copy()
    scale = max(1, image.shape[1] // 128)
    if lines:
        image[: (6 * len(lines) + 1) * scale] //= 3
    for n, line in enumerate(lines):
        for i, character in enumerate(line.upper()):
            bits = _GLYPHS.get(character)
            y, x = (6 * n + 1) * scale, (4 * i + 1) * scale
            if bits is None or x + 3 * scale > image.shape[1]:
                continue
            mask = np.array([[int(row) >> (2 - c) & 1 for c in range(3)] for row in bits], bool)
            mask = mask.repeat(scale, 0).repeat(scale, 1)
            region = image[y : y + 5 * scale, x : x + 3 * scale]
            region[mask[: len(region)]] = 255
    return image


def _import_av() -> Any:
    try:
        import av
    except ModuleNotFoundError:
        raise UserError("video_cfg.save_video=true needs PyAV; install it with: pip install 'rlinf[video]'") from None
    return av
