"""Read a dataset in LeRobot's layout v3.0 or v2.1 as training batches.

Letters: M frames, B rows of a batch, H actions per sample, A action dims, S state dims, N wrist cameras.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlinf.data.noise import generator
from rlinf.data.types import Observation
from rlinf.demos.cameras import open_cameras
from rlinf.demos.features import image_size, map_features
from rlinf.demos.frames import read_frames
from rlinf.demos.layout import Layout, read_layout
from rlinf.errors import UserError
from rlinf.models.config import DataShape
from rlinf.progress import report
from rlinf.runtime.memory import host_bytes_available

Tensor = torch.Tensor
Pictures = dict[str, Tensor]  # by camera
SHARE = 4  # decoded images may take up to this part (a quarter) of the memory that is free
PIECE = 512  # frames decoded at a time
AHEAD = 4  # batches whose pictures are brought together before they are asked for


class Batch(NamedTuple):
    """Rows to learn from; tensors lie on the device that the dataset's numbers were brought to."""

    rows: Tensor  # i64 [B] numbers of the frames
    obs: Observation
    actions: Tensor  # f32 [B, H, A]
    is_target: Tensor  # bool [B, H]; False where the episode was over


class DemoDataset:
    """The frames of every episode, in order; the whole dataset is checked once, when it is opened.

    Example: `DemoDataset("data/demos").batch([0, 7], num_actions=5).actions` -> f32 [2, 5, A]
    """

    actions: Tensor  # f32 [M, A]
    states: Tensor | None  # f32 [M, S]
    privileged: Tensor | None  # f32 [M, K] what the simulator knew, for `sft.state_loss`

    def __init__(self, folder: Path | str, features: Mapping[str, str] | None = None) -> None:
        """`features` maps names of the dataset to inputs of the policy, where they are not the usual ones."""
        self.layout: Layout = read_layout(Path(folder))
        self.features = map_features(self.layout.features, features or {})
        self.cameras = list(self.features.cameras)
        frames = read_frames(self.layout, self.features)

        def columns(names: Sequence[str]) -> Tensor | None:
            return torch.from_numpy(np.concatenate([frames.numbers[n] for n in names], 1)) if names else None

        actions = columns(self.features.action)
        assert actions is not None
        self.actions = actions
        self.states, self.privileged = columns(self.features.state), columns(self.features.privileged)
        numbers = sorted(self.layout.tasks)
        self.tasks: list[str] = [self.layout.tasks[number] for number in numbers]
        self._task_of = np.searchsorted(numbers, frames.task_index)  # [M], positions in self.tasks
        self.num_episodes = len(self.layout.episodes)
        ends = np.cumsum([e.length for e in self.layout.episodes]) - 1
        self.last_frame = ends[frames.episode]  # i64 [M], of each frame's episode
        self._cameras = open_cameras(self.layout, self.cameras, frames)
        self._resize: Callable[[Tensor], Tensor] = lambda images: images
        self._kept: Pictures = {}  # u8 [M, H, W, 3] of every camera, once `keep` found that they fit
        self._bring(torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def shape(self) -> DataShape:
        """What it offers a policy."""
        states = 0 if self.states is None else self.states.shape[1]
        return DataShape(action_dim=self.actions.shape[1], state_dim=states, num_cameras=len(self.cameras))

    def describe(self) -> dict[str, Any]:
        """What a policy that imitates it should remember of it."""
        sizes = {name: list(image_size(name, self.layout.features[name])) for name in self.cameras}
        return {
            "layout": self.layout.version,
            "robot_type": self.layout.robot,
            "fps": self.layout.fps,
            "episodes": self.num_episodes,
            "frames": len(self),
            "cameras": sizes,
            "state": list(self.features.state),
            "action": list(self.features.action),
        }

    def use_cameras(self, count: int) -> None:
        """Read the first `count` cameras only."""
        self.cameras = self.cameras[:count]

    def keep(
        self,
        device: torch.device,
        resize: Callable[[Tensor], Tensor] = lambda images: images,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
    ) -> str:
        """Bring all numbers to `device`, and decode all images once where they fit: there, or in the host's memory.

        Kept images are resized, and pinned on the host of a GPU. Without limits a quarter of what is free may be taken.
        Returns where the images are, in words; those that fit nowhere are decoded batch by batch.
        """
        self._bring(device)
        self._resize, self._kept = resize, {}
        shapes = {name: resize(self._decode(name, [0])).shape[1:] for name in self.cameras}
        size, host, on_gpu = (
            sum(map(math.prod, shapes.values())) * len(self),
            torch.device("cpu"),
            device.type == "cuda",
        )
        if host_bytes is None:
            host_bytes = host_bytes_available() // SHARE
        if device_bytes is None:
            device_bytes = torch.cuda.mem_get_info(device)[0] // SHARE if on_gpu else host_bytes
        if size > max(device_bytes, host_bytes):
            return f"images, {size / 2**20:.0f} MB, are decoded batch by batch, ahead of their use"
        place = device if size <= device_bytes else host
        for number, (name, shape) in enumerate(shapes.items()):
            # Pinned: the device copies rows by itself, and nothing waits.
            kept = torch.empty(len(self), *shape, dtype=torch.uint8, device=place, pin_memory=on_gpu and place == host)
            for first in range(0, len(self), PIECE):
                rows = range(first, min(first + PIECE, len(self)))
                kept[first : rows.stop] = resize(self._decode(name, rows).to(device))
                report("decoding images", number * len(self) + rows.stop, len(shapes) * len(self))
            self._kept[name] = kept
        where = "in pinned memory" if place != device else "on the device" if on_gpu else "in memory"
        return f"images, {size / 2**20:.0f} MB, are decoded once and kept {where}"

    def _bring(self, device: torch.device) -> None:
        """Bring the numbers that batches are made of to a device; the dataset's own stay where they are."""
        actions, last_frame = self.actions.to(device), torch.from_numpy(self.last_frame).to(device)
        self._on_device = actions, last_frame, None if self.states is None else self.states.to(device)
        self._device = actions.device  # with its number, where `device` has none

    @property
    def needs_host(self) -> bool:
        """Whether the pictures of a batch are brought together by the host, which is better done ahead."""
        return any(name not in self._kept or self._kept[name].device != self._device for name in self.cameras)

    def pictures(self, rows: Sequence[int]) -> Pictures:
        """The images of those frames by camera, u8 [B, H, W, 3], as `batch` takes them; pinned for a GPU."""
        index, out = torch.tensor(rows), {}
        for name in self.cameras:
            if (kept := self._kept.get(name)) is None:
                found = self._decode(name, rows)
                out[name] = found.pin_memory() if self._device.type == "cuda" else found
            else:
                at = index.to(kept.device, non_blocking=True)
                into = torch.empty(
                    len(rows), *kept.shape[1:], dtype=kept.dtype, device=kept.device, pin_memory=kept.is_pinned()
                )
                out[name] = torch.index_select(kept, 0, at, out=into)
        return out

    def observation(self, rows: Sequence[int], pictures: Pictures | None = None) -> Observation:
        """The observation of those frames; `pictures` are those made ahead."""
        states, found = self._on_device[2], self.pictures(rows) if pictures is None else pictures
        images = [found[name].to(self._device, non_blocking=True) for name in self.cameras]
        return Observation(
            images=images[0],
            wrist_images=self._side_by_side(images[1:]),
            states=None if states is None else states[self._index(rows)],
            task_descriptions=[self.tasks[i] for i in self._task_of[list(rows)].tolist()],
        )

    def action_chunks(self, rows: Sequence[int], num_actions: int) -> tuple[Tensor, Tensor]:
        """The next `num_actions` actions f32 [B, H, A], and which of them the episode has, bool [B, H], on the CPU.

        Beyond the episode's end its last action repeats.
        """
        return _chunks(torch.tensor(rows), self.actions, torch.from_numpy(self.last_frame), num_actions)

    def batch(self, rows: Sequence[int], num_actions: int, pictures: Pictures | None = None) -> Batch:
        """Observations, their next actions, and which of those the episode has."""
        actions, last_frame, _ = self._on_device
        index = self._index(rows)
        return Batch(index, self.observation(rows, pictures), *_chunks(index, actions, last_frame, num_actions))

    def _index(self, rows: Sequence[int]) -> Tensor:
        """Numbers of frames as i64 [B] on the device, which is not awaited."""
        return torch.tensor(rows).to(self._device, non_blocking=True)

    def row_batches(self, batch_size: int, *, seed: int, first: int = 0) -> Iterator[list[int]]:
        """Endless batches of frame numbers, from the `first`-th on: every frame once per pass, each pass in its order.

        A batch may end one pass and begin the next.
        """

        def order(epoch: int) -> np.ndarray:
            return generator(seed, "shuffle", 0, epoch, 1).permutation(len(self))

        epoch, start = divmod(first * batch_size, len(self))
        rows = order(epoch)[start:]
        while True:
            while len(rows) < batch_size:
                epoch += 1
                rows = np.concatenate((rows, order(epoch)))
            yield rows[:batch_size].tolist()
            rows = rows[batch_size:]

    def batches(self, batch_size: int, num_actions: int, *, seed: int, first: int = 0) -> Generator[Batch]:
        """The batches of `row_batches`; where the host brings pictures together, another thread does so ahead."""
        rows = self.row_batches(batch_size, seed=seed, first=first)
        if not self.needs_host:
            while True:
                yield self.batch(next(rows), num_actions)
        used: deque[torch.cuda.Event] = deque()  # when the device has copied a batch's pictures
        with ThreadPoolExecutor(1, "batches") as thread:

            def prepare() -> tuple[list[int], Future[Pictures]]:
                following = next(rows)
                return following, thread.submit(self.pictures, following)

            ahead = deque(prepare() for _ in range(AHEAD))
            try:
                while True:
                    now, pictures = ahead.popleft()
                    ahead.append(prepare())
                    yield self.batch(now, num_actions, pictures.result())
                    if self._device.type == "cuda":  # pinned memory is not to grow with the steps that wait there
                        used.append(torch.cuda.Event())
                        used[-1].record()
                        if len(used) > AHEAD:
                            used.popleft().synchronize()
            finally:
                thread.shutdown(cancel_futures=True)

    def _decode(self, name: str, rows: Sequence[int]) -> Tensor:
        """The images of those frames, u8 [B, H, W, 3]."""
        return torch.from_numpy(np.stack(self._cameras[name].decode(rows)))

    def _side_by_side(self, images: Sequence[Tensor]) -> Tensor | None:
        """Wrist images u8 [B, N, h, w, 3]; those of different sizes are brought to the policy's first."""
        if not images:
            return None
        if len({x.shape for x in images}) > 1:
            images = [self._resize(x) for x in images]
        if len({x.shape for x in images}) > 1:
            sizes = ", ".join(f"{n} {list(x.shape[1:3])}" for n, x in zip(self.cameras[1:], images, strict=True))
            raise UserError(f"wrist cameras must be of one size for this policy: {sizes}; name one with sft.features")
        return torch.stack(list(images), 1)


def _chunks(rows: Tensor, actions: Tensor, last_frame: Tensor, num_actions: int) -> tuple[Tensor, Tensor]:
    """The next actions f32 [B, H, A] of frames i64 [B], and which of them the episode has, bool [B, H]."""
    index = rows[:, None] + torch.arange(num_actions, device=rows.device)
    last = last_frame[rows][:, None]
    return actions[torch.minimum(index, last)], index <= last
