"""Read a dataset in LeRobot's v3.0 layout as training batches.

Letters: M frames, B rows of a batch, H actions per sample, A action dims, S state dims, N wrist cameras.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from rlinf.data.noise import generator
from rlinf.data.types import Observation
from rlinf.demos.writer import ACTION, MAIN_IMAGE, PRIVILEGED, STATE, VERSION
from rlinf.errors import UserError

Tensor = torch.Tensor
CACHE_BYTES = 1 << 30  # decoded images are kept while they fit, else decoded batch by batch
PIECE = 256  # frames decoded at a time


class DemoDataset:
    """The frames of every episode, in order.

    Example: `DemoDataset("data/demos").batch([0, 7], num_actions=5)` -> (Observation of 2 rows, f32 [2, 5, A], bool
    [2, 5])
    """

    actions: Tensor  # f32 [M, A]
    states: Tensor | None  # f32 [M, S]
    privileged: Tensor | None  # f32 [M, K] what the simulator knew, for `sft.state_loss`

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.info = self._read_info()
        self.cameras = _order_cameras(self.info["features"])
        if not self.cameras or ACTION not in self.info["features"]:
            raise UserError(f"dataset {self.folder}: needs an image feature and {ACTION!r} in meta/info.json")
        table = self._read_frames()
        self.actions = _matrix(table, ACTION)
        self.states = _matrix(table, STATE) if STATE in self.info["features"] else None
        self.privileged = _matrix(table, PRIVILEGED) if PRIVILEGED in self.info["features"] else None
        tasks = pq.read_table(self.folder / "meta/tasks.parquet")
        sentences = tasks.column(next(n for n in tasks.column_names if n != "task_index")).to_pylist()
        self.tasks: list[str] = [s for _, s in sorted(zip(tasks["task_index"].to_pylist(), sentences, strict=True))]
        self._task_of = table["task_index"].to_numpy()  # [M]
        episode = table["episode_index"].to_numpy()
        self.num_episodes = len(np.unique(episode))
        last = np.flatnonzero(np.append(episode[1:] != episode[:-1], True))  # by episode
        self.last_frame = last[np.searchsorted(last, np.arange(len(episode)))]  # i64 [M], of each frame's episode
        self._png = {name: table[name].combine_chunks().field("bytes") for name in self.cameras}
        self._decoded: dict[str, Tensor] = {}  # u8 [M, H, W, 3] of every camera, once `keep` was called

    def __len__(self) -> int:
        return len(self.actions)

    def keep(
        self,
        device: torch.device,
        resize: Callable[[Tensor], Tensor] = lambda images: images,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Decode all images once, resize them and keep them on `device`, if they fit into `cache_bytes`."""
        one = sum(resize(self._decode(name, [0])).nbytes for name in self.cameras)
        if one * len(self) > cache_bytes:
            return
        pieces = [range(i, min(i + PIECE, len(self))) for i in range(0, len(self), PIECE)]
        for name in self.cameras:
            self._decoded[name] = torch.cat([resize(self._decode(name, rows)).to(device) for rows in pieces])

    def observation(self, rows: Sequence[int]) -> Observation:
        """The observation of those frames."""
        images = [self._images(name, rows) for name in self.cameras]
        return Observation(
            images=images[0],
            wrist_images=torch.stack(images[1:], 1) if len(images) > 1 else None,
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

    def _read_info(self) -> dict[str, Any]:
        """meta/info.json, which names the layout and the features."""
        path = self.folder / "meta/info.json"
        if not path.is_file():
            raise UserError(f"no dataset at {self.folder} (no meta/info.json); make one with: rlinf collect CONFIG")
        info = json.loads(path.read_text())
        if info["codebase_version"] != VERSION:
            raise UserError(f"dataset {self.folder} has layout {info['codebase_version']}, only {VERSION} can be read")
        return info

    def _read_frames(self) -> pa.Table:
        """The columns in use of all data files; images stay compressed, and on the disk until they are read."""
        columns = [*self.cameras, ACTION, "task_index", "episode_index"]
        columns += [name for name in (STATE, PRIVILEGED) if name in self.info["features"]]
        files = sorted((self.folder / "data").glob("chunk-*/file-*.parquet"))
        table = pa.concat_tables(pq.read_table(file, columns=columns, memory_map=True) for file in files)
        if len(table) != self.info["total_frames"]:
            raise UserError(
                f"dataset {self.folder}: {len(table)} frames, meta/info.json says {self.info['total_frames']}"
            )
        return table

    def _images(self, name: str, rows: Sequence[int]) -> Tensor:
        if name in self._decoded:
            return self._decoded[name][list(rows)]
        return self._decode(name, rows)

    def _decode(self, name: str, rows: Sequence[int]) -> Tensor:
        """The images of those frames, u8 [B, H, W, 3]; decoders release Python's lock, so all cores help."""
        png = self._png[name]

        def picture(row: int) -> np.ndarray:
            return np.asarray(Image.open(io.BytesIO(png[row].as_py())).convert("RGB"))

        with ThreadPoolExecutor() as pool:
            return torch.from_numpy(np.stack(list(pool.map(picture, rows))))


def _order_cameras(names: dict[str, Any]) -> list[str]:
    """Image features, the main camera first; videos are refused."""
    for name, feature in names.items():
        if feature["dtype"] == "video":
            raise UserError(
                f"feature {name!r} is a video; only datasets with images in their parquet files can be read"
            )
    cameras = [name for name, feature in names.items() if feature["dtype"] == "image"]
    return sorted(cameras, key=lambda name: (name != MAIN_IMAGE, "wrist" in name, name))


def _matrix(table: pa.Table, name: str) -> Tensor:
    column = table[name].combine_chunks()
    return torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1).astype(np.float32))
