"""Scripted experts on held-out trials: the same episodes as a policy's evaluation, judged by the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf.commands import jobs
from rlinf.config.load import load_config
from rlinf.demos.player import play_trials
from rlinf.envs import spec as specs
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.errors import UserError


def test_the_expert_plays_every_trial_once() -> None:
    cfg = EnvConfig(env_type="toy", total_num_envs=4, num_trials=10, max_episode_steps=8, num_processes=2)
    records = play_trials(cfg, seed=0)
    assert [r.reset_id for r in records] == eval_trials(cfg, env_spec(cfg))
    assert all(r.success_once for r in records)
    assert len({r.steps for r in records}) > 1


def test_rlinf_eval_with_the_expert_writes_the_usual_file(tmp_path: Path) -> None:
    overrides = ["runner.eval_expert=true", f"runner.logger.log_path={tmp_path}", "env.eval.num_processes=1"]
    cfg = load_config("toy_ppo_compact", overrides, purpose="eval", devices=[0])
    assert jobs.evaluate(cfg)[0]["eval/success_once"] == 1.0
    written = json.loads((tmp_path / "eval/step_0/result.json").read_text())
    assert (written["success"]["successes"], written["success"]["trials"]) == (32, 32)


def test_a_simulator_without_an_expert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(specs.find_simulator("toy"), "Expert")
    with pytest.raises(UserError, match="simulator 'toy' has no scripted expert"):
        play_trials(EnvConfig(env_type="toy"), seed=0)
