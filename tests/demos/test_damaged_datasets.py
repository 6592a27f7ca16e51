"""Every way to damage a dataset is refused when it is opened, with a line that names the file; nothing is accepted.

Damages are made to small datasets of both layouts. `test_bytes...` cuts and flips files anywhere: a dataset that is
still accepted must then read exactly as before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf.demos.dataset import DemoDataset
from rlinf.demos.writer import DatasetWriter
from rlinf.errors import UserError
from tests.demos.lerobot_files import SIZES, pictures, png, write_dataset, write_video
from tests.demos.test_dataset import SPEC, episode

Damage = Callable[[Path], None]
TOP = next(iter(SIZES))
INFO, STATS = "meta/info.json", "meta/stats.json"
EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
OLD_DATA, OLD_VIDEO = "data/chunk-000/episode_000001.parquet", f"videos/chunk-000/{TOP}/episode_000001.mp4"
VIDEO = f"videos/{TOP}/chunk-000/file-000.mp4"


def text(file: str, content: str | bytes) -> Damage:
    """Replace a file's content."""
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)  # type: ignore[return-value]


def gone(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def cut(file: str, share: float = 0.6) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(share * len(content))])

    return damage


def changed(file: str, change: Callable[[Any], Any]) -> Damage:
    """Change a JSON file's object; a change that returns something replaces it."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        new = change(content)
        (folder / file).write_text(json.dumps(content if new is None else new))

    return damage


def entry(key: str, value: Any) -> Damage:
    """Set an entry of info.json; ... removes it."""
    return changed(INFO, lambda info: {k: v for k, v in {**info, key: value}.items() if v is not ...})


def feature(name: str, **values: Any) -> Damage:
    """Set entries of a feature in info.json; ... removes one."""

    def change(info: dict[str, Any]) -> None:
        both = {**info["features"][name], **values}
        info["features"][name] = {k: v for k, v in both.items() if v is not ...}

    return changed(INFO, change)


def column(file: str, name: str, change: Callable[[list[Any]], Any]) -> Damage:
    """Change the values of a parquet column; a change that returns None drops the column."""

    def damage(folder: Path) -> None:
        table = pq.read_table(folder / file)
        place, new = table.column_names.index(name), change(table[name].to_pylist())
        table = table.remove_column(place)
        if new is not None:
            table = table.add_column(place, name, new if isinstance(new, pa.Array) else pa.array(new))
        pq.write_table(table, folder / file)

    return damage


def at(row: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value if i == row else x for i, x in enumerate(values)]


def rows(file: str, change: Callable[[pa.Table], pa.Table]) -> Damage:
    return lambda folder: pq.write_table(change(pq.read_table(folder / file)), folder / file)


def lines(file: str, change: Callable[[list[str]], list[str]]) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / file).read_text().splitlines()
        (folder / file).write_text("\n".join(change(content)) + "\n")

    return damage


def stat(name: str, key: str, value: Any) -> Damage:
    return changed(STATS, lambda stats: stats[name].update({key: value}))


def image(value: Any) -> Damage:
    return column(DATA, TOP, at(3, {"bytes": value, "path": None}))


def video(file: str, frames: int, **options: Any) -> Damage:
    return lambda folder: write_video(folder / file, pictures(TOP, 0, frames), **options)


def old_stats(change: Callable[[dict[str, Any]], None]) -> Damage:
    def line(content: str) -> str:
        row = json.loads(content)
        change(row)
        return json.dumps(row)

    return lines("meta/episodes_stats.jsonl", lambda content: [*content[:1], line(content[1]), *content[2:]])


# Name -> the damage, and words that its line must hold.
NEW_IMAGES: dict[str, tuple[Damage, str]] = {  # v3.0, images inside the tables
    "info empty": (text(INFO, ""), "meta/info.json: is not JSON: it is empty"),
    "info cut": (cut(INFO), "meta/info.json: is not JSON"),
    "info binary": (text(INFO, b"\xff\xfe\x00"), "meta/info.json: is not JSON"),
    "info a list": (text(INFO, "[]"), "meta/info.json: must hold an object"),
    "info nested deeply": (text(INFO, "[" * 100_000), "meta/info.json: is nested too deeply"),
    "info gone": (gone(INFO), "no dataset at"),
    "no version": (entry("codebase_version", ...), "no codebase_version"),
    "unknown version": (entry("codebase_version", "v9.9"), "has layout v9.9; v2.1 and v3.0 can be read"),
    "version a number": (entry("codebase_version", 3), "has layout 3"),
    "no fps": (entry("fps", ...), "has no fps"),
    "fps zero": (entry("fps", 0), "fps=0 must be a number above 0"),
    "fps NaN": (entry("fps", float("nan")), "fps=nan must be"),
    "fps text": (entry("fps", "fast"), "fps=fast must be"),
    "no features": (entry("features", ...), "has no features"),
    "features a list": (entry("features", []), "features=[] must be an object"),
    "no data_path": (entry("data_path", ...), "has no data_path"),
    "data_path outside": (
        entry("data_path", "../../{chunk_index}/{file_index}"),
        "no pattern of a file in the dataset",
    ),
    "data_path unknown field": (entry("data_path", "data/{nothing}.parquet"), "no pattern of a file in the dataset"),
    "frames miscounted": (entry("total_frames", 18), "total_frames=18, but meta/episodes lists 17"),
    "frames negative": (entry("total_frames", -1), "total_frames=-1 must be a whole number"),
    "episodes miscounted": (entry("total_episodes", 2), "total_episodes=2, but meta/episodes lists 3"),
    "feature without dtype": (feature("action", dtype=...), "feature 'action' has no dtype"),
    "feature without shape": (feature("action", shape=...), "feature 'action' has shape None"),
    "feature of negative shape": (feature("action", shape=[-3]), "feature 'action' has shape [-3]"),
    "action narrower than said": (feature("action", shape=[4]), "column 'action' has not 4 values"),
    "action renamed": (changed(INFO, lambda i: i["features"].pop("action") and None), "usually 'action'"),
    "action a text": (feature("action", dtype="string"), "usually 'action'"),
    "camera of one colour": (feature(TOP, shape=[32, 48, 1]), "3 colours"),
    "camera of another size": (feature(TOP, shape=[48, 48, 3]), "is 32 x 48 pixels, but meta/info.json says 48 x 48"),
    "tasks gone": (gone("meta/tasks.parquet"), "meta/tasks.parquet: is missing"),
    "tasks cut": (cut("meta/tasks.parquet"), "meta/tasks.parquet: cannot be read as parquet"),
    "tasks without index": (
        column("meta/tasks.parquet", "task_index", lambda v: None),
        "must have a column task_index",
    ),
    "task null": (column("meta/tasks.parquet", "__index_level_0__", at(1, None)), "task_index=1 is None, not a text"),
    "task twice": (column("meta/tasks.parquet", "task_index", lambda v: [0, 0]), "task_index=0 occurs twice"),
    "task negative": (column("meta/tasks.parquet", "task_index", lambda v: [0, -1]), "task_index=-1 must be"),
    "episodes gone": (gone(EPISODES), "meta/episodes: holds no"),
    "episodes empty": (text(EPISODES, ""), "cannot be read as parquet"),
    "episodes without length": (column(EPISODES, "length", lambda v: None), "has no column 'length'"),
    "episode of null length": (column(EPISODES, "length", at(1, None)), "column 'length' holds None in row 1"),
    "episode of other length": (
        column(EPISODES, "length", lambda v: [6, 5, 6]),
        "disagrees with meta/episodes in row 10",
    ),
    "episode without frames": (column(EPISODES, "length", lambda v: [10, 0, 7]), "episode 1 has no frames"),
    "episode twice": (column(EPISODES, "episode_index", lambda v: [0, 1, 1]), "episode 1 occurs twice"),
    "episode in no file": (column(EPISODES, "data/file_index", at(2, 7)), "file-007.parquet: is missing"),
    "data gone": (gone(DATA), f"{DATA}: is missing"),
    "data empty": (text(DATA, ""), f"{DATA}: cannot be read as parquet"),
    "data cut": (cut(DATA), f"{DATA}: cannot be read as parquet"),
    "data garbage": (text(DATA, b"PAR1" + bytes(900) + b"PAR1"), f"{DATA}: cannot be read as parquet"),
    "rows missing": (rows(DATA, lambda t: t.slice(0, 16)), "has 16 rows, but meta/episodes gives its episodes 17"),
    "rows swapped": (rows(DATA, lambda t: t.take([1, 0, *range(2, 17)])), "column 'frame_index' does not count"),
    "action gone": (column(DATA, "action", lambda v: None), "has no column 'action'"),
    "episode_index gone": (column(DATA, "episode_index", lambda v: None), "has no column 'episode_index'"),
    "camera gone": (column(DATA, TOP, lambda v: None), f"has no column '{TOP}'"),
    "action NaN": (column(DATA, "action", at(4, [0.0, float("nan"), 0.0])), "column 'action' is NaN in row 4"),
    "action infinite": (column(DATA, "action", at(4, [0.0, float("inf"), 0.0])), "'action' is infinite in row 4"),
    "action beyond f32": (column(DATA, "action", at(4, [0.0, 1e300, 0.0])), "'action' is infinite in row 4"),
    "action null": (column(DATA, "action", at(4, None)), "column 'action' is null in row 4"),
    "action half null": (column(DATA, "action", at(4, [0.0, None, 0.0])), "column 'action' holds null in row 4"),
    "action ragged": (column(DATA, "action", at(4, [0.0, 1.0])), "'action' has not 3 values"),
    "action texts": (column(DATA, "action", lambda v: ["left"] * 17), "column 'action' holds string, not numbers"),
    "action one number": (column(DATA, "action", lambda v: [0.5] * 17), "'action' has one value in each row"),
    "action shifted": (column(DATA, "action", at(4, [9.0, 0.0, 0.0])), "meta/stats.json: action column 0: max is"),
    "state NaN": (column(DATA, "observation.state", at(0, [float("nan")] * 4)), "'observation.state' is NaN in row 0"),
    "task_index negative": (column(DATA, "task_index", at(5, -1)), "'task_index' is -1, which no task has, in row 5"),
    "task_index too large": (column(DATA, "task_index", at(5, 2)), "'task_index' is 2, which no task has, in row 5"),
    "task_index null": (column(DATA, "task_index", at(5, None)), "column 'task_index' is null in row 5"),
    "episode_index wrong": (
        column(DATA, "episode_index", at(5, 2)),
        "'episode_index' disagrees with meta/episodes in row 5",
    ),
    "episode_index null": (column(DATA, "episode_index", at(5, None)), "column 'episode_index' is null in row 5"),
    "frame_index repeated": (column(DATA, "frame_index", at(5, 4)), "column 'frame_index' does not count"),
    "index wrong": (column(DATA, "index", at(5, 99)), "column 'index' does not rise by 1 in row 5"),
    "timestamp NaN": (column(DATA, "timestamp", at(5, float("nan"))), "column 'timestamp' is NaN in row 5"),
    "timestamp falls": (column(DATA, "timestamp", at(5, 0.1)), "column 'timestamp' does not rise in row 5"),
    "image null": (image(None), f"column '{TOP}' has no image in row 3"),
    "image empty": (image(b""), f"image '{TOP}' cannot be decoded in row 3"),
    "image garbage": (image(b"no image at all"), f"image '{TOP}' cannot be decoded in row 3"),
    "image cut": (image(png(pictures(TOP, 3, 1)[0])[:-20]), f"image '{TOP}' cannot be decoded in row 3"),
    "image flipped": (
        image(png(pictures(TOP, 3, 1)[0])[:60] + b"\x07" + png(pictures(TOP, 3, 1)[0])[61:]),
        "cannot be decoded",
    ),
    "image of another size": (image(png(pictures(TOP, 3, 1)[0][:30])), "is 30 x 48 pixels, but meta/info.json says 32"),
    "images are numbers": (column(DATA, TOP, lambda v: [1.0] * 17), f"column '{TOP}' holds double, not images"),
    "stats cut": (cut(STATS), "meta/stats.json: is not JSON"),
    "stats a list": (text(STATS, "[]"), "meta/stats.json: must hold an object"),
    "stats NaN": (stat("action", "mean", [float("nan")] * 3), "action: 'mean' must be 3 finite numbers"),
    "stats too few": (stat("action", "min", [0.0]), "action: 'min' must be 3 finite numbers"),
    "stats texts": (stat("action", "min", "low"), "action has no numbers under 'min'"),
    "stats of other data": (stat("observation.state", "max", [9.0] * 4), "observation.state column 0: max is 9"),
}
NEW_VIDEOS: dict[str, tuple[Damage, str]] = {  # v3.0, videos
    "video gone": (gone(VIDEO), f"{VIDEO}: is missing"),
    "video empty": (text(VIDEO, ""), f"{VIDEO}: cannot be read as a video"),
    "video garbage": (text(VIDEO, b"x" * 5000), f"{VIDEO}: cannot be read as a video"),
    "video cut": (cut(VIDEO), f"{VIDEO}: cannot be read as a video"),
    "video too short": (video(VIDEO, 15), "episode 2 needs a frame at 1.500 s, but its last one is at 1.400 s"),
    "video too slow": (video(VIDEO, 17, fps=5), "needs a frame at 0.100 s, but none lies within 0.050 s"),
    "video of another size": (
        lambda folder: write_video(folder / VIDEO, [x[:30] for x in pictures(TOP, 0, 17)]),
        "is 30 x 48 pixels, but meta/info.json says 32 x 48",
    ),
    "no video_path": (entry("video_path", None), "has no video_path"),
    "video_path outside": (entry("video_path", "/tmp/{video_key}.mp4"), "no pattern of a file in the dataset"),
    "no video column": (column(EPISODES, f"videos/{TOP}/from_timestamp", lambda v: None), "has no column 'videos/"),
    "start NaN": (column(EPISODES, f"videos/{TOP}/from_timestamp", at(1, float("nan"))), "holds nan in row 1"),
    "start too late": (
        column(EPISODES, f"videos/{TOP}/from_timestamp", at(2, 5.0)),
        "episode 2 needs a frame at 5.000",
    ),
    "no times": (changed(INFO, lambda i: i["features"].pop("timestamp") and None), "has no feature 'timestamp'"),
}
OLD_VIDEOS: dict[str, tuple[Damage, str]] = {  # v2.1
    "info empty": (text(INFO, ""), "meta/info.json: is not JSON: it is empty"),
    "no chunks_size": (entry("chunks_size", ...), "chunks_size=None must be"),
    "tasks gone": (gone("meta/tasks.jsonl"), "meta/tasks.jsonl: is missing"),
    "tasks garbage": (lines("meta/tasks.jsonl", lambda x: [x[0], "{"]), "meta/tasks.jsonl: line 2 is not JSON"),
    "tasks binary": (text("meta/tasks.jsonl", b"\xff\xfe"), "meta/tasks.jsonl: is not text"),
    "task without sentence": (
        lines("meta/tasks.jsonl", lambda x: [x[0], '{"task_index": 1}']),
        "line 2 must be an object",
    ),
    "episodes gone": (gone("meta/episodes.jsonl"), "meta/episodes.jsonl: is missing"),
    "episode missing": (lines("meta/episodes.jsonl", lambda x: x[:2]), "total_episodes=3, but meta/episodes lists 2"),
    "episode twice": (lines("meta/episodes.jsonl", lambda x: [x[0], x[0], x[2]]), "episode 0 occurs twice"),
    "episode of text length": (
        lines("meta/episodes.jsonl", lambda x: [*x[:2], '{"episode_index": 2, "length": "7"}']),
        "episode_index=2 with length=7",
    ),
    "episode of other length": (
        lines(
            "meta/episodes.jsonl",
            lambda x: ['{"episode_index": 0, "length": 5}', '{"episode_index": 1, "length": 5}', x[2]],
        ),
        "has 6 rows, but meta/episodes gives its episodes 5",
    ),
    "stats garbage": (
        lines("meta/episodes_stats.jsonl", lambda x: ["{"]),
        "meta/episodes_stats.jsonl: line 1 is not JSON",
    ),
    "stats lack a feature": (
        old_stats(lambda row: row["stats"].pop("action")),
        "must hold min, max, mean, std and count",
    ),
    "stats of other data": (old_stats(lambda row: row["stats"]["action"].update(max=[5.0] * 3)), "max is 5"),
    "data gone": (gone(OLD_DATA), f"{OLD_DATA}: is missing"),
    "data cut": (cut(OLD_DATA), f"{OLD_DATA}: cannot be read as parquet"),
    "action NaN": (column(OLD_DATA, "action", at(1, [float("nan")] * 3)), "column 'action' is NaN in row 1"),
    "episode swapped": (column(OLD_DATA, "episode_index", lambda v: [2] * 4), "'episode_index' disagrees"),
    "video gone": (gone(OLD_VIDEO), f"{OLD_VIDEO}: is missing"),
    "video cut": (cut(OLD_VIDEO), f"{OLD_VIDEO}: cannot be read as a video"),
    "video too short": (video(OLD_VIDEO, 3), "episode 1 needs a frame at 0.300 s, but its last one is at 0.200 s"),
}
CASES = [("v3.0 images", NEW_IMAGES), ("v3.0 videos", NEW_VIDEOS), ("v2.1 videos", OLD_VIDEOS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets without a damage."""
    root = tmp_path_factory.mktemp("whole")
    kinds = {name: root / str(i) for i, (name, _) in enumerate(CASES)}
    for name, folder in kinds.items():
        write_dataset(folder, "v2.1" if name.startswith("v2.1") else "v3.0", video=name.endswith("videos"))
        DemoDataset(folder)
    return kinds


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, damages in CASES for name in damages])
def test_a_damage_is_refused_in_one_line(kind: str, name: str, whole: dict[str, Path], tmp_path: Path):
    damage, words = dict(CASES)[kind][name]
    folder = shutil.copytree(whole[kind], tmp_path / "own")
    damage(folder)
    with pytest.raises(UserError) as error:
        DemoDataset(folder)
    assert words in str(error.value)
    assert all(len(line) < 500 for line in str(error.value).splitlines())


