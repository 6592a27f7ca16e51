"""Write a dataset in LeRobot's v3.0 layout: parquet files with many episodes each, images as PNG inside them.

meta/{info.json, stats.json, tasks.parquet, episodes/chunk-000/file-000.parquet}, data/chunk-000/file-NNN.parquet.
Letters: T frames of an episode, A action dims, S state dims, N wrist cameras.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlinf.simulators.contract import EnvSpec
from rlinf.simulators.png import encode_png

VERSION = "v3.0"
MAIN_IMAGE = "observation.images.main"
WRIST_IMAGE = "observation.images.wrist_{}"
STATE, ACTION = "observation.state", "action"
PRIVILEGED = "observation.environment_state"  # LeRobot's name for what a camera does not show
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
FILE_BYTES = 100 << 20  # a data file is closed once it is this large
MAX_FILES_PER_CHUNK = 1000
QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)
PIXELS_FOR_STATISTICS = 50_000  # per episode and camera
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

Array = np.ndarray
Stats = dict[str, Any]  # min, max, mean, std, count, q01, ... as nested lists


@dataclass(frozen=True)
class EncodedImages:
    """The images of one camera and episode as the data file holds them, and their statistics."""

    column: pa.Array
    stats: Stats


class DatasetWriter:
    """Writes episode after episode into a folder; the metadata that make it a dataset follow at the end of the block.

    Example: `with DatasetWriter(folder, spec) as writer: writer.add(images=..., states=..., actions=..., task="...")`
    """

    def __init__(self, folder: Path, spec: EnvSpec, *, file_bytes: int = FILE_BYTES) -> None:
        self.folder, self.spec, self.file_bytes = folder, spec, file_bytes
        self._features = features(spec)
        self._schema = _schema(self._features)
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._num_frames = 0
        self._file: pq.ParquetWriter | None = None
        self._file_number, self._bytes_in_file = -1, 0

    def add(
        self,
        *,
        images: Array | EncodedImages,  # u8 [T, H, W, 3]
        wrist_images: Array | Sequence[EncodedImages] | None = None,  # u8 [T, N, h, w, 3], or encoded by camera
        states: Array | None,  # f32 [T, S]
        actions: Array,  # f32 [T, A]
        task: str | Sequence[str],  # a sentence, or one for each frame
        critic_states: Array | None = None,  # f32 [T, K]
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Append one episode; `extra` become columns of its row in meta/episodes."""
        length, number = len(actions), len(self._episodes)
        numbers: dict[str, Array] = {ACTION: actions}
        for name, column in ((STATE, states), (PRIVILEGED, critic_states)):
            if name in self._features:
                assert column is not None
                numbers[name] = column
        cameras: dict[str, Array | EncodedImages] = {MAIN_IMAGE: images}
        for i in range(self.spec.num_wrist_images):
            assert wrist_images is not None
            cameras[WRIST_IMAGE.format(i)] = wrist_images[:, i] if isinstance(wrist_images, Array) else wrist_images[i]
        with ThreadPoolExecutor() as pool:
            encoded = {n: encode_images(x, pool.map) if isinstance(x, Array) else x for n, x in cameras.items()}
        frames = np.arange(length)
        sentences = [task] * length if isinstance(task, str) else list(task)
        task_index = [self._tasks.setdefault(sentence, len(self._tasks)) for sentence in sentences]
        numbers |= {
            "timestamp": (frames / self.spec.control_hz).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": self._num_frames + frames,
            "task_index": np.array(task_index, np.int64),
        }
        columns: dict[str, pa.Array] = {name: _column(x) for name, x in numbers.items()}
        columns |= {name: x.column for name, x in encoded.items()}
        self._write(pa.table([columns[name] for name in self._schema.names], schema=self._schema))
        stats = {name: statistics(x.reshape(length, -1)) for name, x in numbers.items()}
        stats |= {name: x.stats for name, x in encoded.items()}
        self._episodes.append(
            {
                "episode_index": number,
                "tasks": list(dict.fromkeys(sentences)),
                "length": length,
                "data/chunk_index": self._file_number // MAX_FILES_PER_CHUNK,
                "data/file_index": self._file_number % MAX_FILES_PER_CHUNK,
                "dataset_from_index": self._num_frames,
                "dataset_to_index": self._num_frames + length,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                **(extra or {}),
                **{f"stats/{name}/{key}": value for name, s in stats.items() for key, value in s.items()},
            }
        )
        self._num_frames += length

    def _write_metadata(self) -> None:
        """Write everything below meta/."""
        meta = self.folder / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), meta / "episodes/chunk-000/file-000.parquet")
        pq.write_table(_task_table(self._tasks), meta / "tasks.parquet")
        (meta / "stats.json").write_text(json.dumps(merge_statistics(self._episodes, self._features), indent=4))
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4))

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if kind is None:
            self._write_metadata()

    def _write(self, table: pa.Table) -> None:
        """Append an episode's frames to the data file, or to a new one once it is large enough."""
        if self._file is None or self._bytes_in_file >= self.file_bytes:
            if self._file is not None:
                self._file.close()
            self._file_number, self._bytes_in_file = self._file_number + 1, 0
            chunk, file = divmod(self._file_number, MAX_FILES_PER_CHUNK)
            path = self.folder / DATA_PATH.format(chunk_index=chunk, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = pq.ParquetWriter(path, self._schema, write_page_checksum=True)
        self._file.write_table(table)
        self._bytes_in_file += table.nbytes

    def _info(self) -> dict[str, Any]:
        """The content of meta/info.json."""
        hz = self.spec.control_hz
        return {
            "codebase_version": VERSION,
            "robot_type": self.spec.robot or self.spec.suite,
            "total_episodes": len(self._episodes),
            "total_frames": self._num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": MAX_FILES_PER_CHUNK,
            "data_files_size_in_mb": self.file_bytes >> 20,
            "video_files_size_in_mb": 200,
            "fps": int(hz) if hz == int(hz) else hz,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": None,
            "features": self._features,
        }


def features(spec: EnvSpec) -> dict[str, dict[str, Any]]:
    """The `features` block of info.json for a suite's observations and actions."""

    def image(size: tuple[int, int]) -> dict[str, Any]:
        return {"dtype": "image", "shape": [*size, 3], "names": ["height", "width", "channels"]}

    def index(dtype: str) -> dict[str, Any]:
        return {"dtype": dtype, "shape": [1], "names": None}

    out = {MAIN_IMAGE: image(spec.image_size)}
    out |= {WRIST_IMAGE.format(i): image(spec.wrist_image_size) for i in range(spec.num_wrist_images)}
    if spec.state_dim:
        names = [f"state_{i}" for i in range(spec.state_dim)]
        out[STATE] = {"dtype": "float32", "shape": [spec.state_dim], "names": names}
    if spec.critic_state_dim:
        names = [f"privileged_{i}" for i in range(spec.critic_state_dim)]
        out[PRIVILEGED] = {"dtype": "float32", "shape": [len(names)], "names": names}
    out[ACTION] = {"dtype": "float32", "shape": [spec.action_dim], "names": list(spec.action_names)}
    out["timestamp"] = index("float32")
    return out | {name: index("int64") for name in ("frame_index", "episode_index", "index", "task_index")}


def statistics(x: Array) -> Stats:
    """Per-column statistics of f32 [T, D]."""
    x = x.astype(np.float64)
    quantiles = np.quantile(x, QUANTILES, axis=0)
    return {
        "min": x.min(0).tolist(),
        "max": x.max(0).tolist(),
        "mean": x.mean(0).tolist(),
        "std": x.std(0).tolist(),
        "count": [len(x)],
        **{f"q{round(100 * q):02d}": value.tolist() for q, value in zip(QUANTILES, quantiles, strict=True)},
    }


def image_statistics(images: Array) -> Stats:
    """Per-channel statistics, scaled to [0, 1] and shaped [3, 1, 1], of a sample of the pixels of u8 [T, ..., 3]."""
    pixels = images.reshape(-1, 3)
    pixels = pixels[:: max(1, len(pixels) // PIXELS_FOR_STATISTICS)]
    channels = [_level_statistics(np.bincount(pixels[:, c], minlength=256)) for c in range(3)]
    stats: Stats = {name: [[[channel[name]]] for channel in channels] for name in channels[0]}
    return stats | {"count": [len(images)]}


def _level_statistics(counts: Array) -> dict[str, float]:
    """`statistics` of numbers 0, 1/255, ... 1 that occur `counts` times each, [256]."""
    levels, total = np.arange(256) / 255.0, int(counts.sum())
    there, up_to = np.flatnonzero(counts), np.cumsum(counts)
    mean = float(counts @ levels) / total
    stats = {
        "min": float(levels[there[0]]),
        "max": float(levels[there[-1]]),
        "mean": mean,
        "std": float(np.sqrt(counts @ (levels - mean) ** 2 / total)),
    }
    for q in QUANTILES:  # on the line between the two nearest of the sorted numbers
        rank = q * (total - 1)
        low, high = levels[np.searchsorted(up_to, [int(rank), min(int(rank) + 1, total - 1)], "right")]
        stats[f"q{round(100 * q):02d}"] = float(low + (rank - int(rank)) * (high - low))
    return stats


def merge_statistics(episodes: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Stats]:
    """Statistics of the whole dataset from those of its episodes; quantiles become their weighted mean."""
    merged = {}
    for name in names:
        rows = {k.rsplit("/", 1)[1]: np.array([e[k] for e in episodes]) for k in episodes[0] if f"stats/{name}/" in k}
        count = rows["count"].reshape(-1, *[1] * (rows["mean"].ndim - 1))  # broadcasts over the statistics
        weight = count / count.sum()
        mean = (weight * rows["mean"]).sum(0)
        variance = (weight * (rows["std"] ** 2 + (rows["mean"] - mean) ** 2)).sum(0)
        merged[name] = {
            "min": rows["min"].min(0).tolist(),
            "max": rows["max"].max(0).tolist(),
            "mean": mean.tolist(),
            "std": np.sqrt(variance).tolist(),
            "count": [int(count.sum())],
            **{k: (weight * v).sum(0).tolist() for k, v in rows.items() if k.startswith("q")},
        }
    return merged


def encode_images(images: Array, apply: Callable[..., Iterable[bytes]] = map) -> EncodedImages:
    """Encode the images u8 [T, H, W, 3] of a camera; `apply` is the `map` of a pool where several cores are free."""
    return encoded_images(apply(encode_png, images), images)


def encoded_images(pngs: Iterable[bytes], pixels: Array) -> EncodedImages:
    """Images of a camera that are encoded already, with `pixels` u8 [T, P, 3] of each, or all, for their statistics."""
    column = pa.array([{"bytes": png, "path": None} for png in pngs], IMAGE_TYPE)
    return EncodedImages(column, image_statistics(pixels))


def _column(x: Array) -> pa.Array:
    if x.ndim == 1:
        return pa.array(x)
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(x, np.float32).ravel()), x.shape[1])


def _schema(names: Mapping[str, dict[str, Any]]) -> pa.Schema:
    """Arrow types of the data files, with the description that the `datasets` package reads."""
    fields: list[pa.Field] = []
    described: dict[str, Any] = {}
    for name, feature in names.items():
        dtype, length = feature["dtype"], feature["shape"][0]
        if dtype == "image":
            fields.append(pa.field(name, IMAGE_TYPE))
            described[name] = {"_type": "Image"}
            continue
        value = {"dtype": dtype, "_type": "Value"}
        kind = pa.float32() if dtype == "float32" else pa.int64()
        if name in (STATE, PRIVILEGED, ACTION):
            fields.append(pa.field(name, pa.list_(kind, length)))
            described[name] = {"feature": value, "length": length, "_type": "List"}
        else:
            fields.append(pa.field(name, kind))
            described[name] = value
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def _task_table(tasks: Mapping[str, int]) -> pa.Table:
    """Task sentences as the pandas index of their numbers, which is how the layout keys them."""
    index = "__index_level_0__"
    columns: list[dict[str, str | None]] = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": None, "field_name": index, "pandas_type": "unicode", "numpy_type": "object"},
    ]
    described = {
        "index_columns": [index],
        "column_indexes": [],
        "columns": [column | {"metadata": None} for column in columns],
    }
    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), index: pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(described)})
