"""`rlinf plan` draws the guides' placements: every process, shared parameters, what travels and how much."""

from __future__ import annotations

import os

import pytest
import torch

from rlinf.commands.device_map import parameter_bytes
from rlinf.commands.plan_text import describe_plan
from rlinf.commands.units import ranks_text
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.models.policy import find_policy

VIRTUAL = ("cluster.num_nodes=2", "cluster.virtual_devices=8")
SHARED = """\
devices (shared, 8 processes)
  node 0 gpu 0          p0: env[0] rollout[0] actor[0]
  node 0 gpu 1          p1: env[1] rollout[1] actor[1]
  node 0 gpu 2          p2: env[2] rollout[2] actor[2]
  node 0 gpu 3          p3: env[3] rollout[3] actor[3]
  node 0 gpu 4          p4: env[4] rollout[4] actor[4]
  node 0 gpu 5          p5: env[5] rollout[5] actor[5]
  node 0 gpu 6          p6: env[6] rollout[6] actor[6]
  node 0 gpu 7          p7: env[7] rollout[7] actor[7]
  simulators            2 processes per env rank and stage, for its 8 envs
  parameters            rollout[0-7] and the actor of the process share theirs; actor[0-7] hold replicas

between processes
  messages              none: workers that talk to each other share a process
  weight sync           none: rollout and actor share a process and its parameters
  gradients             of 315 M parameters, summed over actor[0-7] at every optimiser step
"""
HYBRID = """\
devices (hybrid, 12 processes)
  node 0 gpu 0          p0: env[0] actor[0]
  node 0 gpu 1          p1: env[1] actor[1]
  node 0 gpu 2          p2: env[2] actor[2]
  node 0 gpu 3          p3: env[3] actor[3]
  node 0 gpu 4          p4: rollout[0] | p8: actor[4]
  node 0 gpu 5          p5: rollout[1] | p9: actor[5]
  node 0 gpu 6          p6: rollout[2] | p10: actor[6]
  node 0 gpu 7          p7: rollout[3] | p11: actor[7]
  simulators            2 processes per env rank and stage, for its 8 envs
  parameters            rollout[0-3] have copies; actor[0-7] hold replicas
  offload               actor during the rollout, rollout during the update

between processes
  observations          env -> rollout: 7.43 GB per step = 336 x 22.1 MB per chunk and stage
  actions               rollout -> env: 819 kB per step = 320 x 2.56 kB per chunk and stage
  experience            rollout -> actor: 1.54 GB per step
  weight sync           actor[0] -> rollout[0-3]: 631 MB to each, every step
  gradients             of 315 M parameters, summed over actor[0-7] at every optimiser step
"""
SEPARATE = """\
devices (separate, 8 processes)
  node 0 gpu 0          p0: env[0]
  node 0 gpu 1          p1: env[1]
  node 0 gpu 2          p2: rollout[0]
  node 0 gpu 3          p3: rollout[1]
  node 0 gpu 4          p4: rollout[2]
  node 0 gpu 5          p5: rollout[3]
  node 0 gpu 6          p6: actor[0]
  node 0 gpu 7          p7: actor[1]
  simulators            2 processes per env rank and stage, for its 32 envs
  parameters            rollout[0-3] have copies; actor[0-1] hold shards while they learn

between processes
  observations          env -> rollout: 7.43 GB per step = 168 x 44.2 MB per chunk and stage
  actions               rollout -> env: 819 kB per step = 160 x 5.12 kB per chunk and stage
  experience            rollout -> actor: 1.54 GB per step
  weight sync           actor[0] -> rollout[0-3]: 631 MB to each, every 4 steps
  gradients             of 315 M parameters, summed over actor[0-1] at every optimiser step
"""
TWO_NODES = """\
devices (hybrid, 24 processes)
  node 0 virtual gpu 0  p0: env[0] actor[0]
  node 0 virtual gpu 1  p1: env[1] actor[1]
  node 0 virtual gpu 2  p2: env[2] actor[2]
  node 0 virtual gpu 3  p3: env[3] actor[3]
  node 0 virtual gpu 4  p4: env[4] actor[4]
  node 0 virtual gpu 5  p5: env[5] actor[5]
  node 0 virtual gpu 6  p6: env[6] actor[6]
  node 0 virtual gpu 7  p7: env[7] actor[7]
  node 1 virtual gpu 0  p8: rollout[0] | p16: actor[8]
  node 1 virtual gpu 1  p9: rollout[1] | p17: actor[9]
  node 1 virtual gpu 2  p10: rollout[2] | p18: actor[10]
  node 1 virtual gpu 3  p11: rollout[3] | p19: actor[11]
  node 1 virtual gpu 4  p12: rollout[4] | p20: actor[12]
  node 1 virtual gpu 5  p13: rollout[5] | p21: actor[13]
  node 1 virtual gpu 6  p14: rollout[6] | p22: actor[14]
  node 1 virtual gpu 7  p15: rollout[7] | p23: actor[15]
  simulators            2 processes per env rank and stage, for its 4 envs
  parameters            rollout[0-7] have copies; actor[0-15] hold replicas

between processes
  observations          env -> rollout: 7.43 GB per step = 336 x 22.1 MB per chunk and stage
  actions               rollout -> env: 819 kB per step = 320 x 2.56 kB per chunk and stage
  experience            rollout -> actor: 1.54 GB per step
  weight sync           actor[0] -> rollout[0-7]: 631 MB to each, every step
  gradients             of 315 M parameters, summed over actor[0-15] at every optimiser step
"""
TWO_NODES_SEPARATE = """\
devices (separate, 16 processes)
  node 0 virtual gpu 0  p0: env[0]
  node 0 virtual gpu 1  p1: env[1]
  node 0 virtual gpu 2  p2: env[2]
  node 0 virtual gpu 3  p3: env[3]
  node 0 virtual gpu 4  p4: rollout[0]
  node 0 virtual gpu 5  p5: rollout[1]
  node 0 virtual gpu 6  p6: rollout[2]
  node 0 virtual gpu 7  p7: rollout[3]
  node 1 virtual gpu 0  p8: actor[0]
  node 1 virtual gpu 1  p9: actor[1]
  node 1 virtual gpu 2  p10: actor[2]
  node 1 virtual gpu 3  p11: actor[3]
  node 1 virtual gpu 4  p12: actor[4]
  node 1 virtual gpu 5  p13: actor[5]
  node 1 virtual gpu 6  p14: actor[6]
  node 1 virtual gpu 7  p15: actor[7]
  simulators            2 processes per env rank and stage, for its 16 envs
"""
ONE_PROCESS = """\
devices (shared, 1 process)
  node 0 cpu            p0: env[0] rollout[0] actor[0]
  simulators            2 processes per env rank and stage, for its 64 envs
  parameters            rollout[0] and the actor of the process share theirs

between processes
  messages              none: all workers are threads of one process
"""
MIXED = """\
devices (hybrid, 3 processes)
  node 0 gpu 0          p0: env[0] rollout[0] actor[0] | p2: rollout[1]
  node 0 gpu 1          p1: env[1]
  simulators            2 processes per env rank and stage, for its 32 envs
  parameters            rollout[0] and the actor of the process share theirs; rollout[1] has a copy

between processes
  observations          env -> rollout: 3.72 GB per step = 168 x 22.1 MB per chunk and stage; 50% stays in its process
  actions               rollout -> env: 410 kB per step = 160 x 2.56 kB per chunk and stage; 50% stays in its process
  experience            rollout -> actor: 772 MB per step; 50% stays in its process
  weight sync           actor[0] -> rollout[1]: 631 MB to each, every step
"""
FULL_SHARD = "actor.fsdp_config.sharding_strategy=full_shard"
TABLE = {
    "shared": (SHARED, [8], "{'env,rollout,actor': all}", []),
    "hybrid": (
        HYBRID,
        [8],
        "{env: 0-3, rollout: 4-7, actor: 0-7}",
        ["rollout.pipeline_stage_num=2", "actor.enable_offload=true", "rollout.enable_offload=true"],
    ),
    "separate": (
        SEPARATE,
        [8],
        "{env: 0-1, rollout: 2-5, actor: 6-7}",
        ["actor.enable_offload=true", "runner.weight_sync_interval=4", FULL_SHARD],  # nobody to make room for
    ),
    "two nodes": (
        TWO_NODES,
        None,
        "{env: 0-7, rollout: 8-15, actor: 0-15}",
        [*VIRTUAL, "rollout.pipeline_stage_num=2"],
    ),
    "two nodes, separate": (TWO_NODES_SEPARATE, None, "{env: 0-3, rollout: 4-7, actor: 8-15}", [*VIRTUAL]),
    "one process": (ONE_PROCESS, [0], "{'env,rollout,actor': all}", []),
    "mixed": (MIXED, [2], "{env: 0-1, rollout: '0:0-1', actor: 0}", []),
}


