"""Asynchronous runs: staleness is bounded, evaluations and checkpoints see their own step, runs repeat exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf.commands.jobs import make_runner
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import RunnerConfig
from rlinf.errors import UserError
from rlinf.metrics.run_log import RunLog
from rlinf.runner import Runner
from rlinf.runner_async import AsyncRunner, next_barrier
from rlinf.runtime.ray.devices import groups_without_nccl
from tests.runs import FEW_MANISKILL, toy_config

APART = ["cluster.virtual_devices=2", "cluster.component_placement={actor: 0, 'env,rollout': 1}"]
STALE = ["runner.max_staleness=1", "algorithm.loss_type=decoupled_actor_critic"]


def run(folder: Path, address: str, *overrides: str) -> tuple[list[dict[str, float]], Runner]:
    """A whole run; what metrics.jsonl says but for times."""
    cfg = toy_config(folder, f"cluster.ray_address={address}", *APART, "actor.micro_batch_size=16", *overrides)
    runner = make_runner(cfg, make_plan(cfg), RunLog(cfg))
    try:
        runner.train()
    finally:
        runner.close()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "system/"))} for line in lines
    ], runner


def test_the_runner_is_chosen_by_staleness(tmp_path, ray_address):
    metrics, runner = run(tmp_path, ray_address, *STALE, "runner.max_epochs=5", "runner.save_interval=3")
    assert type(runner) is AsyncRunner
    # A rollout acts before the update beside it; before the checkpoint after step 3 nothing runs ahead.
    assert [m["rollout/staleness"] for m in metrics] == [0, 1, 1, 0, 1]
    # Stale experience is told apart: the proximal policy is the actor's own, the behaviour policy is not.
    assert all(m["train/actor/logprob_gap"] <= 2e-5 for m in metrics)
    assert [m["train/actor/behav_approx_kl"] == pytest.approx(0, abs=1e-5) for m in metrics] == [
        not m["rollout/staleness"] for m in metrics
    ]

    resumed, _ = run(
        tmp_path, ray_address, *STALE, "runner.max_epochs=5", "runner.save_interval=3",
        f"runner.resume_dir={tmp_path}/{runner.folder.name}/checkpoints/global_step_3",
    )  # fmt: skip
    assert [m["step"] for m in resumed] == [1, 2, 3, 4, 5]
    for before, after in zip(metrics[3:], resumed[3:], strict=True):
        assert {k: v for k, v in after.items() if "bytes" not in k} == {
            k: v for k, v in before.items() if "bytes" not in k
        }


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("maniskill_async_ppo_openpi", 10, marks=pytest.mark.slow),
        pytest.param("maniskill_async_ppo_openpi_pi05", 10, marks=pytest.mark.slow),
        pytest.param("maniskill_async_ppo_openvla", 4, marks=pytest.mark.slow),
        pytest.param("maniskill_async_ppo_openvlaoft", 8, marks=pytest.mark.slow),
    ],
)
def test_the_published_recipes_run_asynchronously(tmp_path, ray_address, maniskill_path, name, steps):
    """On one accelerator that both share, as the recipes place them."""
    where = [f"cluster.ray_address={ray_address}", "cluster.virtual_devices=1", "runner.max_epochs=2"]
    where += ["cluster.component_placement={'env,rollout,actor': 0}", f"runner.logger.log_path={tmp_path}"]
    length = [f"env.train.max_episode_steps={steps}", f"env.train.max_steps_per_rollout_epoch={2 * steps}"]
    batch = ["actor.global_batch_size=4", "actor.optim.critic_warmup_steps=0"]
    cfg = load_config(name, [*FEW_MANISKILL, *where, *length, *batch])
    runner = make_runner(cfg, make_plan(cfg), RunLog(cfg))
    try:
        runner.train()
    finally:
        runner.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [m["rollout/staleness"] for m in lines] == [0, 1]
    assert all(m["train/actor/logprob_gap"] <= 2e-5 for m in lines)
    assert [m["env/num_trajectories"] for m in lines] == [4, 4]
    assert lines[0]["sync/bytes"] > 0


def test_rollout_and_actor_may_share_their_accelerators():
    """As in the published recipes: `env,rollout,actor: 0-3` are eight processes on four accelerators."""
    cfg = load_config("maniskill_async_ppo_openvla", purpose="plan", devices=[4])
    plan = make_plan(cfg, [4])
    assert [[worker.role for worker in process.workers] for process in plan.processes] == [["env", "rollout"]] * 4 + [
        ["actor"]
    ] * 4
    assert plan.rollout_copies == (0, 1, 2, 3)
    assert groups_without_nccl(plan) == {"sync"}  # actor 0 and rollout 0 use one accelerator


@pytest.mark.slow
def test_copies_that_are_synced_less_often_are_told_apart_too(tmp_path, ray_address):
    """Every other rollout acts with the weights before the last update, around which the loss must not clip."""
    settings = ["runner.weight_sync_interval=2", "algorithm.loss_type=decoupled_actor_critic", "runner.max_epochs=4"]
    metrics, runner = run(tmp_path, ray_address, *settings)
    assert type(runner) is Runner
    assert all(m["train/actor/logprob_gap"] <= 2e-5 for m in metrics)
    told = [m["train/actor/behav_approx_kl"] != pytest.approx(0, abs=1e-5) for m in metrics]
    assert told == [False, True, False, True]


@pytest.mark.slow
def test_without_staleness_the_decoupled_loss_is_the_plain_one(tmp_path, ray_address):
    plain, runner = run(tmp_path / "plain", ray_address, "runner.max_epochs=2")
    decoupled, _ = run(
        tmp_path / "decoupled", ray_address, "runner.max_epochs=2", "algorithm.loss_type=decoupled_actor_critic"
    )
    assert type(runner) is Runner
    assert [m["train/actor/total_loss"] for m in decoupled] == [m["train/actor/total_loss"] for m in plain]


@pytest.mark.parametrize(
    ("total", "evaluate", "save", "barriers"),
    [(10, 4, 6, [4, 4, 4, 4, 6, 6, 8, 8, 10, 10]), (3, -1, -1, [3, 3, 3])],
)
def test_nothing_runs_past_an_evaluation_a_checkpoint_or_the_end(total, evaluate, save, barriers):
    runner = RunnerConfig(val_check_interval=evaluate, save_interval=save)
    assert [next_barrier(step, runner, total) for step in range(total)] == barriers


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["runner.max_staleness=1", "cluster.backend=local"],
            r"backend=local rolls out and learns in turn; runner.max",
        ),
        (["runner.max_staleness=-1"], r"max_staleness=-1 must be an integer from 0 to 1000"),
    ],
)
def test_what_cannot_run_asynchronously_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("toy_ppo_compact", overrides)
