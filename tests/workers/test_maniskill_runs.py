"""The published ManiSkill recipes of π0 and π0.5 with a compact network and a few envs, in the real simulator."""

from __future__ import annotations

import json

import pytest

from rlinf.config.load import load_config
from tests.runs import FEW_MANISKILL, make_runner


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maniskill_ppo_openpi", "maniskill_ppo_openpi_pi05"])
def test_the_flow_recipes_train_a_compact_policy(tmp_path, maniskill_path, name):
    """Episodes of 10 steps start anew within a rollout of 20: auto_reset, and a bootstrap at every end."""
    place = "cluster.component_placement={'actor,env,rollout': 0}"
    runner = make_runner(load_config(name, [*FEW_MANISKILL, place, f"runner.logger.log_path={tmp_path}"]))
    try:
        runner.train()
    finally:
        runner.close()
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["env/num_trajectories"] == 4
    assert metrics["train/actor/optimizer_steps"] == 1
    assert metrics["train/actor/logprob_gap"] <= 2e-5
    assert metrics["train/actor/entropy_loss"] != 0
