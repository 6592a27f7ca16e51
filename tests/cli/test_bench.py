"""`rlinf bench`: the bottleneck of known times, and times of a real run that add up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlinf.commands.bench import Bottleneck, find_bottleneck, run_bench, table
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.metrics.names import expand
from tests.runs import toy_config

BALANCED = {
    "time/step": 10.0,
    "time/sync_weights": 0.5,
    "time/generate_rollouts": 6.0,
    "time/cal_adv_and_returns": 0.5,
    "time/actor_training": 3.0,
    "time/env/interact": 3.0,
    "time/rollout/generate": 2.5,
    "time/actor/run_training": 3.0,
    "time/device_idle_mean": 0.25,
    "time/device_idle_max": 0.5,
    "time/env_steps_per_second": 480.0,
    "messages/bytes": 2.5e6,
    "sync/bytes": 1.5e6,
    "offload/bytes": 0.0,
}
PIPELINE = "rollout.pipeline_stage_num=2"


@pytest.mark.parametrize(
    ("settings", "times", "expected"),
    [
        (
            [],
            {"time/step": 10.0, "time/generate_rollouts": 8.0, "time/env/interact": 7.1, "time/rollout/generate": 0.5},
            "env: 71 % of the step; policy waits 94 % of the rollout; try env.train.num_processes=4",
        ),
        (
            [],
            {"time/generate_rollouts": 9.0, "time/env/interact": 5.0, "time/rollout/generate": 3.0},
            "env: 50 % of the step; policy waits 67 % of the rollout; "
            "try rollout.pipeline_stage_num=2 / env.train.num_processes=4",
        ),
        (
            [PIPELINE, "env.train.num_processes=0"],
            {"time/generate_rollouts": 6.0, "time/env/interact": 5.0, "time/rollout/generate": 3.0},
            "env: 50 % of the step; policy waits 50 % of the rollout; "
            "try more env ranks or CPU cores, or smaller images",
        ),
        (
            [],
            {"time/env/interact": 1.0, "time/rollout/generate": 4.5},
            "rollout: 45 % of the step; simulators wait 83 % of the rollout; "
            "try rollout.pipeline_stage_num=2 / more rollout ranks (cluster.component_placement)",
        ),
        (
            ["actor.micro_batch_size=32", "actor.global_batch_size=64"],
            {
                "time/actor_training": 7.0,
                "time/generate_rollouts": 2.0,
                "time/env/interact": 1.0,
                "time/rollout/generate": 0.8,
            },
            "actor: 75 % of the step; rollout takes 20 %; "
            "try actor.micro_batch_size=64 where memory allows / more actor ranks (cluster.component_placement)",
        ),
        (
            [],  # rollouts beside updates: the phase is what the actor still waited
            {"time/generate_rollouts": 0.1, "time/env/interact": 8.0, "time/rollout/generate": 6.0},
            "env: 80 % of the step; policy waits 25 % of the rollout; "
            "try rollout.pipeline_stage_num=2 / env.train.num_processes=4",
        ),
        (
            [],
            {"time/sync_weights": 4.0},
            "weight sync: 40 % of the step; 1.5 MB are sent; "
            "try runner.weight_sync_interval=2 / rollout and actor on the same accelerators",
        ),
        (
            ["env.enable_offload=true"],
            {"time/offload": 4.0, "offload/bytes": 8e6},
            "offload: 40 % of the step; 8.0 MB are moved; try env.train.enable_offload=false",
        ),
        (
            [PIPELINE],
            {"time/env/interact": 1.0, "time/rollout/generate": 0.9},
            "runtime: 50 % of the step; 2.5 MB travel per step; "
            "try components of equal rank in the same place, which share a process",
        ),
    ],
)
def test_the_bottleneck_is_one_line(
    settings: list[str], times: dict[str, float], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    cfg = load_config("toy_ppo_compact", ["env.train.num_processes=2", *settings], devices=[0])
    found = find_bottleneck(cfg, make_plan(cfg, [0]), BALANCED | times)
    assert found.line == expected
    assert found.role == expected.partition(":")[0]


def test_the_table_has_workers_below_their_phase() -> None:
    cfg = load_config(
        "toy_ppo_compact", ["cluster.component_placement={env: 0:0-1, rollout: 0, actor: 0}"], devices=[0]
    )
    lag = {"time/env/busy": 3.0, "time/env/slowest_rank": 1.0, "time/env/slowest_over_median": 2.0}
    assert list(table(make_plan(cfg, [0]), BALANCED | lag, 3)) == [
        "median of 3 steps                             seconds  of step",
        "step                                           10.000    100 %",
        "  sync_weights                                  0.500      5 %",
        "  generate_rollouts                             6.000     60 %",
        "    env/interact (slowest of 2 ranks)           3.000     30 %",
        "    rollout/generate                            2.500     25 %",
        "  cal_adv_and_returns                           0.500      5 %",
        "  actor_training                                3.000     30 %",
        "    actor/run_training                          3.000     30 %",
        "devices idle 25% of the step, one of them 50%",
        "480 env steps/s in the rollout",
        "2.5 MB per step between processes",
        "straggler: env[1] (2.0x the median)",
    ]


def test_a_real_run_adds_up_and_leaves_only_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "env.train.rollout_epoch=1",
        "algorithm.update_epoch=1",
        "runner.save_interval=1",
        "env.train.num_processes=1",
    ]
    cfg = toy_config(tmp_path / "unused", *settings, "runner.val_check_interval=1")
    found = run_bench(cfg, steps=2, warmup=1, output=tmp_path / "bench.json")
    assert os.listdir(tmp_path) == ["bench.json"]
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert Bottleneck(**saved["bottleneck"]) == found
    assert capsys.readouterr().out.splitlines()[-1] == f"bottleneck: {found.line}"
    assert (saved["config"], saved["mode"], saved["processes"]) == ("toy_ppo_compact", "shared", 1)
    assert len(saved["steps"]) == 2
    for step in saved["steps"]:
        assert expand(step)
        phases = [step[f"time/{p}"] for p in ("generate_rollouts", "cal_adv_and_returns", "actor_training")]
        assert sum(phases) <= step["time/step"]
        assert 0 < step["time/env/interact"] + step["time/rollout/generate"] <= step["time/generate_rollouts"]
        assert 0 < step["time/actor/run_training"] <= step["time/actor_training"]
        assert 0 <= step["time/device_idle_mean"] < 1
        assert step["messages/bytes"] == step["sync/bytes"] == 0
        assert "eval/success_once" not in step