def test_there_are_as_many_damages_as_were_once_tried():
    assert sum(len(damages) for _, damages in CASES) >= 49


def test_every_defect_has_a_line_of_its_own(whole: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(whole["v3.0 images"], tmp_path / "own")
    for name in ("action NaN", "task_index negative", "image cut"):
        NEW_IMAGES[name][0](folder)
    with pytest.raises(UserError) as error:
        DemoDataset(folder)
    first, *others = str(error.value).splitlines()
    assert first == f"dataset {folder} is damaged in 2 places:"
    assert others == [
        f"  {DATA}: column 'action' is NaN in row 4",
        f"  {DATA}: image '{TOP}' cannot be decoded in row 3",
    ]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset as rlinf writes it: with checksums."""
    folder = tmp_path_factory.mktemp("own") / "demos"
    with DatasetWriter(folder, SPEC) as writer:
        for i, length in enumerate((4, 3)):
            writer.add(**episode(i, length), task=("push", "pull")[i])
    return folder


def bytes_damaged(folder: Path, name: str) -> Iterator[bytes]:
    """The content of a file, cut at some lengths and with single bits flipped all over it."""
    content = (folder / name).read_bytes()
    rng = np.random.default_rng(0)
    for length in rng.integers(0, len(content), 4):
        yield content[:length]
    for position in rng.integers(0, len(content), 30):
        yield content[:position] + bytes([content[position] ^ (1 << rng.integers(8))]) + content[position + 1 :]


@pytest.mark.parametrize("name", [DATA, EPISODES, "meta/tasks.parquet"])
def test_bytes_cut_off_or_flipped_are_noticed_or_change_nothing(name: str, own: Path, tmp_path: Path):
    def read(folder: Path) -> list[Any]:
        data = DemoDataset(folder)
        _, obs, actions, _ = data.batch(range(len(data)), 2)
        return [obs.images, obs.wrist_images, obs.states, actions, obs.task_descriptions]

    wanted, folder = read(own), shutil.copytree(own, tmp_path / "own")
    refused = 0
    for content in bytes_damaged(own, name):
        (folder / name).write_bytes(content)
        try:
            found = read(folder)
        except UserError:
            refused += 1
            continue
        for a, b in zip(found, wanted, strict=True):
            assert a == b if isinstance(a, list) else a.equal(b)
    assert refused > 4
