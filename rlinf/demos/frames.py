"""The frames of a dataset as read from its files, every number and image checked on the way.

Letters: M frames of the dataset, n columns of a feature.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from rlinf.demos.defects import Defects
from rlinf.demos.features import FeatureMap, image_size
from rlinf.demos.layout import EpisodeFiles, Layout, read_table
from rlinf.simulators.png import png_size

Array = np.ndarray
INDEX = ("episode_index", "task_index")
COUNTERS = ("frame_index", "index", "timestamp")  # which a dataset has where info.json lists them
BLOCK = 64  # images that a thread checks at a time
RANGE_TOLERANCE = 1e-3  # share of a column's range by which stored statistics may differ from the data


@dataclass
class Frames:
    """Columns of every frame, in the order of episodes."""

    numbers: dict[str, Array] = field(default_factory=dict)  # feature -> f32 [M, n]
    episode: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # position in Layout.episodes, i64 [M]
    task_index: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # i64 [M]
    timestamp: Array | None = None  # f64 [M], seconds since the episode began
    images: dict[str, pa.ChunkedArray] = field(default_factory=dict)  # camera -> compressed images


def read_frames(layout: Layout, features: FeatureMap) -> Frames:
    """Read and check every data file; raises UserError with a line for each defect."""
    defects = Defects(layout.folder)
    by_file: dict[Path, list[EpisodeFiles]] = {}
    for episode in layout.episodes:
        by_file.setdefault(episode.data, []).append(episode)
    counters = [*INDEX, *(name for name in COUNTERS if name in layout.features)]
    widths = {name: layout.features[name]["shape"][0] for name in features.numbers} | dict.fromkeys(counters, 1)
    cameras = [name for name in features.cameras if layout.features[name]["dtype"] == "image"]
    parts: list[dict[str, Array]] = []
    images: dict[str, list[pa.Array]] = {name: [] for name in cameras}
    for path, episodes in by_file.items():
        table = read_table(path, defects, [*widths, *cameras])
        if table is None:
            continue
        if len(table) != (wanted := sum(e.length for e in episodes)):
            defects.add(path, f"has {len(table)} rows, but meta/episodes gives its episodes {wanted}")
            continue
        found = {name: _matrix(path, table[name], name, width, defects) for name, width in widths.items()}
        part = {name: column for name, column in found.items() if column is not None}
        if len(part) == len(found):
            _check_counters(path, {name: part[name][:, 0] for name in counters}, episodes, layout.tasks, defects)
            parts.append(part)
        for name in cameras:
            compressed = _image_column(path, table[name], name, defects)
            if compressed is not None:
                size = image_size(name, layout.features[name])
                _check_images(path, name, compressed, size, defects)
                images[name] += compressed.chunks
    defects.refuse()
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    frames = Frames(
        numbers={name: joined[name].astype(np.float32) for name in features.numbers},
        episode=np.repeat(np.arange(len(layout.episodes)), [e.length for e in layout.episodes]),
        task_index=joined["task_index"][:, 0].astype(np.int64),
        timestamp=joined["timestamp"][:, 0] if "timestamp" in joined else None,
        images={name: pa.chunked_array(chunks) for name, chunks in images.items()},
    )
    _check_statistics(layout, frames.numbers, defects)
    defects.refuse()
    return frames


def _matrix(path: Path, column: pa.ChunkedArray, name: str, width: int, defects: Defects) -> Array | None:
    """A column of numbers, or of lists of them, as finite f64 [rows, width]; None and a defect otherwise."""
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    value = kind.value_type if is_list else kind
    if not (pa.types.is_floating(value) or pa.types.is_integer(value) or pa.types.is_boolean(value)):
        defects.add(path, f"column {name!r} holds {kind}, not numbers")
        return None
    before = len(defects.lines)
    defects.add_rows(path, f"column {name!r} is null", column.is_null().to_numpy())
    if is_list:
        lengths = pc.fill_null(pc.list_value_length(column), width).to_numpy()
        defects.add_rows(path, f"column {name!r} has not {width} values, as meta/info.json says,", lengths != width)
    elif width != 1:
        defects.add(path, f"column {name!r} has one value in each row, but meta/info.json says {width}")
    if len(defects.lines) > before:
        return None
    flat = pc.list_flatten(column) if is_list else column
    defects.add_rows(path, f"column {name!r} holds null", flat.is_null().to_numpy().reshape(-1, width).any(1))
    if len(defects.lines) > before:
        return None
    numbers = flat.cast(pa.float64()).to_numpy().reshape(-1, width)
    with np.errstate(over="ignore"):
        finite = np.isfinite(numbers.astype(np.float32)).all(1)
    first = numbers[~finite][:1]
    shown = "NaN" if np.isnan(first).any() else "infinite"
    defects.add_rows(path, f"column {name!r} is {shown}", ~finite)
    return numbers if finite.all() else None


def _check_counters(
    path: Path, part: Mapping[str, Array], episodes: Sequence[EpisodeFiles], tasks: Mapping[int, str], defects: Defects
) -> None:
    """Episode, frame and task numbers, and times that rise within an episode."""
    lengths = [e.length for e in episodes]
    wanted = np.repeat([e.number for e in episodes], lengths)
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    position = np.arange(len(wanted)) - first
    defects.add_rows(path, "column 'episode_index' disagrees with meta/episodes", part["episode_index"] != wanted)
    if "frame_index" in part:
        rule = "column 'frame_index' does not count the episode's frames from 0"
        defects.add_rows(path, rule, part["frame_index"] != position)
    if "index" in part:
        rises = np.diff(part["index"], prepend=part["index"][0] - 1) == 1
        defects.add_rows(path, "column 'index' does not rise by 1", ~rises | (part["index"] < 0))
    if "timestamp" in part:
        seconds = part["timestamp"]
        fallen = np.where(position == 0, seconds < 0, np.diff(seconds, prepend=0.0) <= 0)
        defects.add_rows(path, "column 'timestamp' does not rise", fallen)
    known = np.isin(part["task_index"], list(tasks))
    for unknown in part["task_index"][~known][:1]:
        rule = f"column 'task_index' is {unknown:g}, which no task has,"
        defects.add_rows(path, rule, ~known)


def _image_column(path: Path, column: pa.ChunkedArray, name: str, defects: Defects) -> pa.ChunkedArray | None:
    """The compressed images of a column; None and a defect where one is missing."""
    kind = column.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        column = pc.struct_field(column, "bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        defects.add(path, f"column {name!r} holds {str(kind)[:60]}, not images")
        return None
    missing = column.is_null().to_numpy()
    defects.add_rows(path, f"column {name!r} has no image", missing)
    return None if missing.any() else column.cast(pa.large_binary())


def _check_images(path: Path, name: str, images: pa.ChunkedArray, size: tuple[int, int], defects: Defects) -> None:
    """Every image can be read and has the size that meta/info.json says."""

    def some(first: int) -> list[str | None]:
        return [_image_defect(image.as_py(), size) for image in images.slice(first, BLOCK)]

    with ThreadPoolExecutor() as pool:
        found = list(itertools.chain.from_iterable(pool.map(some, range(0, len(images), BLOCK))))
    for defect in dict.fromkeys(d for d in found if d is not None):
        defects.add_rows(path, f"image {name!r} {defect}", np.array([d == defect for d in found]))


def _image_defect(data: bytes, size: tuple[int, int]) -> str | None:
    """What is wrong with a compressed image. A PNG's checksums tell; others must be decoded to find out."""
    if png_size(data) == size:
        return None
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if (height, width) != size:
                return f"is {height} x {width} pixels, but meta/info.json says {size[0]} x {size[1]}"
            if image.format == "PNG":
                image.verify()
            else:
                image.load()
    except Exception:  # a decoder may fail in any way on bytes that are no image
        return "cannot be decoded"
    return None


