"""Where LeRobot's layouts v2.1 and v3.0 keep what: the description, tasks, episodes, statistics and files of a dataset.

v3.0: many episodes to a file, tables in parquet. v2.1: a parquet file and a video per episode, tables as lines of JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlinf.demos.defects import Defects
from rlinf.demos.writer import merge_statistics
from rlinf.errors import UserError

VERSIONS = ("v2.1", "v3.0")
TABLE_ERRORS = (pa.ArrowException, OSError, ValueError)  # of parquet files that are cut off or overwritten
Columns = Mapping[str, list[Any]]


@dataclass(frozen=True)
class VideoSpan:
    """Where an episode lies in a video file."""

    file: Path
    start_s: float  # seconds of the file that lie before the episode


@dataclass(frozen=True)
class EpisodeFiles:
    """An episode's length and the files it lies in."""

    number: int
    length: int  # frames
    data: Path
    videos: Mapping[str, VideoSpan] = field(default_factory=dict)  # by camera


@dataclass(frozen=True)
class Layout:
    """A dataset's description and files; everything in it was checked, the frames were not read yet."""

    folder: Path
    version: str
    fps: float
    robot: str | None
    features: Mapping[str, Mapping[str, Any]]  # name -> dtype, shape and names
    tasks: Mapping[int, str]  # task_index -> sentence
    episodes: tuple[EpisodeFiles, ...]  # in the order of their frames
    stats: Mapping[str, Any]  # name -> min, max, mean, std, ... as nested lists; empty where none are stored


def read_layout(folder: Path) -> Layout:
    """Read everything below meta/; raises UserError with a line for each defect."""
    defects = Defects(folder)
    info = _read_info(folder, defects)
    is_v3 = info["codebase_version"] == "v3.0"
    tasks = (_tasks_v3 if is_v3 else _tasks_v21)(folder, defects)
    episodes = (_episodes_v3 if is_v3 else _episodes_v21)(folder, info, defects)
    stats = (_stats_v3 if is_v3 else _stats_v21)(folder, info, defects)
    counts = {"total_episodes": len(episodes), "total_frames": sum(e.length for e in episodes)}
    if not defects.lines:
        for key, count in counts.items():
            if info[key] != count:
                defects.add("meta/info.json", f"{key}={info[key]}, but meta/episodes lists {count}")
    if not defects.lines and not counts["total_frames"]:
        defects.add("meta/info.json", "the dataset has no frames")
    defects.refuse()
    robot = info.get("robot_type")
    return Layout(
        folder=folder,
        version=info["codebase_version"],
        fps=float(info["fps"]),
        robot=robot if isinstance(robot, str) else None,
        features=info["features"],
        tasks=tasks,
        episodes=tuple(episodes),
        stats=stats,
    )


# ------------------------------------------------------------------ meta/info.json
def _read_info(folder: Path, defects: Defects) -> dict[str, Any]:
    """The content of meta/info.json, every entry in use of its type."""
    path = folder / "meta/info.json"
    if not path.is_file():
        raise UserError(f"no dataset at {folder} (no meta/info.json); make one with: rlinf collect CONFIG")
    info = _read_json(path, defects)
    defects.refuse()
    if not isinstance(info, dict):
        defects.add(path, f"must hold an object, not {type(info).__name__}")
    elif "codebase_version" not in info:
        defects.add(path, "has no codebase_version, so that its layout is unknown")
    elif info["codebase_version"] not in VERSIONS:
        raise UserError(
            f"dataset {folder} has layout {info['codebase_version']}; {' and '.join(VERSIONS)} can be read "
            "(the lerobot package converts older ones)"
        )
    defects.refuse()
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "fps": (lambda x: _is_number(x) and x > 0, "a number above 0"),
        "total_episodes": (_is_count, "a whole number from 0 on"),
        "total_frames": (_is_count, "a whole number from 0 on"),
        "data_path": (lambda x: isinstance(x, str), "a text"),
        "features": (lambda x: isinstance(x, dict), "an object"),
    }
    for key, (holds, rule) in rules.items():
        if key not in info:
            defects.add(path, f"has no {key}")
        elif not holds(info[key]):
            defects.add(path, f"{key}={str(info[key])[:60]} must be {rule}")
    defects.refuse()
    for name, feature in info["features"].items():
        if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
            defects.add(path, f"feature {name!r} has no dtype")
        elif not isinstance(feature.get("shape"), list) or not all(_is_count(n) and n for n in feature["shape"]):
            defects.add(
                path, f"feature {name!r} has shape {feature.get('shape')}, which must be a list of whole numbers"
            )
    defects.refuse()
    if _videos(info) and not isinstance(info.get("video_path"), str):
        defects.add(path, f"has no video_path, but {_videos(info)[0]!r} is a video")
    defects.refuse()
    return info


def _videos(info: Mapping[str, Any]) -> list[str]:
    """Names of the features that lie in video files."""
    return [name for name, feature in info["features"].items() if feature["dtype"] == "video"]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


