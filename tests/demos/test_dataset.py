"""The dataset as written and read back. T frames, A action dims."""

from __future__ import annotations

import io
import json
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rlinf.demos.dataset import Batch, DemoDataset
from rlinf.demos.writer import PRIVILEGED, DatasetWriter, image_statistics, statistics
from rlinf.errors import UserError
from rlinf.simulators.contract import EnvSpec
from rlinf.simulators.png import encode_png, largest_png, png_size

SPEC = EnvSpec(
    suite="test",
    tasks=("a", "b"),
    action_dim=2,
    action_names=("x", "y"),
    gripper="none",
    state_dim=3,
    image_size=(8, 6),
    reset_ids={},
    control_hz=10.0,
    num_wrist_images=1,
    wrist_image_size=(4, 4),
)


def episode(seed: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "images": rng.integers(0, 256, (length, 8, 6, 3), dtype=np.uint8),
        "wrist_images": rng.integers(0, 256, (length, 1, 4, 4, 3), dtype=np.uint8),
        "states": rng.standard_normal((length, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (length, 2)).astype(np.float32),
    }


@pytest.fixture
def episodes() -> list[dict[str, np.ndarray]]:
    return [episode(i, length) for i, length in enumerate((4, 3, 6))]


@pytest.fixture
def folder(tmp_path: Path, episodes: list[dict[str, np.ndarray]]) -> Path:
    with DatasetWriter(tmp_path / "demos", SPEC, file_bytes=1) as writer:  # a file per episode
        for i, e in enumerate(episodes):
            writer.add(**e, task=("push", "pull")[i % 2], extra={"reset_id": 100 + i})
    return tmp_path / "demos"


def test_reads_back_what_was_written(folder: Path, episodes: list[dict[str, np.ndarray]]) -> None:
    data = DemoDataset(folder)
    assert (len(data), data.num_episodes, data.tasks) == (13, 3, ["push", "pull"])
    obs = data.observation(range(13))
    for key, got in (("images", obs.images), ("wrist_images", obs.wrist_images), ("states", obs.states)):
        assert np.array_equal(got.numpy(), np.concatenate([e[key] for e in episodes])), key
    assert np.array_equal(data.actions.numpy(), np.concatenate([e["actions"] for e in episodes]))
    assert obs.task_descriptions == ["push"] * 4 + ["pull"] * 3 + ["push"] * 6
    for limit in (0, 1 << 20):
        data.keep(torch.device("cpu"), lambda images: images[:, ::2], host_bytes=limit)
        assert torch.equal(data.observation([12, 0]).images, obs.images[[12, 0]][:, :: 2 if limit else 1])


def test_the_simulators_state_is_read_back(tmp_path: Path, folder: Path) -> None:
    spec, rng = replace(SPEC, critic_state_dim=3), np.random.default_rng(7)
    known = [rng.standard_normal((length, 3)).astype(np.float32) for length in (4, 2)]
    with DatasetWriter(tmp_path / "privileged", spec) as writer:
        for i, critic_states in enumerate(known):
            writer.add(**episode(i, len(critic_states)), critic_states=critic_states, task="push")
    data = DemoDataset(tmp_path / "privileged")
    assert data.privileged is not None
    assert np.array_equal(data.privileged.numpy(), np.concatenate(known))
    names = ["privileged_0", "privileged_1", "privileged_2"]
    assert data.layout.features[PRIVILEGED] == {"dtype": "float32", "shape": [3], "names": names}
    stats = json.loads((tmp_path / "privileged/meta/stats.json").read_text())
    assert stats[PRIVILEGED]["mean"] == pytest.approx(np.concatenate(known).mean(0).tolist(), abs=1e-6)
    without = DemoDataset(folder)  # of a simulator that tells nothing, or written before states were kept
    assert PRIVILEGED not in without.layout.features
    assert without.privileged is None


def test_chunks_say_which_actions_lie_beyond_the_episodes_end(folder: Path) -> None:
    data = DemoDataset(folder)
    _, _, chunks, is_target = data.batch([2, 6, 7], num_actions=3)
    rows = [[2, 3, 3], [6, 6, 6], [7, 8, 9]]
    assert torch.equal(chunks, data.actions[torch.tensor(rows)])
    assert is_target.tolist() == [[True, True, False], [True, False, False], [True, True, True]]


def test_every_frame_once_per_pass(folder: Path) -> None:
    data = DemoDataset(folder)
    rows = [r for batch in islice(data.row_batches(5, seed=3), 13) for r in batch]
    for i in range(5):
        assert sorted(rows[13 * i : 13 * i + 13]) == list(range(13))
    assert rows[:13] != rows[13:26]
    assert next(data.row_batches(5, seed=3)) == rows[:5]
    assert next(data.row_batches(5, seed=4)) != rows[:5]
    assert len(next(data.row_batches(40, seed=3))) == 40


def test_batches_go_on_from_any_and_are_the_same_wherever_images_are_kept(folder: Path) -> None:
    data = DemoDataset(folder)

    def some(first: int, count: int) -> list[Batch]:
        with closing(data.batches(5, 3, seed=3, first=first)) as batches:
            return list(islice(batches, count))

    wanted = [data.batch(rows, 3) for rows in islice(data.row_batches(5, seed=3), 8)]
    for host_bytes in (0, 1 << 20):  # decoded ahead by other threads, and kept
        assert ("decoded batch by batch" in data.keep(torch.device("cpu"), host_bytes=host_bytes)) == (host_bytes == 0)
        assert data.needs_host == (host_bytes == 0)
        for got, want in zip(some(0, 3) + some(3, 5), wanted, strict=True):
            assert torch.equal(got.rows, want.rows)
            assert torch.equal(got.obs.images, want.obs.images)
            assert torch.equal(got.obs.wrist_images, want.obs.wrist_images)
            assert got.obs.task_descriptions == want.obs.task_descriptions
            assert torch.equal(got.actions, want.actions)


def test_own_pngs_are_known_and_a_flipped_byte_is_noticed() -> None:
    image = episode(3, 1)["images"][0]
    png, other = encode_png(image), io.BytesIO()
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), image)
    assert png_size(png) == image.shape[:2]
    assert len(png) <= largest_png(*image.shape[:2])
    for at in range(len(png)):
        assert png_size(png[:at] + bytes([png[at] ^ 4]) + png[at + 1 :]) is None
    assert png_size(png[:-1]) is None
    Image.fromarray(image).save(other, "PNG", dpi=(1, 1))  # with a chunk that ours do not have
    assert png_size(other.getvalue()) is None


