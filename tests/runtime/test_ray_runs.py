"""Whole runs on Ray: every kind of placement trains, and all of them play and learn what one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlinf.config.derived import make_plan
from rlinf.config.schema import Config
from rlinf.data.types import Trajectory
from rlinf.metrics.run_log import RunLog
from rlinf.runner import Runner
from tests.inside import pids
from tests.runs import toy_config, wait_gone


def train(cfg: Config, *, devices: list[int] | None = None) -> tuple[list[dict[str, float]], Runner]:
    """A whole run of two steps; what metrics.jsonl says but for times."""
    runner = Runner(cfg, make_plan(cfg, devices), watch=RunLog(cfg))
    try:
        runner.train()
    finally:
        runner.close()
    lines = (Path(cfg.runner.logger.log_path) / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "system/"))} for line in lines
    ], runner


def small(folder: Path, address: str | None, *overrides: str) -> Config:
    """The toy recipe, two steps; on Ray where there is an address."""
    ray = [f"cluster.ray_address={address}", "cluster.backend=ray"] if address else []
    return toy_config(folder, *ray, "runner.max_epochs=2", "actor.micro_batch_size=16", *overrides)


PLACEMENTS = {
    # name: (nodes, accelerators of each, placement, mode, processes, rollout ranks with a copy of the weights)
    "all, on two nodes": (2, 1, {"env,rollout,actor": "all"}, "shared", 2, 0),
    "more processes than accelerators": (1, 2, {"actor,rollout": "0", "env": "0-1:0-3"}, "hybrid", 4, 0),
    "more accelerators than processes": (1, 4, {"actor,rollout": "0-3:0-1", "env": "0-3:0-1"}, "shared", 2, 0),
    "ManiSkill guide, hybrid on two nodes": (2, 1, {"env": "0", "rollout": "1", "actor": "0-1"}, "hybrid", 3, 1),
    "ManiSkill guide, separate on two nodes": (2, 2, {"env": "0", "rollout": "1", "actor": "2-3"}, "separate", 4, 1),
}
GUIDES = {
    "all guides, hybrid": (1, 8, {"env": "0-3", "rollout": "4-7", "actor": "0-7"}, "hybrid", 12, 4),
    "all guides, separate": (1, 8, {"env": "0-1", "rollout": "2-5", "actor": "6-7"}, "separate", 8, 4),
    "ManiSkill, hybrid": (2, 8, {"env": "0-7", "rollout": "8-15", "actor": "0-15"}, "hybrid", 24, 8),
    "ManiSkill, separate": (2, 8, {"env": "0-3", "rollout": "4-7", "actor": "8-15"}, "separate", 16, 4),
}


OFTEN = ("more processes than accelerators",)  # the others before a release
assert set(OFTEN) < set(PLACEMENTS)


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in [*PLACEMENTS, *GUIDES]],
)
def test_every_placement_trains(tmp_path, ray_address, name):
    nodes, accelerators, placement, mode, processes, copies = (PLACEMENTS | GUIDES)[name]
    sizes = ["actor.micro_batch_size=4", "rollout.pipeline_stage_num=2"] if name in GUIDES else []
    sizes += ["env.train.total_num_envs=32"] if name in GUIDES else []
    where = [f"cluster.num_nodes={nodes}", f"cluster.virtual_devices={accelerators}"]
    cfg = small(tmp_path, ray_address, *where, f"cluster.component_placement={json.dumps(placement)}", *sizes)
    metrics, runner = train(cfg)
    assert (runner.plan.mode, len(runner.plan.processes), len(runner.plan.rollout_copies)) == (mode, processes, copies)
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["train/actor/optimizer_steps"] > 0 and m["env/restarts"] == 0 for m in metrics)
    assert all((m["sync/bytes"] > 0) == (copies > 0) for m in metrics)
    assert metrics[0]["train/actor/logprob_gap"] <= 2e-5  # the rollout's log-probs are those of the actor's weights
    assert wait_gone(pids(runner))


SEPARATE = ["cluster.virtual_devices=3", "cluster.component_placement={env: 0, rollout: 1, actor: 2}"]
TWO_RANKS = ["cluster.virtual_devices=2", "cluster.component_placement={'actor,env,rollout': 0-1}"]


def play(cfg: Config, *, devices: list[int] | None = None) -> tuple[list[Trajectory], list[dict[str, float]]]:
    """The experience and the metrics of two training steps."""
    runner = Runner(cfg, make_plan(cfg, devices), watch=RunLog(cfg))
    experience, metrics = [], []
    try:
        for step in range(2):
            metrics.append(runner.step(step))
            parts = runner.cluster.get(runner.rollout.call("trajectory"))
            experience.append(Trajectory.cat(parts, dim=1).map(torch.clone))
    finally:
        runner.close()
    return experience, metrics


def assert_equal(one: Trajectory, two: Trajectory) -> None:
    """Bit by bit."""
    a, b = vars(one) | one.replay, vars(two) | two.replay
    assert all(torch.equal(a[k], b[k]) for k in a if isinstance(a[k], torch.Tensor))


def assert_equal_but_values(one: Trajectory, two: Trajectory) -> None:
    """What was seen, done and paid."""
    assert torch.equal(one.logprobs, two.logprobs)
    assert torch.equal(one.rewards, two.rewards)


def assert_close(one: Trajectory, two: Trajectory) -> None:
    """As equal as calls with other batch sizes are: sums round differently, what is discrete must not differ."""
    for name in ("terminated", "truncated", "valid", "lost", "rewards"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for key, value in one.replay.items():
        delta = (value[0].float() - two.replay[key][0].float()).abs().max()
        assert delta <= 1e-5, f"{key}: {delta:.1e}"
    assert (one.logprobs[0] - two.logprobs[0]).abs().max() <= 1e-5
    assert (one.values[0] - two.values[0]).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory) -> dict[int, tuple[list[Trajectory], list[dict[str, float]]]]:
    """By number of stages, what threads in this process play."""
    return {
        stages: play(small(tmp_path_factory.mktemp("one"), None, f"rollout.pipeline_stage_num={stages}"), devices=[0])
        for stages in (1, 2)
    }


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("placement", ["shared", "separate"])
def test_ray_plays_and_learns_what_one_process_does(tmp_path, ray_address, in_one_process, placement, stages):
    where = SEPARATE if placement == "separate" else []
    cfg = small(tmp_path, ray_address, *where, f"rollout.pipeline_stage_num={stages}")
    (experience, metrics), (want, want_metrics) = play(cfg), in_one_process[stages]
    for step in range(2):
        assert_equal(experience[step], want[step])
        moved = {"sync/bytes", "messages/bytes"}
        assert {k: v for k, v in metrics[step].items() if k not in moved} == {
            k: v for k, v in want_metrics[step].items() if k not in moved
        }
    assert_close(experience[0], in_one_process[3 - stages][0][0])


@pytest.mark.slow
def test_actor_ranks_learn_from_groups_of_different_stages(tmp_path, ray_address):
    """Two groups, one in each stage, and two actors: the advantages are those of one actor that holds both groups."""
    groups = ["rollout.pipeline_stage_num=2", "algorithm.group_size=8", "actor.fsdp_config.strategy=no_shard"]
    place = ["cluster.virtual_devices=2", "cluster.component_placement={'env,rollout': 0, actor: 0-1}"]

    def grpo(folder: Path, address: str | None, *overrides: str) -> Config:
        ray = [f"cluster.ray_address={address}"] if address else []
        return toy_config(folder, *ray, *groups, *overrides, "actor.micro_batch_size=32", name="toy_grpo_compact")

    experience, metrics = play(grpo(tmp_path / "two", ray_address, *place))
    want, want_metrics = play(grpo(tmp_path / "one", None), devices=[0])
    assert_equal_but_values(experience[0], want[0])
    for name in ("advantages_mean", "advantages_max", "advantages_min", "rewards"):
        assert metrics[0][f"rollout/{name}"] == pytest.approx(want_metrics[0][f"rollout/{name}"], abs=1e-6)
    loss = "train/actor/policy_loss"
    assert metrics[0][loss] == pytest.approx(want_metrics[0][loss], abs=1e-5)


@pytest.mark.slow
def test_two_ranks_play_what_one_does(tmp_path, ray_address, in_one_process):
    experience, _ = play(small(tmp_path, ray_address, *TWO_RANKS))
    assert_close(experience[0], in_one_process[1][0][0])