# ------------------------------------------------------------------ tasks
def _tasks_v3(folder: Path, defects: Defects) -> dict[int, str]:
    """meta/tasks.parquet: the sentence is a column, or the table's pandas index."""
    path = folder / "meta/tasks.parquet"
    table = read_table(path, defects)
    if table is None:
        return {}
    texts = [n for n in table.column_names if pa.types.is_string(table.schema.field(n).type)]
    texts += [n for n in table.column_names if pa.types.is_large_string(table.schema.field(n).type)]
    if "task_index" not in table.column_names or not texts:
        defects.add(path, "must have a column task_index and one with the sentences")
        return {}
    sentences = next((n for n in ("task", "__index_level_0__") if n in texts), texts[0])
    return _checked_tasks(path, table["task_index"].to_pylist(), table[sentences].to_pylist(), defects)


def _tasks_v21(folder: Path, defects: Defects) -> dict[int, str]:
    """meta/tasks.jsonl."""
    path = folder / "meta/tasks.jsonl"
    rows = list(_read_lines(path, ("task_index", "task"), defects))
    return _checked_tasks(path, [r["task_index"] for r in rows], [r["task"] for r in rows], defects)


def _checked_tasks(path: Path, numbers: list[Any], sentences: list[Any], defects: Defects) -> dict[int, str]:
    """Sentences by task_index."""
    for number, sentence in zip(numbers, sentences, strict=True):
        if not _is_count(number):
            defects.add(path, f"task_index={number} must be a whole number from 0 on")
        elif not isinstance(sentence, str):
            defects.add(path, f"the sentence of task_index={number} is {sentence!r}, not a text")
        elif numbers.count(number) > 1:
            defects.add(path, f"task_index={number} occurs twice")
        else:
            continue
        return {}
    return dict(zip(numbers, sentences, strict=True))


