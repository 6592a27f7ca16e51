"""The published CALVIN recipes with a compact policy and a few envs, from end to end in the real simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf.config.load import load_config
from tests.runs import make_runner

pytestmark = pytest.mark.usefixtures("calvin_path")

SMALL = "{image_size: 32, wrist_image_size: 32, render: fast, renderer: tiny}"
FEW = [
    "actor.model.size=compact",
    "runner.max_epochs=1",
    "runner.save_interval=-1",
    "runner.logger.logger_backends=[]",
    "algorithm.update_epoch=1",
    "env.train.total_num_envs=4",
    "env.train.rollout_epoch=1",
    "env.train.max_episode_steps=10",
    "env.train.max_steps_per_rollout_epoch=10",
    "env.train.video_cfg.save_video=false",
    "env.train.num_processes=2",
    f"env.train.init_params={SMALL}",
    "actor.micro_batch_size=8",
    "actor.global_batch_size=8",
]


def run(folder: Path, name: str, *overrides: str) -> dict[str, float]:
    """Train one step; returns its line in metrics.jsonl."""
    cfg = load_config(name, [*FEW, f"runner.logger.log_path={folder}", *overrides])
    runner = make_runner(cfg)
    try:
        runner.train()
    finally:
        runner.close()
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


def test_ppo_on_abc_with_an_evaluation_on_d(tmp_path: Path) -> None:
    metrics = run(
        tmp_path,
        "calvin_abc_d_ppo_openpi_pi05",
        "runner.val_check_interval=1",
        "env.eval.total_num_envs=2",
        "env.eval.num_processes=2",
        "env.eval.max_episode_steps=10",
        "env.eval.max_steps_per_rollout_epoch=10",
        "env.eval.video_cfg.max_envs=1",
        "env.eval.init_params={image_size: 32, wrist_image_size: 32, render: fast, renderer: tiny, eval_sequences: 3}",
    )
    assert metrics["env/num_trajectories"] == 4
    assert metrics["env/restarts"] == 0
    assert metrics["eval/num_trajectories"] == 3
    assert metrics["train/actor/logprob_gap"] < 1e-4
    written = json.loads((tmp_path / "eval/step_1/result.json").read_text())
    lengths = [written["metrics"][f"success_len_{n}"] for n in range(1, 6)]
    assert written["metrics"]["avg_num_subtasks"] == metrics["eval/avg_num_subtasks"] == pytest.approx(sum(lengths))
    assert lengths == sorted(lengths, reverse=True)
    assert written["rates"]["success_len_1"]["trials"] == 3
    assert [e["task"] for e in written["episodes"]] == ["chain-D"] * 3
    assert "rotate_blue_block_right/success_once" in (tmp_path / "report.html").read_text()
    assert list((tmp_path / "video/eval").rglob("*.mp4"))


def test_grpo_on_single_tasks(tmp_path: Path) -> None:
    tasks = SMALL.replace("{", "{tasks: [turn_on_led, open_drawer], ")
    settings = ["algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=2"]
    metrics = run(
        tmp_path,
        "calvin_d_d_ppo_openpi",
        *settings,
        "actor.model.add_value_head=false",
        f"env.train.init_params={tasks}",
        "env.train.use_ordered_reset_state_ids=true",
    )
    assert {"env/task/turn_on_led/success_once", "env/task/open_drawer/success_once"} <= set(metrics)
    assert "env/avg_len" not in metrics