ONE_STAGE = "rollout.pipeline_stage_num=1"


@pytest.mark.parametrize("name", TABLE)
def test_the_map_of_a_placement(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    text, devices, placement, settings = TABLE[name]
    placed = f"cluster.component_placement={placement}"
    cfg = load_config("metaworld_50_ppo_openpi", [placed, ONE_STAGE, *settings], purpose="plan", devices=devices)
    lines = describe_plan(cfg, make_plan(cfg, devices)).splitlines()
    want = text.splitlines()
    assert lines[2 : 2 + len(want)] == want


def test_an_evaluation_sends_no_weights() -> None:
    settings = ["runner.only_eval=true", "cluster.component_placement={env: 0, rollout: 1, actor: 1}"]
    cfg = load_config("toy_ppo_compact", settings, purpose="plan", devices=[2])
    text = describe_plan(cfg, make_plan(cfg, [2]))
    assert "observations          env -> rollout: " in text
    assert "experience" not in text
    assert "weight sync" not in text


@pytest.mark.parametrize("name", ["toy_ppo_compact", "toy_ppo_openvla_compact", "toy_grpo_openvlaoft_compact"])
def test_the_synced_bytes_are_those_of_the_trainable_parameters(name: str) -> None:
    cfg = load_config(name, devices=[0])
    policy = find_policy(cfg.actor.model.model_type).build(cfg.actor.model, torch.device("cpu"), seed=0)
    counted = cfg.actor.model.num_trainable_parameters() * parameter_bytes(cfg)
    assert counted == sum(parameter.nbytes for _, parameter in policy.trainable_parameters())


def test_ranks_are_written_as_ranges() -> None:
    assert ranks_text("actor", [0, 1, 2, 5, 7, 8]) == "actor[0-2,5,7-8]"
    assert ranks_text("env", range(1)) == "env[0]"
