"""actor.fsdp_config: what cannot be honoured is refused in one line, what has no effect says so."""

from __future__ import annotations

import pytest

from rlinf.config.load import load_config
from rlinf.errors import UserError

TWO_ON_ONE = "cluster.component_placement={'actor,rollout,env': '0:0-1'}"
ALL = "cluster.component_placement={'actor,rollout,env': all}"
KEY = "actor.fsdp_config"


@pytest.mark.parametrize(
    ("overrides", "devices", "line"),
    [
        (
            [f"{KEY}.amp_autocast.enabled=true"],
            [0],
            f"command line: {KEY}.amp_autocast.enabled=True must be False, or left out: updates must score actions as "
            "rollouts did: set actor.model.precision=bf16",
        ),
        (
            [f"{KEY}.grad_scaler.enabled=true"],
            [0],
            f"command line: {KEY}.grad_scaler.enabled=True must be False, or left out: bf16 and fp32 need no "
            "loss scaling",
        ),
        (
            [f"{KEY}.strategy=no_shard", f"{KEY}.cpu_offload=true"],
            [0],
            f"{KEY}.cpu_offload=True offloads shards: set {KEY}.strategy=fsdp2, or cpu_offload=false",
        ),
        (
            [f"{KEY}.sharding_strategy=hybrid_shard", "cluster.num_nodes=2", ALL],
            [1, 1],
            f"{KEY}.sharding_strategy=hybrid_shard works on one node; use full_shard, or no_shard",
        ),
        (
            [TWO_ON_ONE],
            [1],
            f"cluster.component_placement puts several actor ranks on one accelerator, where {KEY}.strategy=fsdp "
            f"cannot shard; place one on each, or set {KEY}.strategy=no_shard",
        ),
    ],
)
def test_refused(overrides, devices, line):
    with pytest.raises(UserError) as error:
        load_config("toy_ppo_compact", overrides, devices=devices)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([f"{KEY}.sharding_strategy=hybrid_shard"], [2]),
        ([TWO_ON_ONE, f"{KEY}.strategy=no_shard"], [1]),
        ([TWO_ON_ONE], [0]),  # processes on the CPU
        ([f"{KEY}.mixed_precision.reduce_dtype=bf16", f"{KEY}.cpu_offload=true"], [1]),
    ],
)
def test_allowed(overrides, devices):
    load_config("toy_ppo_compact", overrides, devices=devices)


def test_unknown_words_are_refused():
    with pytest.raises(UserError, match=r"sharding_strategy"):
        load_config("toy_ppo_compact", [f"{KEY}.sharding_strategy=full_sharding"], devices=[0])
    with pytest.raises(UserError, match=r"reduce_dtype"):
        load_config("toy_ppo_compact", [f"{KEY}.mixed_precision.reduce_dtype=fp8"], devices=[0])
