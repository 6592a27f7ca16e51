"""OpenVLA and OpenVLA-OFT from end to end: the toy recipes, and the published MetaWorld one with a compact network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.storage.step_checkpoint import Manifest
from tests.inside import worker
from tests.runs import make_runner, toy_config

SHORT = ["runner.max_epochs=1", "algorithm.update_epoch=1", "env.train.total_num_envs=8", "env.train.rollout_epoch=1"]
BATCH = ["actor.micro_batch_size=16", "actor.global_batch_size=32"]
DRAWER = [  # a random policy closes it now and then, so there is something to learn from
    "actor.model.size=compact",
    "runner.logger.logger_backends=[]",
    "algorithm.group_size=2",
    "algorithm.rewards_upper_bound=4.9",
    "env.train.task_suite_name=drawer-close-v3",
    "env.train.max_episode_steps=40",
    "env.train.max_steps_per_rollout_epoch=40",
    "env.train.video_cfg.save_video=false",
    "env.train.num_processes=1",
    "env.train.init_params={image_size: 64, render: fast}",
]


def train(cfg: Config) -> dict[str, float]:
    """Run it; returns the last line of metrics.jsonl."""
    runner = make_runner(cfg)
    try:
        runner.train()
    finally:
        runner.close()
    return json.loads((Path(cfg.runner.logger.log_path) / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("toy_ppo_openvla_compact", []),
        ("toy_ppo_openvla_compact", ["actor.model.is_lora=true", "actor.model.lora_rank=4"]),
        ("toy_grpo_openvlaoft_compact", ["rollout.sampling_params.top_k=50", "algorithm.entropy_bonus=0.01"]),
        ("toy_grpo_openvlaoft_compact", ["rollout.pipeline_stage_num=2", "actor.model.is_lora=true"]),
    ],
)
def test_toy_recipes_train_evaluate_and_save(tmp_path, name, more):
    evaluation = [
        "runner.save_interval=1",
        "runner.val_check_interval=1",
        "env.eval.num_trials=8",
        "env.eval.total_num_envs=8",
    ]
    cfg = toy_config(tmp_path, *SHORT, *BATCH, *evaluation, *more, name=name)
    metrics = train(cfg)
    assert metrics["train/actor/optimizer_steps"] >= 1
    assert metrics["train/actor/logprob_gap"] <= 2e-5
    assert metrics["eval/num_trajectories"] == 8
    folder = tmp_path / name / "checkpoints/global_step_1"
    assert Manifest.read(folder).step == 1
    again = make_runner(toy_config(tmp_path / "again", *SHORT, *BATCH, *more, f"runner.ckpt_path={folder}", name=name))
    try:
        assert worker(again, "rollout").policy.cfg.model_path == str(folder / "actor/model")
    finally:
        again.close()


@pytest.mark.slow
def test_the_metaworld_recipe_trains_a_compact_policy(tmp_path):
    overrides = [*SHORT, *BATCH, *DRAWER, f"runner.logger.log_path={tmp_path}"]
    metrics = train(load_config("metaworld_50_grpo_openvlaoft", overrides))
    assert metrics["train/actor/optimizer_steps"] == 10
    assert metrics["train/actor/logprob_gap"] <= 2e-5
    assert metrics["env/num_trajectories"] == 8
    assert metrics["rollout/groups_kept"] > 0  # somewhere one of the two succeeded
    assert metrics["train/actor/grad_norm"] > 0


def test_one_and_two_stages_give_equal_tokens(tmp_path):
    trajectories = []
    for stages in (1, 2):
        cfg = toy_config(
            tmp_path / str(stages),
            *SHORT,
            *BATCH,
            f"rollout.pipeline_stage_num={stages}",
            name="toy_grpo_openvlaoft_compact",
        )
        runner = make_runner(cfg)
        try:
            runner.step(0)
            trajectories.append(worker(runner, "rollout").trajectory().map(torch.clone))
        finally:
            runner.close()
    one, two = trajectories
    assert torch.equal(one.replay["bins"], two.replay["bins"])
    assert torch.equal(one.rewards, two.rewards)
    assert (one.logprobs - two.logprobs).abs().max() <= 1e-5
