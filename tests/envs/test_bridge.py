"""Bridge: columns and grippers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf.envs.bridge import Bridge
from tests.golden.test_env_actions import env_spec, policy_spec


def test_padded_columns_are_dropped() -> None:
    actions = torch.arange(64, dtype=torch.float32).reshape(2, 1, 32)
    for env, columns in (("metaworld", 4), ("robotwin", 14)):
        assert torch.equal(Bridge(env_spec(env), policy_spec("pi0", 32, 1)).to_env(actions), actions[..., :columns])


def test_a_seven_column_arm_keeps_its_gripper() -> None:
    actions = torch.arange(7, dtype=torch.float32).reshape(1, 1, 7)
    bridge = Bridge(env_spec("metaworld"), policy_spec("openvla_oft", 7, 1))
    assert bridge.to_env(actions).flatten().tolist() == [0, 1, 2, 6]
    no_gripper = replace(env_spec("metaworld"), gripper="none")
    assert Bridge(no_gripper, policy_spec("openvla_oft", 7, 1)).to_env(actions).flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("binary", "at_zero"), [(False, 0.0), (True, -1.0)])
def test_a_gripper_of_exactly_zero(binary: bool, at_zero: float) -> None:
    policy = replace(policy_spec("pi0", 7, 1), binary_gripper=binary)
    actions = torch.zeros(1, 1, 7)
    assert Bridge(env_spec("calvin"), policy).to_env(actions)[0, 0, -1] == at_zero
    assert Bridge(env_spec("maniskill"), policy).to_env(actions)[0, 0, -1] == -1.0
