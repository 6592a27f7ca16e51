"""Read a dataset in LeRobot's layout v3.0 or v2.1 as training batches.

Letters: M frames, B rows of a batch, H actions per sample, A action dims, S state dims, N wrist cameras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

Tensor = torch.Tensor
CACHE_BYTES = 1 << 30  # decoded images are kept while they fit, else decoded batch by batch
PIECE = 256  # frames decoded at a time


class DemoDataset:
    """The frames of every episode, in order; the whole dataset is checked once, when it is opened.

    Example: `DemoDataset("data/demos").batch([0, 7], num_actions=5)` -> (Observation of 2 rows, f32 [2, 5, A], bool
    [2, 5])
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
        self._kept: dict[str, Tensor] = {}  # u8 [M, H, W, 3] of every camera, once `keep` was called
        self._resize: Callable[[Tensor], Tensor] = lambda images: images

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
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Decode all images once, resize them and keep them on `device`, if they fit into `cache_bytes`."""
        self._resize = resize
        one = sum(resize(self._decode(name, [0])).nbytes for name in self.cameras)
        if one * len(self) > cache_bytes:
            return
        pieces = [range(i, min(i + PIECE, len(self))) for i in range(0, len(self), PIECE)]
        for name in self.cameras:
            self._kept[name] = torch.cat([resize(self._decode(name, rows)).to(device) for rows in pieces])

    def observation(self, rows: Sequence[int]) -> Observation:
        """The observation of those frames."""
        images = [self._pictures(name, rows) for name in self.cameras]
        return Observation(
            images=images[0],
            wrist_images=self._side_by_side(images[1:]),
            states=None if self.states is None else self.states[list(rows)],
            task_descriptions=[self.tasks[self._task_of[row]] for row in rows],
        )

    def action_chunks(self, rows: Sequence[int], num_actions: int) -> tuple[Tensor, Tensor]:
        """The next `num_actions` actions f32 [B, H, A], and which of them the episode has, bool [B, H].

        Beyond the episode's end its last action repeats.
        """
        index = np.asarray(rows)[:, None] + np.arange(num_actions)
        last = self.last_frame[list(rows)][:, None]
        return self.actions[np.minimum(index, last)], torch.from_numpy(index <= last)

    def batch(self, rows: Sequence[int], num_actions: int) -> tuple[Observation, Tensor, Tensor]:
        """Observations, their next actions, and which of those the episode has."""
        return self.observation(rows), *self.action_chunks(rows, num_actions)

    def row_batches(self, batch_size: int, *, seed: int) -> Iterator[list[int]]:
        """Endless batches of frame numbers: every frame once per pass, each pass in its own order."""
        rows: list[int] = []
        epoch = 0
        while True:
            while len(rows) < batch_size:
                rows += generator(seed, "shuffle", 0, epoch, 1).permutation(len(self)).tolist()
                epoch += 1
            yield rows[:batch_size]
            rows = rows[batch_size:]

    def _pictures(self, name: str, rows: Sequence[int]) -> Tensor:
        if name in self._kept:
            return self._kept[name][list(rows)]
        return self._decode(name, rows)

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
