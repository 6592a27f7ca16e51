"""The published MetaWorld recipes with a compact π0 and a few envs, from end to end in the real simulator."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.data.types import Trajectory
from rlinf.models.openpi.policy import Policy as OpenPiPolicy
from rlinf.rollout_loop import roll_out
from rlinf.storage.step_checkpoint import Manifest
from rlinf.workers.actor import ActorWorker
from tests.inside import worker
from tests.runs import make_runner

RENDER = "{image_size: 64, render: fast}"
FEW = [
    "actor.model.size=compact",
    "runner.max_epochs=1",
    "runner.logger.logger_backends=[]",
    "algorithm.update_epoch=1",
    "env.train.total_num_envs=4",
    "env.train.rollout_epoch=1",
    "env.train.max_episode_steps=10",
    "env.train.max_steps_per_rollout_epoch=10",
    "env.train.video_cfg.save_video=false",
    "env.train.num_processes=1",
    f"env.train.init_params={RENDER}",
    "actor.micro_batch_size=8",
    "actor.global_batch_size=8",
]
DRAWER = [  # a random policy closes it now and then, so there is something to learn from
    "env.train.task_suite_name=drawer-close-v3",
    "env.train.total_num_envs=8",
    "env.train.max_episode_steps=40",
    "env.train.max_steps_per_rollout_epoch=40",
    "actor.micro_batch_size=16",
    "actor.global_batch_size=32",
]


def config(folder: Path, *overrides: str, name: str = "metaworld_50_ppo_openpi") -> Config:
    return load_config(name, [*FEW, f"runner.logger.log_path={folder}", *overrides])


def train(cfg: Config) -> dict[str, float]:
    """Run it; returns the line of the last step in metrics.jsonl."""
    runner = make_runner(cfg)
    try:
        runner.train()
    finally:
        runner.close()
    lines = (Path(cfg.runner.logger.log_path) / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == cfg.runner.max_epochs
    return json.loads(lines[-1])


def rollout(cfg: Config) -> Trajectory:
    runner = make_runner(cfg)
    try:
        chunks = cfg.env.train.max_steps_per_rollout_epoch // cfg.actor.model.num_action_chunks
        runner.cluster.get(
            roll_out(runner.env, runner.rollout, runner.plan, mode="train", step=0, epochs=1, chunks=chunks)
        )
        return Trajectory.cat(runner.cluster.get(runner.rollout.call("trajectory")), dim=1).map(torch.clone)
    finally:
        runner.close()


def test_ppo_on_mt50_with_video_evaluation_and_checkpoint(tmp_path):
    """Four tasks of MT50 at once, an evaluation and a checkpoint after the step."""
    cfg = config(
        tmp_path,
        "runner.val_check_interval=1",
        "env.eval.total_num_envs=2",
        "env.eval.num_trials=2",
        "env.eval.max_episode_steps=10",
        "env.eval.max_steps_per_rollout_epoch=10",
        "env.eval.num_processes=1",
        f"env.eval.init_params={RENDER}",
    )
    metrics = train(cfg)
    assert metrics["train/actor/optimizer_steps"] == 1
    assert metrics["train/actor/logprob_gap"] <= 2e-5
    assert metrics["env/num_trajectories"] == 4
    assert metrics["eval/num_trajectories"] == 2
    assert Manifest.read(tmp_path / "metaworld_50_ppo_openpi/checkpoints/global_step_1").step == 1
    trials = json.loads((tmp_path / "eval/step_1/result.json").read_text())["episodes"]
    assert len({t["task"] for t in trials}) == 2
    assert len(list((tmp_path / "video/eval").rglob("*.mp4"))) == 1
    assert (tmp_path / "report.html").is_file()


def test_grpo_compares_two_plays_of_each_layout(tmp_path):
    grpo = ["algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=2"]
    metrics = train(config(tmp_path, *DRAWER, *grpo, "actor.model.add_value_head=false"))
    assert metrics["train/actor/optimizer_steps"] == 2
    assert metrics["train/actor/logprob_gap"] <= 2e-5
    assert metrics["train/actor/grad_norm"] > 0  # somewhere one of the two succeeded
    assert not any("critic" in name for name in metrics)


def test_one_and_two_stages_give_equal_trajectories(tmp_path):
    """Discrete things are equal; numbers of the first chunk up to the rounding of other batch sizes."""
    one, two = (rollout(config(tmp_path / str(n), *DRAWER, f"rollout.pipeline_stage_num={n}")) for n in (1, 2))
    assert 0 < one.rewards.sum() < 8
    for name in ("terminated", "truncated", "valid", "rewards"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for name in ("images", "tokens", "token_valid", "index"):
        assert torch.equal(one.replay[name][0], two.replay[name][0]), name
    assert (one.replay["x"][0] - two.replay["x"][0]).abs().max() <= 1e-5
    assert (one.logprobs[0] - two.logprobs[0]).abs().max() <= 1e-5
    assert one.values is not None
    assert two.values is not None
    assert (one.values[0] - two.values[0]).abs().max() <= 1e-5


FROZEN = [*DRAWER, "actor.model.openpi.train_expert_only=true", "algorithm.update_epoch=2"]


def step_with_cache(folder: Path, device: int, host: int) -> tuple[dict[str, float], tuple[int, int]]:
    """One training step with these bytes for prefixes; its metrics but for where they lay, and rows in each tier."""
    shares = [f"rollout.prefix_cache_bytes={device}", f"rollout.prefix_cache_host_bytes={host}"]
    runner = make_runner(config(folder, *FROZEN, *shares))
    try:
        metrics = runner.step(0)
        counts = worker(runner, "rollout").arena.cache.counts()
    finally:
        runner.close()
    kept = {name: value for name, value in metrics.items() if not name.startswith(("time/", "rollout/prefixes"))}
    return kept, counts


def test_where_prefixes_are_kept_changes_no_metric(tmp_path, monkeypatch):
    row = config(tmp_path, *FROZEN).actor.model.cache_bytes_per_sample()
    monkeypatch.setattr("rlinf.data.row_cache.SLAB_BYTES", 5 * row)
    whole, counts = step_with_cache(tmp_path / "device", 64 * row, 0)
    assert counts == (64, 0)
    assert whole["train/actor/optimizer_steps"] == 4
    assert whole["train/actor/grad_norm"] > 0
    for device, host in ((23, 41), (0, 64)):  # the same numbers wherever they lie
        metrics, counts = step_with_cache(tmp_path / f"{device}", device * row, host * row)
        assert counts == (device, host)
        assert metrics == pytest.approx(whole, abs=0, rel=0, nan_ok=True)
    metrics, counts = step_with_cache(tmp_path / "some", 11 * row, 20 * row)  # the rest is computed again
    assert counts == (11, 20)
    assert metrics == pytest.approx(whole, abs=1e-6, rel=1e-6, nan_ok=True)


def test_a_device_out_of_memory_gives_up_prefixes_and_goes_on(tmp_path, monkeypatch):
    row = config(tmp_path, *FROZEN).actor.model.cache_bytes_per_sample()
    monkeypatch.setattr("rlinf.data.row_cache.SLAB_BYTES", 4 * row)
    plenty, _ = step_with_cache(tmp_path / "plenty", 64 * row, 0)
    loss, predict, calls, predictions = ActorWorker.loss, OpenPiPolicy.predict, itertools.count(), itertools.count()

    def scarce_update(self, *args, **kwargs):
        if next(calls) in (1, 4):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(self, *args, **kwargs)

    def scarce_rollout(self, *args, **kwargs):
        if next(predictions) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return predict(self, *args, **kwargs)

    monkeypatch.setattr(ActorWorker, "loss", scarce_update)
    monkeypatch.setattr(OpenPiPolicy, "predict", scarce_rollout)
    metrics, counts = step_with_cache(tmp_path / "scarce", 64 * row, 40 * row)
    assert counts[0] < 16
    assert counts[1] == 40  # what the device gave up moved to the host, as far as it had room
    assert metrics == pytest.approx(plenty, abs=1e-6, rel=1e-6, nan_ok=True)
