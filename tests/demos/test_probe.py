"""Probe hands a policy what lives on the policy's device, and takes its actions back."""

from __future__ import annotations

import torch

from rlinf.data.types import PolicyOutput
from rlinf.demos.probe import Probe
from rlinf.envs.spec import env_spec, eval_trials
from tests.runs import toy_config


class Elsewhere(torch.nn.Module):
    """A policy on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, device="meta"))
        self.seen: set[str] = set()

    def predict(self, obs, *, mode, noise) -> PolicyOutput:
        self.seen |= {obs.images.device.type, obs.states.device.type, noise.device.type, mode}
        return PolicyOutput(torch.zeros(len(obs), 2, 2), torch.zeros(len(obs), 2, 2), None, {})


def test_a_policy_on_another_device(tmp_path):
    cfg = toy_config(tmp_path, "env.eval.num_trials=2", "env.eval.num_processes=1")
    policy = Elsewhere()
    with Probe(cfg, eval_trials(cfg.env.eval, env_spec(cfg.env.eval))) as probe:
        assert probe.play_policy(policy).trials == 2
    assert policy.seen == {"meta", "eval"}