def test_statistics_of_images_are_those_of_their_pixels() -> None:
    images = episode(5, 7)["images"] // np.array([1, 3, 40], np.uint8)
    found, wanted = image_statistics(images), statistics(images.reshape(-1, 3) / 255.0)
    assert found.keys() == wanted.keys()
    assert found.pop("count") == [7]
    for name, values in found.items():
        assert np.array(values).shape == (3, 1, 1)
        assert np.array(values).ravel() == pytest.approx(wanted[name], abs=1e-12), name


def test_layout(folder: Path) -> None:
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert files == [
        "data/chunk-000/file-000.parquet",
        "data/chunk-000/file-001.parquet",
        "data/chunk-000/file-002.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
    ]
    info = json.loads((folder / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["total_frames"], info["splits"]) == (
        "v3.0",
        10,
        13,
        {"train": "0:3"},
    )
    table = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert table["dataset_from_index"] == [0, 4, 7]
    assert table["dataset_to_index"] == [4, 7, 13]
    assert table["data/file_index"] == [0, 1, 2]
    assert table["tasks"] == [["push"], ["pull"], ["push"]]
    assert table["reset_id"] == [100, 101, 102]
    frames = pq.read_table(folder / "data/chunk-000/file-001.parquet")
    assert frames["index"].to_pylist() == [4, 5, 6]
    assert frames["timestamp"].to_pylist() == pytest.approx([0.0, 0.1, 0.2])


def test_statistics_are_those_of_all_frames(folder: Path, episodes: list[dict[str, np.ndarray]]) -> None:
    stats = json.loads((folder / "meta/stats.json").read_text())
    actions = np.concatenate([e["actions"] for e in episodes]).astype(np.float64)
    for name, want in (("mean", actions.mean(0)), ("std", actions.std(0)), ("min", actions.min(0))):
        assert stats["action"][name] == pytest.approx(want.tolist())
    assert stats["action"]["count"] == [13]
    pixels = np.concatenate([e["images"].reshape(-1, 3) for e in episodes]) / 255
    assert np.array(stats["observation.images.main"]["mean"]).shape == (3, 1, 1)
    assert np.ravel(stats["observation.images.main"]["mean"]) == pytest.approx(pixels.mean(0))


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no dataset at .*nowhere \(no meta/info.json\); make one with: rlinf collect"):
        DemoDataset(tmp_path / "nowhere")
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v1.6"}))
    with pytest.raises(UserError, match=r"layout v1\.6; v2\.1 and v3\.0 can be read"):
        DemoDataset(folder)