# ------------------------------------------------------------------ episodes
def _episodes_v3(folder: Path, info: Mapping[str, Any], defects: Defects) -> list[EpisodeFiles]:
    """meta/episodes/*: every row says in which files, and from where on, an episode lies."""
    files = sorted((folder / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        defects.add("meta/episodes", "holds no chunk-*/file-*.parquet")
    wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for camera in _videos(info):
        wanted += [f"videos/{camera}/{key}" for key in ("chunk_index", "file_index", "from_timestamp")]
    episodes: list[EpisodeFiles] = []
    for path in files:
        table = read_table(path, defects, wanted)
        if table is None:
            continue
        columns = {name: table[name].to_pylist() for name in wanted}
        for name, values in columns.items():
            holds = (lambda x: _is_number(x) and x >= 0) if name.endswith("from_timestamp") else _is_count
            if bad := [i for i, value in enumerate(values) if not holds(value)]:
                defects.add(path, f"column {name!r} holds {values[bad[0]]} in row {bad[0]}")
        if not defects.lines:
            episodes += [_episode_v3(folder, info, columns, row, defects) for row in range(len(table))]
    return _in_order("meta/episodes", episodes, defects)


def _episode_v3(folder: Path, info: Mapping[str, Any], columns: Columns, row: int, defects: Defects) -> EpisodeFiles:
    def file(template: str, prefix: str, **names: str) -> Path:
        chunk, number = (columns[f"{prefix}/{key}"][row] for key in ("chunk_index", "file_index"))
        return _file(folder, info, template, defects, chunk_index=chunk, file_index=number, **names)

    videos = {
        camera: VideoSpan(
            file("video_path", f"videos/{camera}", video_key=camera), columns[f"videos/{camera}/from_timestamp"][row]
        )
        for camera in _videos(info)
    }
    number, length = columns["episode_index"][row], columns["length"][row]
    return EpisodeFiles(number, length, file("data_path", "data"), videos)


def _episodes_v21(folder: Path, info: Mapping[str, Any], defects: Defects) -> list[EpisodeFiles]:
    """meta/episodes.jsonl; the files of an episode follow from its number."""
    path, size = folder / "meta/episodes.jsonl", info.get("chunks_size")
    if not _is_count(size) or not size:
        defects.add("meta/info.json", f"chunks_size={size} must be a whole number from 1 on")
        return []
    episodes = []
    for row in _read_lines(path, ("episode_index", "length"), defects):
        number, length = row["episode_index"], row["length"]
        if not _is_count(number) or not _is_count(length):
            defects.add(path, f"episode_index={number} with length={length}: both must be whole numbers from 0 on")
            return []
        place: dict[str, Any] = {"episode_chunk": number // size, "episode_index": number}
        videos = {
            camera: VideoSpan(_file(folder, info, "video_path", defects, video_key=camera, **place), 0.0)
            for camera in _videos(info)
        }
        episodes.append(EpisodeFiles(number, length, _file(folder, info, "data_path", defects, **place), videos))
    return _in_order(path, episodes, defects)


def _file(folder: Path, info: Mapping[str, Any], key: str, defects: Defects, **place: Any) -> Path:
    """The file that a path pattern of info.json means; it lies inside the dataset."""
    try:
        path = folder / info[key].format(**place)
    except (KeyError, IndexError, ValueError, AttributeError):
        path = folder / ".."
    if not path.resolve().is_relative_to(folder.resolve()) or path == folder:
        defects.add("meta/info.json", f"{key}={info[key]!r} is no pattern of a file in the dataset")
        defects.refuse()
    return path


def _in_order(where: str | Path, episodes: list[EpisodeFiles], defects: Defects) -> list[EpisodeFiles]:
    """Episodes by number, each of which occurs once and has frames."""
    ordered = sorted(episodes, key=lambda episode: episode.number)
    for one, other in pairwise(ordered):
        if one.number == other.number:
            defects.add(where, f"episode {one.number} occurs twice")
    for empty in [e.number for e in ordered if not e.length][:1]:
        defects.add(where, f"episode {empty} has no frames")
    return ordered


# ------------------------------------------------------------------ statistics
def _stats_v3(folder: Path, info: Mapping[str, Any], defects: Defects) -> dict[str, Any]:
    """meta/stats.json, where there is one."""
    path = folder / "meta/stats.json"
    stats = _read_json(path, defects) if path.is_file() else {}
    if not isinstance(stats, dict):
        defects.add(path, f"must hold an object, not {type(stats).__name__}")
    return stats if isinstance(stats, dict) else {}


def _stats_v21(folder: Path, info: Mapping[str, Any], defects: Defects) -> dict[str, Any]:
    """meta/episodes_stats.jsonl merged over the episodes, where there is one."""
    path = folder / "meta/episodes_stats.jsonl"
    rows = list(_read_lines(path, ("stats",), defects)) if path.is_file() else []
    names = [n for n, f in info["features"].items() if f["dtype"] not in ("video", "image", "string")]

    def flat(stats: Mapping[str, Any]) -> dict[str, Any]:
        return {f"stats/{name}/{key}": value for name in names for key, value in stats[name].items()}

    try:
        return merge_statistics([flat(row["stats"]) for row in rows], names) if rows else {}
    except (KeyError, TypeError, ValueError, AttributeError):
        defects.add(path, f"must hold min, max, mean, std and count of {', '.join(names)} in every line")
        return {}


# ------------------------------------------------------------------ files
def read_table(path: Path, defects: Defects, columns: list[str] | None = None) -> pa.Table | None:
    """A parquet file, with these of its columns; None and a defect where it cannot be read."""
    if not path.is_file():
        defects.add(path, "is missing")
        return None
    try:
        names = pq.read_schema(path).names
        if lacking := [name for name in columns or () if name not in names]:
            defects.add(path, f"has no column {lacking[0]!r}; it has: {', '.join(names[:8])}")
            return None
        table = pq.read_table(path, columns=columns, page_checksum_verification=True)
        table.validate(full=True)
    except TABLE_ERRORS as error:
        defects.add(path, f"cannot be read as parquet: {_one_line(error)}")
        return None
    return table


def _read_json(path: Path, defects: Defects) -> Any:
    """The content of a JSON file; None and a defect where there is none."""
    try:
        return json.loads(path.read_text())
    except RecursionError:
        defects.add(path, "is nested too deeply")
    except ValueError as error:
        defects.add(path, f"is not JSON: {'it is empty' if not path.stat().st_size else _one_line(error)}")
    return None


def _read_lines(path: Path, keys: tuple[str, ...], defects: Defects) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, each of which has these keys; ends with a defect where one does not."""
    if not path.is_file():
        defects.add(path, "is missing")
        return
    try:
        lines = path.read_text().splitlines()
    except ValueError as error:
        defects.add(path, f"is not text: {_one_line(error)}")
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            defects.add(path, f"line {number} is not JSON: {_one_line(error)}")
            return
        if not isinstance(row, dict) or any(key not in row for key in keys):
            defects.add(path, f"line {number} must be an object with {' and '.join(keys)}")
            return
        yield row


def _one_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip().rstrip(".")[:160] or type(error).__name__


def episode_columns(layout: Layout, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What meta/episodes says of every episode under these names, in the order of `layout.episodes`, where it does."""
    folder, found, defects = layout.folder, dict[int, dict[str, Any]](), Defects(layout.folder)
    if layout.version == "v3.0":
        for path in sorted((folder / "meta/episodes").glob("chunk-*/file-*.parquet")):
            there = [name for name in ("episode_index", *names) if name in pq.read_schema(path).names]
            table = read_table(path, defects, there)
            found |= {row["episode_index"]: row for row in (table.to_pylist() if table is not None else [])}
    else:
        rows = _read_lines(folder / "meta/episodes.jsonl", ("episode_index",), defects)
        found = {row["episode_index"]: row for row in rows}
    defects.refuse()
    return [{name: row[name] for name in names if name in row} for row in (found[e.number] for e in layout.episodes)]
