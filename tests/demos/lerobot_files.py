"""Small datasets in LeRobot's layouts v2.1 and v3.0, with images or videos, whose pictures say which frame they are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

FPS = 10
LENGTHS = (6, 4, 7)
TASKS = ("pick the cube", "push the cube")
SIZES = {"observation.images.top": (32, 48), "observation.images.wrist": (32, 32)}
Version = Literal["v2.1", "v3.0"]
V21_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
V21_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
V3_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
V3_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def level(camera: str, index: int) -> int:
    """The grey level of a camera's picture of frame `index` of the dataset."""
    return 10 + 13 * index if camera.endswith("top") else 245 - 13 * index


def pictures(camera: str, first: int, count: int) -> list[np.ndarray]:
    return [np.full((*SIZES[camera], 3), level(camera, first + t), np.uint8) for t in range(count)]


def write_video(path: Path, frames: list[np.ndarray], *, fps: int = FPS, gop: int = 5) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "4", "g": str(gop), "threads": "1"})
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def numbers(seed: int = 0) -> dict[str, np.ndarray]:
    """States f32 [M, 4] and actions f32 [M, 3] of all frames."""
    rng, count = np.random.default_rng(seed), sum(LENGTHS)
    return {
        "observation.state": rng.standard_normal((count, 4)).astype(np.float32),
        "action": rng.uniform(-1, 1, (count, 3)).astype(np.float32),
    }


def stats_of(x: np.ndarray) -> dict[str, Any]:
    x = x.reshape(len(x), -1).astype(np.float64)
    out = {"min": x.min(0), "max": x.max(0), "mean": x.mean(0), "std": x.std(0)}
    return {key: value.tolist() for key, value in out.items()} | {"count": [len(x)]}


def write_dataset(folder: Path, version: Version, *, video: bool, names: dict[str, str] | None = None) -> Path:
    """A dataset of three episodes and two tasks; `names` renames its features."""
    names = names or {}
    starts = [0, *np.cumsum(LENGTHS[:-1]).tolist()]
    columns: dict[str, Any] = {name: list(x) for name, x in numbers().items()}
    columns["timestamp"] = np.concatenate([np.arange(n) / FPS for n in LENGTHS]).astype(np.float32)
    columns["frame_index"] = np.concatenate([np.arange(n) for n in LENGTHS])
    columns["episode_index"] = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    columns["index"] = np.arange(sum(LENGTHS))
    columns["task_index"] = columns["episode_index"] % 2
    features: dict[str, Any] = {
        name: {"dtype": "float32", "shape": [x.shape[1]], "names": None} for name, x in numbers().items()
    }
    features |= {n: {"dtype": str(columns[n].dtype), "shape": [1], "names": None} for n in list(columns)[2:]}
    for camera, size in SIZES.items():
        kind = "video" if video else "image"
        features[camera] = {"dtype": kind, "shape": [*size, 3], "names": ["height", "width", "channels"]}
        if not video:
            columns[camera] = [{"bytes": png(x), "path": None} for x in pictures(camera, 0, sum(LENGTHS))]
    numeric = {n: np.stack(x) if isinstance(x, list) else x for n, x in columns.items() if n not in SIZES}
    table = pa.table({names.get(name, name): values for name, values in columns.items()})
    info: dict[str, Any] = {
        "codebase_version": version,
        "robot_type": "so100",
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(LENGTHS)}"},
        "data_path": V21_DATA if version == "v2.1" else V3_DATA,
        "video_path": (V21_VIDEO if version == "v2.1" else V3_VIDEO) if video else None,
        "features": {names.get(name, name): feature for name, feature in features.items()},
    }
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))
    cameras = {camera: names.get(camera, camera) for camera in SIZES} if video else {}
    if version == "v2.1":
        _write_v21(folder, table, {names.get(n, n): x for n, x in numeric.items()}, starts, cameras)
    else:
        _write_v3(folder, table, {names.get(n, n): x for n, x in numeric.items()}, starts, cameras)
    return folder


def _write_v21(
    folder: Path, table: pa.Table, numeric: dict[str, np.ndarray], starts: list[int], cameras: dict[str, str]
) -> None:
    episodes, stats = [], []
    (folder / "data/chunk-000").mkdir(parents=True)
    for i, (first, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        pq.write_table(table.slice(first, length), folder / V21_DATA.format(episode_chunk=0, episode_index=i))
        for camera, name in cameras.items():
            path = folder / V21_VIDEO.format(episode_chunk=0, video_key=name, episode_index=i)
            write_video(path, pictures(camera, first, length))
        episodes.append({"episode_index": i, "tasks": [TASKS[i % 2]], "length": length})
        own = {name: stats_of(x[first : first + length]) for name, x in numeric.items()}
        stats.append({"episode_index": i, "stats": own})
    tasks = [{"task_index": i, "task": task} for i, task in enumerate(TASKS)]
    for name, rows in (("episodes", episodes), ("episodes_stats", stats), ("tasks", tasks)):
        (folder / f"meta/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_v3(
    folder: Path, table: pa.Table, numeric: dict[str, np.ndarray], starts: list[int], cameras: dict[str, str]
) -> None:
    count = len(LENGTHS)
    columns: dict[str, Any] = {"episode_index": list(range(count)), "length": list(LENGTHS)}
    columns |= {"tasks": [[TASKS[i % 2]] for i in range(count)]}
    columns |= {"data/chunk_index": [0] * count, "data/file_index": [0] * count, "dataset_from_index": starts}
    for camera, name in cameras.items():
        columns |= {f"videos/{name}/chunk_index": [0] * count, f"videos/{name}/file_index": [0] * count}
        columns |= {f"videos/{name}/from_timestamp": [first / FPS for first in starts]}
        path = folder / V3_VIDEO.format(video_key=name, chunk_index=0, file_index=0)
        write_video(path, pictures(camera, 0, sum(LENGTHS)))
    (folder / "data/chunk-000").mkdir(parents=True)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(table, folder / "data/chunk-000/file-000.parquet")
    pq.write_table(pa.table(columns), folder / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": list(TASKS)}), folder / "meta/tasks.parquet")
    (folder / "meta/stats.json").write_text(json.dumps({name: stats_of(x) for name, x in numeric.items()}))
