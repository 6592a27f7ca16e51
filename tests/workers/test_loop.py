"""One rollout through the real workers: equal for any number of stages, true to what the policy said."""

import weakref
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from rlinf.data.types import Trajectory
from rlinf.rollout_loop import roll_out
from rlinf.workers.rollout import shared_policy
from tests.inside import worker
from tests.runs import make_runner, toy_config


def rollout(folder, *overrides) -> Trajectory:
    """The first training rollout of a fresh run."""
    runner = make_runner(toy_config(folder, *overrides))
    try:
        env = runner.cfg.env.train
        chunks = env.max_steps_per_rollout_epoch // runner.cfg.actor.model.num_action_chunks
        runner.cluster.get(
            roll_out(
                runner.env,
                runner.rollout,
                runner.plan,
                mode="train",
                step=0,
                epochs=env.rollout_epoch,
                chunks=chunks,
            )
        )
        parts = runner.cluster.get(runner.rollout.call("trajectory"))
        return Trajectory.cat(parts, dim=1).map(torch.clone)
    finally:
        runner.close()


def test_only_the_first_epoch_of_a_step_begins_a_new_budget_of_restarts():
    env, plan = MagicMock(), MagicMock(stages=2)
    roll_out(env, MagicMock(), plan, mode="train", step=3, epochs=3, chunks=1)
    assert [c.kwargs["new_step"] for c in env.call.call_args_list] == [True, True, False, False, False, False]


@pytest.mark.parametrize("auto_reset", [False, True])
def test_one_and_two_stages_give_equal_trajectories(tmp_path, auto_reset):
    one, two = (
        rollout(
            tmp_path / str(stages),
            f"rollout.pipeline_stage_num={stages}",
            f"env.train.auto_reset={auto_reset}",
            "env.train.num_processes=1",
        )
        for stages in (1, 2)
    )
    # Different batch sizes per call: sums round differently, everything discrete must be equal.
    assert torch.equal(one.terminated, two.terminated)
    assert torch.equal(one.truncated, two.truncated)
    assert torch.equal(one.valid, two.valid)
    assert torch.equal(one.rewards, two.rewards)
    assert (one.logprobs[0] - two.logprobs[0]).abs().max() <= 1e-5
    assert (one.values[0] - two.values[0]).abs().max() <= 1e-5


def test_equal_batches_give_bit_equal_trajectories(tmp_path):
    one, two = (rollout(tmp_path / str(i), "env.train.auto_reset=true") for i in range(2))
    assert torch.equal(one.logprobs, two.logprobs)
    assert torch.equal(one.rewards, two.rewards)
    assert all(torch.equal(one.replay[k], two.replay[k]) for k in one.replay)


def test_first_minibatch_ratio_is_one(tmp_path):
    runner = make_runner(toy_config(tmp_path, "runner.max_epochs=1", "algorithm.update_epoch=1"))
    try:
        metrics = runner.step(0)
    finally:
        runner.close()
    assert metrics["train/actor/logprob_gap"] <= 2e-5
    assert 0 <= metrics["train/actor/clip_fraction"] <= 1
    assert metrics["train/actor/optimizer_steps"] == 2


def test_log_probs_of_the_rollout_are_those_of_the_update(tmp_path):
    runner = make_runner(toy_config(tmp_path, "env.train.rollout_epoch=1"))
    try:
        policy = shared_policy(worker(runner, "actor"))
        runner.cluster.get(roll_out(runner.env, runner.rollout, runner.plan, mode="train", step=0, epochs=1, chunks=4))
        (traj,) = runner.cluster.get(runner.rollout.call("trajectory"))
        rows = {k: v.flatten(0, 1) for k, v in traj.replay.items()}  # another batch size than the rollout's
        with torch.no_grad():
            gap = policy.evaluate(rows, values=False, entropy=False).logprobs - traj.logprobs.flatten(0, 1)  # [N, C, A]
            for _, parameter in policy.trainable_parameters():
                parameter.mul_(1.01)
            moved = policy.evaluate(rows, values=False, entropy=False).logprobs - traj.logprobs.flatten(0, 1)
    finally:
        runner.close()
    print(f"per element {gap.abs().max():.1e}, summed over a chunk {gap.sum((1, 2)).abs().max():.1e}")
    assert gap.abs().max() <= 2e-5
    assert gap.sum((1, 2)).abs().max() <= 2e-4
    assert moved.abs().max() > 1e-3  # other weights do say something else


