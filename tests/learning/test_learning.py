"""PPO and GRPO raise the success of a tiny π0 on the pixel toy; with the advantage's sign flipped they lower it."""

from dataclasses import replace

import pytest

from rlinf.compat import formulas
from tests.runs import make_runner, toy_config

OVERRIDES = [
    "env.train.task_suite_name=toy_red",
    "env.train.init_params={step_size: 0.25, radius: 0.3, distance: 0.9, spread: 20}",
    "env.train.total_num_envs=32",
    "env.train.rollout_epoch=1",
    "algorithm.update_epoch=4",
    "actor.model.num_steps=2",
    "actor.model.openpi.noise_level=1.0",
    "actor.optim.lr=1e-3",
]
STEPS = 9


def success(folder, name: str) -> list[float]:
    """Training success of every step."""
    runner = make_runner(toy_config(folder, *OVERRIDES, f"runner.max_epochs={STEPS}", name=name))
    try:
        return [runner.step(step)["env/success_once"] for step in range(STEPS)]
    finally:
        runner.close()


def gain(curve: list[float]) -> float:
    """Success at the end minus success at the start, three steps each."""
    print("success:", " ".join(f"{x:.2f}" for x in curve))
    return (sum(curve[-3:]) - sum(curve[:3])) / 3


@pytest.mark.parametrize("name", ["toy_ppo_compact", "toy_grpo_compact"])
def test_learns(tmp_path, name):
    assert gain(success(tmp_path, name)) >= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy_ppo_compact", "toy_grpo_compact"])
def test_a_flipped_advantage_unlearns(tmp_path, name, monkeypatch):
    def flipped(*args, **kwargs):
        targets, metrics = compute_targets(*args, **kwargs)
        return replace(targets, advantages=-targets.advantages), metrics

    compute_targets = formulas.compute_targets
    monkeypatch.setattr(formulas, "compute_targets", flipped)
    assert gain(success(tmp_path, name)) < 0


@pytest.mark.slow
def test_the_recipe_as_it_is_learns_visibly(tmp_path):
    """What a newcomer runs first: `rlinf train toy_ppo_compact`."""
    cfg = toy_config(tmp_path)
    runner = make_runner(cfg)
    try:
        curve = [runner.step(step)["env/success_once"] for step in range(cfg.runner.max_epochs)]
    finally:
        runner.close()
    print("success:", " ".join(f"{x:.2f}" for x in curve))
    assert curve[0] < 0.35
    assert sum(curve[-5:]) / 5 > curve[0] + 0.3
