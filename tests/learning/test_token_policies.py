"""GRPO raises the success of a tiny OpenVLA-OFT, PPO that of a tiny OpenVLA; a flipped advantage lowers it."""

from dataclasses import replace

import pytest

from rlinf.compat import formulas
from tests.runs import make_runner, toy_config

OVERRIDES = [  # the target is so near that any random policy reaches it now and then, whatever its weights
    "env.train.task_suite_name=toy_red",
    "env.train.init_params={step_size: 0.25, radius: 0.3, distance: 0.6, spread: 20}",
    "env.train.total_num_envs=32",
    "env.train.rollout_epoch=1",
    "algorithm.update_epoch=4",
]


def gain(folder, name: str, steps: int, *overrides: str) -> float:
    """Training success at the end minus that at the start, three steps each."""
    runner = make_runner(toy_config(folder, *OVERRIDES, *overrides, f"runner.max_epochs={steps}", name=name))
    try:
        curve = [runner.step(step)["env/success_once"] for step in range(steps)]
    finally:
        runner.close()
    print("success:", " ".join(f"{x:.2f}" for x in curve))
    return (sum(curve[-3:]) - sum(curve[:3])) / 3


@pytest.mark.slow
def test_oft_learns_by_grpo(tmp_path):
    assert gain(tmp_path, "toy_grpo_openvlaoft_compact", 9) >= 0.1


@pytest.mark.slow
def test_openvla_learns_by_ppo(tmp_path):
    assert gain(tmp_path, "toy_ppo_openvla_compact", 8, "algorithm.sampling_params.temperature_train=3") >= 0.1


def test_a_flipped_advantage_unlearns(tmp_path, monkeypatch):
    def flipped(*args, **kwargs):
        targets, metrics = compute_targets(*args, **kwargs)
        return replace(targets, advantages=-targets.advantages), metrics

    compute_targets = formulas.compute_targets
    monkeypatch.setattr(formulas, "compute_targets", flipped)
    assert gain(tmp_path, "toy_grpo_openvlaoft_compact", 7) <= 0