@pytest.mark.parametrize("entropy_bonus", [0, 1])
@pytest.mark.parametrize("mask_kind", ["none", "unweighted", "weighted"])
def test_the_micro_batch_size_does_not_change_the_gradient(tmp_path, mask_kind, entropy_bonus):
    def gradient(micro: int) -> torch.Tensor:
        sizes = [f"actor.micro_batch_size={micro}", "actor.global_batch_size=64", "env.train.rollout_epoch=1"]
        noise = ["actor.model.openpi.noise_method=flow_noise", f"algorithm.entropy_bonus={entropy_bonus}"]
        cfg = toy_config(tmp_path / str(micro), *sizes, *noise, "actor.optim.clip_grad=1e9", "actor.optim.lr=0")
        runner = make_runner(cfg)
        try:
            actor = worker(runner, "actor")
            runner.cluster.get(
                roll_out(runner.env, runner.rollout, runner.plan, mode="train", step=0, epochs=1, chunks=4)
            )
            (shares,) = runner.experience()
            runner.cluster.get([runner.actor.one(0, "compute_advantages", *shares)])
            mask = torch.zeros(4, 16, 1, dtype=torch.bool)
            mask[0], mask[1, :3], mask[3, 5:7] = True, True, True
            n = torch.arange(1.0, 17.0)[None, :, None].expand(4, 16, 1)
            actor.targets = replace(
                actor.targets,
                mask=None if mask_kind == "none" else mask,
                mask_sum=n if mask_kind == "weighted" else None,
            )
            actor.optimizer_step(torch.arange(64), first=False)
            gradients = [p.grad for _, p in actor.policy.trainable_parameters() if p.grad is not None]
            return torch.cat([g.flatten() for g in gradients])
        finally:
            runner.close()

    whole, pieces = gradient(64), gradient(16)
    assert (whole - pieces).norm() <= 1e-4 * whole.norm()


def test_no_graph_of_a_micro_batch_outlives_it(tmp_path):
    """On a GPU another shape is recorded in the middle of a batch, which no older graph of the weights survives."""
    runner = make_runner(toy_config(tmp_path, "runner.max_epochs=1", "actor.micro_batch_size=4"))
    actor, seen = worker(runner, "actor"), []
    compute = actor.loss

    def watched(*args, **kwargs):
        assert all(loss() is None for loss in seen)
        loss, values = compute(*args, **kwargs)
        assert not any(tensor.requires_grad for pair in values.values() for tensor in pair)
        seen.append(weakref.ref(loss))
        return loss, values

    actor.loss = watched
    try:
        runner.step(0)
    finally:
        runner.close()
    assert len(seen) > 2


def test_ranks_of_a_rollout_share_the_actors_policy(tmp_path):
    placed = "cluster.component_placement={env: 0, rollout: 0:0-1, actor: 0}"
    runner = make_runner(toy_config(tmp_path, placed))
    try:
        assert all(worker(runner, "rollout", rank).policy is worker(runner, "actor").policy for rank in (0, 1))
    finally:
        runner.close()


def test_weights_from_a_file_in_the_home_folder_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = make_runner(toy_config(tmp_path))
    try:
        policy = worker(given, "actor").policy
        with torch.no_grad():
            for _, parameter in policy.trainable_parameters():
                parameter.add_(1.0)
        policy.save_pretrained(tmp_path / "trained")
        want = {k: v.clone() for k, v in policy.state_dict().items()}
    finally:
        given.close()
    runner = make_runner(toy_config(tmp_path, "runner.ckpt_path=~/trained/model.safetensors"))
    try:
        got = worker(runner, "actor").policy.state_dict()
    finally:
        runner.close()
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_group_members_start_alike_and_differ_later(tmp_path):
    traj = rollout(tmp_path, "env.train.group_size=4", "algorithm.group_size=4", "env.train.rollout_epoch=1")
    images = traj.replay["images"][0].float()  # [B, ...] of the first chunk
    for start in range(0, len(images), 4):
        assert all(torch.equal(images[start], images[start + i]) for i in range(1, 4))
    assert not torch.equal(images[0], images[4])
    assert not torch.equal(traj.logprobs[0, 0], traj.logprobs[0, 1])


def test_a_final_evaluation_plays_each_trial_once(tmp_path):
    runner = make_runner(toy_config(tmp_path, "env.eval.num_trials=10", "env.eval.total_num_envs=4"))
    try:
        records = runner.play_trials()
        again = runner.play_trials()
    finally:
        runner.close()
    assert len({r.reset_id for r in records}) == len(records) == 10
    assert [r.to_json() for r in records] == [r.to_json() for r in again]


def test_an_evaluation_that_lost_a_simulator_still_plays_each_trial_once(tmp_path):
    params = f"{{fault: crash, fault_times: 2, fault_file: {tmp_path}/faults}}"
    trials = ["env.eval.num_trials=10", "env.eval.total_num_envs=4", f"env.eval.init_params={params}"]
    runner = make_runner(toy_config(tmp_path, *trials, "env.eval.ignore_terminations=true"))
    try:
        records = runner.play_trials()
    finally:
        runner.close()
    assert len({r.reset_id for r in records}) == len(records) == 10
