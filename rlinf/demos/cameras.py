"""The pictures of one camera of a dataset: compressed images in its tables, or frames of its video files."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
from PIL import Image

from rlinf.demos.defects import Defects
from rlinf.demos.features import image_size
from rlinf.demos.frames import Frames
from rlinf.demos.layout import Layout
from rlinf.envs.routing import usable_cores

if TYPE_CHECKING:
    from rlinf.demos.video_file import VideoFile  # the package that decodes videos is optional

Array = np.ndarray
BLOCK = 16  # pictures that a thread decodes at a time


@cache
def _threads() -> ThreadPoolExecutor:
    """The threads that decode, one for each core; they end with the program."""
    return ThreadPoolExecutor(usable_cores(), "decode")


class Camera(Protocol):
    """One camera of a dataset; decoders release Python's lock, so all cores help."""

    def decode(self, rows: Sequence[int]) -> list[Array]:
        """The pictures of those frames of the dataset, u8 [H, W, 3] each."""


class ImageCamera:
    """Pictures that lie in the dataset's tables."""

    def __init__(self, images: pa.ChunkedArray) -> None:
        self.images = images

    def decode(self, rows: Sequence[int]) -> list[Array]:
        """As Camera.decode."""

        def picture(row: int) -> Array:
            return np.asarray(Image.open(io.BytesIO(self.images[row].as_py())).convert("RGB"))

        def some(first: int) -> list[Array]:
            return [picture(row) for row in rows[first : first + BLOCK]]

        return list(itertools.chain.from_iterable(_threads().map(some, range(0, len(rows), BLOCK))))


class VideoCamera:
    """Pictures that lie in video files."""

    def __init__(self, files: Sequence[VideoFile], file_of: Array, tick_of: Array) -> None:
        self.files, self.file_of, self.tick_of = files, file_of, tick_of  # both i64 [M]

    def decode(self, rows: Sequence[int]) -> list[Array]:
        """As Camera.decode; every file is opened once."""
        places: dict[int, list[int]] = {}  # positions in `rows` by file
        for position, row in enumerate(rows):
            places.setdefault(int(self.file_of[row]), []).append(position)

        def of_file(item: tuple[int, list[int]]) -> list[Array]:
            number, positions = item
            return self.files[number].decode([int(self.tick_of[rows[p]]) for p in positions])

        decoded = list(_threads().map(of_file, places.items()))
        pictures = {p: x for at, xs in zip(places.values(), decoded, strict=True) for p, x in zip(at, xs, strict=True)}
        return [pictures[p] for p in range(len(rows))]


def open_cameras(layout: Layout, names: Sequence[str], frames: Frames) -> dict[str, Camera]:
    """Every camera by name; raises UserError with a line for each video that lacks a frame."""
    defects = Defects(layout.folder)
    cameras: dict[str, Camera] = {}
    for name in names:
        if name in frames.images:
            cameras[name] = ImageCamera(frames.images[name])
        elif (camera := _video_camera(layout, name, frames, defects)) is not None:
            cameras[name] = camera
    defects.refuse()
    return cameras


def _video_camera(layout: Layout, name: str, frames: Frames, defects: Defects) -> VideoCamera | None:
    """Find the video frame of every frame of the dataset, by its time."""
    if frames.timestamp is None:
        defects.add("meta/info.json", f"has no feature 'timestamp', by which the frames of video {name!r} are found")
        return None
    files: dict[Path, VideoFile | None] = {}
    file_of = np.zeros(len(frames.episode), np.int64)
    tick_of = np.zeros(len(frames.episode), np.int64)
    first = 0
    for episode in layout.episodes:
        span, rows = episode.videos[name], slice(first, first + episode.length)
        first += episode.length
        if span.file not in files:
            files[span.file] = _open_video(span.file, image_size(name, layout.features[name]), defects)
        if (video := files[span.file]) is None:
            continue
        seconds = span.start_s + frames.timestamp[rows]
        tick_of[rows], distance = video.nearest(seconds)
        file_of[rows] = list(files).index(span.file)
        if (far := distance > 0.5 / layout.fps).any():
            at, end = seconds[np.argmax(far)], video.pts[-1] * video.seconds_per_tick
            rule = f"its last one is at {end:.3f} s" if at > end else f"none lies within {0.5 / layout.fps:.3f} s"
            defects.add(span.file, f"episode {episode.number} needs a frame at {at:.3f} s, but {rule}")
    if defects.lines:
        return None
    return VideoCamera([video for video in files.values() if video is not None], file_of, tick_of)


def _open_video(path: Path, size: tuple[int, int], defects: Defects) -> VideoFile | None:
    """The file, with its first frame decoded to see that it can be; None and a defect otherwise."""
    from rlinf.demos.video_file import VideoFile

    if not path.is_file():
        defects.add(path, "is missing")
        return None
    try:
        video = VideoFile(path)
        if video.size != size:
            have, wanted = ("{} x {}".format(*s) for s in (video.size, size))
            raise ValueError(f"is {have} pixels, but meta/info.json says {wanted}")
        video.decode([int(video.pts[0])])
    except ValueError as error:
        defects.add(path, str(error))
        return None
    return video
