"""Frames of a video file by their time, and whether the file has those that a dataset needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np

from rlinf.errors import UserError

Array = np.ndarray


class VideoFile:
    """One video file: which frames it has, and any of them decoded.

    Example: `VideoFile(path).decode([0, 512])` -> two images u8 [H, W, 3]
    """

    pts: Array  # i64 [n], sorted: when each frame is shown, in ticks
    keyframes: Array  # i64 [k], sorted: ticks of frames that decoding can start from

    def __init__(self, path: Path) -> None:
        """Read the list of frames, without decoding them; raises ValueError saying what is wrong with the file."""
        self.path = path
        try:
            with av.open(str(path)) as container:
                if not container.streams.video:
                    raise ValueError("cannot be read as a video: it has no video stream")
                stream = container.streams.video[0]
                self.size = stream.height, stream.width
                assert stream.time_base is not None
                self.seconds_per_tick = float(stream.time_base)
                packets = [(p.pts, p.is_keyframe) for p in container.demux(stream) if p.pts is not None]
        except (av.FFmpegError, OSError) as error:
            raise ValueError(f"cannot be read as a video: {_reason(error)}") from error
        if not packets:
            raise ValueError("cannot be read as a video: it has no frames")
        self.pts = np.sort(np.array([pts for pts, _ in packets], np.int64))
        self.keyframes = np.sort(np.array([pts for pts, is_key in packets if is_key] or [packets[0][0]], np.int64))

    def nearest(self, seconds: Array) -> tuple[Array, Array]:
        """The ticks i64 [m] of the frames nearest to those times, and the distances f64 [m] in seconds."""
        ticks = seconds / self.seconds_per_tick
        after = np.clip(np.searchsorted(self.pts, ticks), 0, len(self.pts) - 1)
        before = np.maximum(after - 1, 0)
        closer = np.abs(self.pts[before] - ticks) < np.abs(self.pts[after] - ticks)
        found = self.pts[np.where(closer, before, after)]
        return found, np.abs(found - ticks) * self.seconds_per_tick

    def decode(self, wanted: Sequence[int]) -> list[Array]:
        """The frames at those ticks, u8 [H, W, 3] each, in that order; the file is read forwards, once."""
        found: dict[int, Array] = {}
        try:
            with av.open(str(self.path)) as container:
                stream = container.streams.video[0]
                shown, frames = -1, None
                for tick in sorted(set(map(int, wanted))):
                    start = int(self.keyframes[max(int(np.searchsorted(self.keyframes, tick, "right")) - 1, 0)])
                    if frames is None or start > shown:  # nothing before the key frame is needed
                        container.seek(start, stream=stream, backward=True)
                        frames = container.decode(stream)
                    for frame in frames:
                        shown = frame.pts if frame.pts is not None else shown
                        if shown >= tick:
                            found[shown] = frame.to_ndarray(format="rgb24")
                            break
        except (av.FFmpegError, OSError) as error:
            raise UserError(f"video {self.path} cannot be decoded: {_reason(error)}") from error
        lacking = [tick for tick in map(int, wanted) if tick not in found]
        if lacking:
            raise UserError(f"video {self.path} cannot be decoded at {lacking[0] * self.seconds_per_tick:.3f} s")
        return [found[int(tick)] for tick in wanted]


def _reason(error: OSError | av.FFmpegError) -> str:
    return str(error.strerror or error)
