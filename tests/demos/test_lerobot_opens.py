"""The lerobot package opens our dataset; runs where it is installed (an environment of its own)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="lerobot is not installed here")


def test_lerobot_reads_what_we_write(tmp_path: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from rlinf.demos.writer import DatasetWriter
    from tests.demos.test_dataset import SPEC, episode

    episodes = [episode(i, length) for i, length in enumerate((4, 3, 6))]
    with DatasetWriter(tmp_path / "demos", SPEC, file_bytes=1) as writer:
        for i, e in enumerate(episodes):
            writer.add(**e, task=("push", "pull")[i % 2], extra={"reset_id": 100 + i})
    data = LeRobotDataset("local/demos", root=tmp_path / "demos", delta_timestamps={"action": [0.0, 0.1, 0.2]})
    assert (data.num_episodes, data.num_frames, data.fps) == (3, 13, 10)
    item = data[5]  # second frame of the second episode
    assert item["task"] == "pull"
    image = (255 * item["observation.images.main"].numpy()).round().astype(np.uint8).transpose(1, 2, 0)
    assert np.array_equal(image, episodes[1]["images"][1])
    assert np.array_equal(item["observation.state"].numpy(), episodes[1]["states"][1])
    assert np.array_equal(item["action"].numpy(), episodes[1]["actions"][[1, 2, 2]])
    assert item["action_is_pad"].tolist() == [False, False, True]
    assert data.meta.stats["action"]["mean"].shape == (2,)
