"""The published action conversions of every (simulator, model) pair, from the specs alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlinf.envs import spec as specs
from rlinf.envs.bridge import Bridge
from rlinf.envs.config import EnvConfig
from rlinf.models.config import PolicySpec, available_models, find_config
from rlinf.simulators.contract import EnvSpec

ENVS = {  # action columns, gripper rule
    "metaworld": (4, "absolute"),
    "calvin": (7, "sign"),
    "maniskill": (7, "binary_pm1"),
    "robotwin": (14, "absolute"),
}
TOKEN_POLICIES = ("openvla", "openvla_oft")


def env_spec(name: str) -> EnvSpec:
    columns, gripper = ENVS[name]
    return EnvSpec(
        suite=name,
        tasks=(name,),
        action_dim=columns,
        action_names=tuple(f"a{i}" for i in range(columns)),
        gripper=gripper,  # type: ignore[arg-type]
        state_dim=0,
        image_size=(8, 8),
        reset_ids={"train": (), "demo": (), "eval": ()},
        control_hz=10.0,
    )


def policy_spec(name: str, columns: int, chunk: int) -> PolicySpec:
    return PolicySpec(
        action_dim=columns,
        num_action_chunks=chunk,
        image_size=8,
        num_images=1,
        state_dim=0,
        has_logprob=True,
        has_value=False,
        values_per_chunk=1,
        critic_state_dim=0,
        binary_gripper=name in TOKEN_POLICIES,
    )


def test_simulators_and_models_declare_these_conventions() -> None:
    for name in set(ENVS) & set(specs.available_simulators()):
        real = specs.env_spec(EnvConfig(env_type=name))
        assert (real.action_dim, real.gripper) == ENVS[name]
    for name in available_models():
        assert all(cfg.spec().binary_gripper == (name in TOKEN_POLICIES) for cfg in find_config(name).examples())


def test_env_actions(golden_dir: Path, max_delta: Callable[..., float]) -> None:
    stored = load_file(golden_dir / "env_actions" / "io.safetensors")
    pairs = sorted({key.removesuffix(".in") for key in stored if key.endswith(".in")})
    assert pairs
    for pair in pairs:
        env, policy = pair.split(".")
        given, wanted = stored[f"{pair}.in"], stored[f"{pair}.out"]
        before = given.clone()
        bridge = Bridge(env_spec(env), policy_spec(policy, given.shape[-1], given.shape[1]))
        max_delta(pair, bridge.to_env(given), wanted, 1e-6)
        assert torch.equal(given, before)
