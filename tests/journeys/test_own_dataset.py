"""A person's own dataset: videos in the older layout, from the first mistake to a policy and back to a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demos.lerobot_files import write_dataset
from tests.journeys.terminal import row, types

SFT = "rlinf sft own_data_sft sft.dataset=data/arm sft.output=checkpoints/arm sft.steps=4 sft.batch_size=4 'runner.logger.logger_backends=[]'"  # noqa: E501


@pytest.mark.slow
def test_videos_in_the_older_layout_become_a_policy(tmp_path: Path):
    answer = types(SFT, tmp_path)
    assert answer.status == 2
    assert answer.lines[-1] == (
        "error: no dataset at data/arm (no meta/info.json); make one with: rlinf collect CONFIG"
    )
    write_dataset(tmp_path / "data/arm", "v2.1", video=True)
    video = tmp_path / "data/arm/videos/chunk-000/observation.images.top/episode_000001.mp4"
    whole = video.read_bytes()
    video.write_bytes(whole[:500])
    answer = types(SFT, tmp_path)
    assert answer.status == 2
    assert "Traceback" not in answer.text
    assert answer.lines[-1].startswith(
        "error: dataset data/arm is damaged: videos/chunk-000/observation.images.top/episode_000001.mp4: cannot be read"
    )
    video.write_bytes(whole)
    answer = types(SFT, tmp_path)
    assert (answer.status, row(answer, "policy")) == (0, "checkpoints/arm"), answer.text
    answer = types(SFT, tmp_path)
    assert answer.status == 2
    assert answer.lines[-1] == (
        "error: sft.output=checkpoints/arm is not empty; choose another folder, or replace it with --overwrite"
    )
    answer = types(f"{SFT} --overwrite && rlinf export checkpoints/arm checkpoints/plain", tmp_path)
    assert answer.status == 0, answer.text
    assert "policy      checkpoints/plain" in answer.lines
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["arm", "plain"]


@pytest.mark.slow
def test_rollouts_become_a_dataset(tmp_path: Path):
    train = "rlinf train toy_ppo_compact runner.max_steps=1 runner.save_interval=1 runner.logger.log_path=run"
    checkpoint = "run/toy_ppo_compact/checkpoints/global_step_1"
    few = "--rollouts toy_ppo_compact --episodes 3 env.eval.num_processes=1"
    answer = types(f"{train} && rlinf export {checkpoint} data/played {few}", tmp_path)
    assert (answer.status, row(answer, "dataset")) == (0, "data/played"), answer.text
    answer = types(f"rlinf export {checkpoint} data/played --successes-only", tmp_path)
    assert (answer.status, answer.lines[-1]) == (2, "error: --successes-only needs --rollouts CONFIG")
