"""What a served policy says of itself: its run, its shapes and a hash of its statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("msgpack")

from rlinf.serving.messages import pack, unpack
from rlinf.serving.metadata import describe, statistics_hash
from rlinf.serving.policy import LoadedPolicy
from rlinf.storage.run_folder import RECORD, RunRecord, write_record


def test_run_step_and_shapes(pi0: LoadedPolicy, tmp_path: Path):
    folder = tmp_path / "checkpoints/global_step_7/actor/model"
    folder.mkdir(parents=True)
    policy = LoadedPolicy(pi0.policy, seed=3, folder=folder)
    assert describe(policy, 8)["recipe"] is None
    write_record(tmp_path, RunRecord("ab12", "train", "metaworld_50_ppo_openpi", "", {}, ""))
    found = describe(policy, 8)
    assert (found["recipe"], found["step"], found["seed"]) == ("metaworld_50_ppo_openpi", 7, 3)
    assert (found["action_dim"], found["horizon"], found["state_dim"]) == (4, 5, 4)
    assert found["cameras"] == ["image", "wrist_image"]
    assert unpack(pack(found)) == found
    (tmp_path / RECORD).write_text("{")  # damaged: the policy is served all the same
    assert describe(policy, 8)["recipe"] is None


def test_the_hash_is_of_the_statistics(pi0: LoadedPolicy):
    before = statistics_hash(pi0)
    assert before is not None
    state = pi0.policy.processor.state_stats, pi0.policy.processor.action_stats
    try:
        rows = torch.arange(40.0).reshape(10, 4)
        pi0.policy.fit_statistics(rows, rows)
        fitted = statistics_hash(pi0)
        assert fitted != before
        pi0.policy.fit_statistics(rows, rows)
        assert statistics_hash(pi0) == fitted
    finally:
        pi0.policy.processor.state_stats, pi0.policy.processor.action_stats = state
    assert statistics_hash(pi0) == before