def _check_statistics(layout: Layout, numbers: Mapping[str, Array], defects: Defects) -> None:
    """Stored statistics are numbers, and those of these data: else either was changed."""
    file = "meta/stats.json" if layout.version == "v3.0" else "meta/episodes_stats.jsonl"
    for name, rows in numbers.items():
        stored, data = layout.stats.get(name), rows.astype(np.float64)
        if stored is None:
            continue
        if not isinstance(stored, dict):
            defects.add(file, f"{name} must be an object")
            continue
        spread = RANGE_TOLERANCE * (data.max(0) - data.min(0)) + 1e-5 * np.abs(data).max(0) + 1e-6
        for key, values in (("min", data.min(0)), ("max", data.max(0)), ("mean", data.mean(0))):
            try:
                told = np.asarray(stored[key], np.float64).reshape(-1)
            except (KeyError, TypeError, ValueError):
                defects.add(file, f"{name} has no numbers under {key!r}")
                break
            if told.shape != values.shape or not np.isfinite(told).all():
                defects.add(file, f"{name}: {key!r} must be {len(values)} finite numbers")
                break
            if (bad := np.abs(told - values) > spread).any():
                i = int(np.argmax(bad))
                defects.add(
                    file,
                    f"{name} column {i}: {key} is {told[i]:.6g}, that of the data {values[i]:.6g}: one of them was "
                    "changed; delete the file to train on the data as they are",
                )
                break
