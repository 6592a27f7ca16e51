"""`compat: rlinf-0.4` in a run: which policy it builds, what that shares with the clean one, and what it needs."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rlinf.compat.cache_size import cache_bytes_per_sample
from rlinf.compat.keys import no_effect_paths, without_old_keys
from rlinf.compat.policies import PublishedOpenPi, PublishedOpenVla, PublishedOpenVlaOft, policy_class
from rlinf.models.config import available_models, find_config
from rlinf.models.openpi.config import OpenPiOptions
from rlinf.models.policy import find_policy
from rlinf.workers.rollout import RolloutWorker
from tests.contracts.test_model_contract import CASES, gap, make, noise, observation
from tests.runs import make_runner, toy_config

COMPAT = "rlinf-0.4"
PUBLISHED = {"openpi": PublishedOpenPi, "openvla": PublishedOpenVla, "openvla_oft": PublishedOpenVlaOft}


def test_every_model_has_a_published_variant() -> None:
    assert set(PUBLISHED) == set(available_models())
    for name, published in PUBLISHED.items():
        assert policy_class(name, None) is find_policy(name)
        assert policy_class(name, COMPAT) is published


@pytest.mark.parametrize("compat", [None, COMPAT])
def test_a_run_builds_the_policy_its_compat_switch_names(compat: str | None, tmp_path, monkeypatch) -> None:
    built = []
    setup = RolloutWorker.setup
    monkeypatch.setattr(RolloutWorker, "setup", lambda self: (setup(self), built.append(type(self.policy))))
    make_runner(toy_config(tmp_path, *([] if compat is None else [f"compat={compat}"]))).close()
    assert set(built) == {policy_class("openpi", compat)}


@pytest.mark.parametrize("case", CASES)
def test_actions_and_log_probs_are_those_of_the_clean_policy(case: str) -> None:
    clean, published = make(CASES[case]), make(CASES[case], compat=COMPAT)
    assert clean.state_dict().keys() == published.state_dict().keys()
    outs = [policy.predict(observation(policy.spec), mode="train", noise=noise()) for policy in (clean, published)]
    assert gap(outs[0].actions, outs[1].actions) <= 2e-5
    assert gap(outs[0].logprobs, outs[1].logprobs) <= 2e-5
    assert {n: t.shape for n, t in outs[0].replay.items()} == {n: t.shape for n, t in outs[1].replay.items()}


@pytest.mark.parametrize("case", [name for name, cfg in CASES.items() if cfg.cache_bytes_per_sample()])
def test_the_plan_counts_the_prefix_cache_of_the_published_layout(case: str) -> None:
    policy = make(CASES[case], compat=COMPAT)
    out = policy.predict(observation(policy.spec), mode="train", noise=noise())
    stored = sum(tensor[0].nbytes for tensor in out.cache.values())
    assert stored == cache_bytes_per_sample(CASES[case], COMPAT) > cache_bytes_per_sample(CASES[case], None)


def test_keys_without_effect_are_none_of_any_model() -> None:
    known = {f"actor.model.{f.name}" for name in available_models() for f in fields(find_config(name))}
    known |= {f"actor.model.openpi.{f.name}" for f in fields(OpenPiOptions)}
    keys = [key for key, _ in no_effect_paths()]
    assert not known.intersection(keys)
    assert len(set(keys)) == len(keys)
    assert all(row.why for _, row in no_effect_paths())


def test_settings_of_earlier_versions_lose_the_keys_that_went() -> None:
    old = {"size": "compact", "vocab_size": 32000, "upstream_sampling": True}
    old["openpi"] = {"num_steps": 3, "upstream_values": False, "dsrl_agg_q": "mean"}
    assert without_old_keys(old) == {"size": "compact", "openpi": {"num_steps": 3}}
    assert "vocab_size" in old
