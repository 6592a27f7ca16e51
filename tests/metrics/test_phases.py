"""Seconds of ranks -> metrics: published names, the slowest rank, idle devices, stragglers."""

from __future__ import annotations

import pytest

from rlinf.data.layout import EnvLayout
from rlinf.metrics.names import METRICS, expand
from rlinf.metrics.phases import METHODS, Usage, idle_shares, overlap_line, step_metrics, stragglers, worker_seconds
from rlinf.placement.grammar import Slot
from rlinf.placement.plan import Plan


def plan_of(**slots: tuple[Slot, ...]) -> Plan:
    return Plan(**slots, train_envs=EnvLayout(8), eval_envs=EnvLayout(8))


TWO = plan_of(
    env=(Slot(0, ()), Slot(0, ())),
    rollout=(Slot(0, (0,)), Slot(0, (1,))),
    actor=(Slot(0, (1,)),),
)
BUSY = {
    "env": [{"begin": 1.0, "step": 3.0, "num_restarts": 0.25}, {"begin": 0.5, "step": 7.0}],
    "rollout": [{"predict": 2.0, "finish": 0.5, "experience": 0.1}, {"predict": 1.0, "finish": 1.0}],
    "actor": [{"compute_advantages": 0.5, "update": 3.0}],
}
TIMES = {"step": 12.0, "generate_rollouts": 6.0, "actor_training": 3.0, "eval": 2.0}


def test_a_step_has_published_names_and_the_slowest_rank_counts() -> None:
    evaluating = Usage({"env": [{"step": 1.5}, {"step": 1.0}], "rollout": [{"predict": 0.5}, {}], "actor": [{}]})
    metrics = step_metrics(TWO, TIMES, Usage(BUSY, 4096), evaluating, env_steps=600)
    assert metrics == {
        "time/step": 12.0,
        "time/generate_rollouts": 6.0,
        "time/actor_training": 3.0,
        "time/eval": 2.0,
        "time/env/bootstrap_step": 1.0,
        "time/env/env_interact_step": 7.0,
        "time/env/interact": 7.5,
        "time/env/evaluate": 1.5,
        "time/env/busy": 7.5,
        "time/env/slowest_rank": 1.0,
        "time/env/slowest_over_median": pytest.approx(7.5 / 4.25),
        "time/rollout/predict": 2.0,
        "time/rollout/last_values": 1.0,
        "time/rollout/send_rollout_trajectories": 0.1,
        "time/rollout/generate": 2.5,
        "time/rollout/evaluate": 0.5,
        "time/rollout/busy": pytest.approx(2.6),
        "time/rollout/slowest_rank": 0.0,
        "time/rollout/slowest_over_median": pytest.approx(1.3),
        "time/actor/compute_adv": 0.5,
        "time/actor/run_training": 3.0,
        "time/actor/busy": 3.5,
        "time/device_idle_mean": pytest.approx((0.74 + 0.45) / 2),  # of the 10 s without the evaluation
        "time/device_idle_max": pytest.approx(0.74),
        "time/env_steps_per_second": 80.0,  # the slower env rank took longer than the runner waited
        "messages/bytes": 4096.0,
    }
    published = expand(metrics)
    assert published["time/env/env/bootstrap_step"] == 1.0
    assert published["time/rollout/rollout/generate"] == 2.5
    assert published["time/actor/actor/compute_adv"] == 0.5


def test_every_method_that_is_logged_has_its_row() -> None:
    for role, methods in METHODS.items():
        names = worker_seconds(role, [dict.fromkeys(methods, 1.0)] * 2)
        assert {f"time/{role}/{name}" for name in names} <= set(METRICS)


def test_one_rank_has_no_fellows() -> None:
    assert worker_seconds("actor", [{"update": 2.0}]) == {"run_training": 2.0, "busy": 2.0}


def test_idle_shares_by_device() -> None:
    assert idle_shares(TWO, BUSY, 10.0) == {(0, 0): pytest.approx(0.74), (0, 1): pytest.approx(0.45)}
    crowded = {**BUSY, "actor": [{"update": 20.0}]}
    assert idle_shares(TWO, crowded, 10.0)[0, 1] == 0.0
    on_cpu = plan_of(env=(Slot(0, ()),), rollout=(Slot(0, ()),), actor=(Slot(1, ()),))
    one = {"env": [{}], "rollout": [{"predict": 2.5}], "actor": [{"update": 5.0}]}
    assert idle_shares(on_cpu, one, 10.0) == {(0, -1): 0.75, (1, -1): 0.5}


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([4.0, 4.0, 4.0, 8.4], ["env[3] (2.1x the median)"]),
        ([4.0, 4.0, 4.0, 6.0], []),  # 1.5x is not above 1.5x
        ([2.0, 4.0], ["env[1] (2.0x the median)"]),
        ([0.001, 0.004], []),  # it costs nothing
        ([0.0, 0.0], []),
    ],
)
def test_stragglers_are_named(ranks: list[float], named: list[str]) -> None:
    busy = {**BUSY, "env": [{"step": seconds} for seconds in ranks]}
    slots = {"env": (Slot(0, ()),) * len(ranks), "rollout": TWO.rollout, "actor": TWO.actor}
    metrics = step_metrics(plan_of(**slots), TIMES, Usage(busy), None, env_steps=1)
    assert stragglers(metrics) == named


def test_a_run_says_what_its_pipeline_stages_brought() -> None:
    sides = {"time/env/interact": 4.0, "time/rollout/generate": 6.0}
    assert overlap_line(2, {**sides, "time/generate_rollouts": 6.5}) == (
        "2 pipeline stages, chosen because the policy has an accelerator: "
        "simulators 4.0 s, policy 6.0 s, both in 6.5 s of the first rollout"
    )
    assert "try rollout.pipeline_stage_num=1" in overlap_line(2, {**sides, "time/generate_rollouts": 10.0})
