"""Environments and schedules of `compat: rlinf-0.4`, from the simulator's flags to what the actor learns from."""

from __future__ import annotations

import pytest

from rlinf.compat.envs import env_class
from rlinf.compat.formulas import choose_formulas
from rlinf.config.schema import OptimConfig
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec
from rlinf.training.optim import lr_scale
from tests.inside import worker
from tests.runs import make_runner, toy_config

COMPAT = "rlinf-0.4"


def expert_episode(compat: str | None, max_episode_steps: int) -> tuple[int, bool, bool]:
    """Steps of an episode that the toy's expert plays, one at a time, and its last two flags."""
    cfg = EnvConfig(env_type="toy", total_num_envs=1, max_episode_steps=max_episode_steps, num_processes=1)
    env = env_class(compat)(cfg, env_spec(cfg), env_ids=range(1), mode="train", chunk_size=1, seed=0)
    try:
        env.reset()
        for steps in range(1, max_episode_steps + 1):
            step = env.chunk_step(None)
            if bool(step.terminated | step.truncated):
                return steps, bool(step.terminated), bool(step.truncated)
    finally:
        env.close()
    raise AssertionError("the time limit did not end the episode")


def test_a_success_on_the_last_allowed_step_has_both_flags() -> None:
    steps, terminated, truncated = expert_episode(None, 100)
    assert (terminated, truncated) == (True, False)
    assert 1 < steps < 100
    assert expert_episode(None, steps) == (steps, True, False)
    assert expert_episode(COMPAT, steps) == (steps, True, True)
    assert expert_episode(COMPAT, steps + 1) == (steps, True, False)
    assert expert_episode(COMPAT, steps - 1) == (steps - 1, False, True)


@pytest.mark.parametrize("compat", [None, COMPAT])
def test_it_is_bootstrapped_in_a_run(tmp_path, compat) -> None:
    """Every env succeeds on its last allowed step: published, the value of the final observation is added."""
    settings = ["env.train.auto_reset=true", "env.train.max_episode_steps=2", "env.train.max_steps_per_rollout_epoch=4"]
    runner = make_runner(toy_config(tmp_path, *settings, *([f"compat={compat}"] if compat else [])))
    try:
        env, actor = worker(runner, "env"), worker(runner, "actor")
        vec = env._env("train", 0)
        success = vec._fleet.array
        vec._fleet.array = lambda row, name: ones(success(row, name)) if name == "success" else success(row, name)
        runner.cluster.get(runner.begin_rollout(0))
        trajectory = worker(runner, "rollout").trajectory()
        trajectory.final_values.fill_(10.0)  # a critic that hopes
        runner.cluster.get([runner.actor.one(0, "compute_advantages", *runner.experience()[0])])
        assert trajectory.terminated.any()
        hoped = float(actor.targets.returns.mean())
        assert (hoped > 5) == (compat is not None)
    finally:
        runner.close()


def ones(flags):
    """Success on the last of the flags, and only there."""
    flags[:-1], flags[-1] = False, True
    return flags


def test_the_first_training_step_of_a_warm_up_learns_nothing() -> None:
    optim, scales = OptimConfig(lr_warmup_steps=4), {}
    for compat in (None, COMPAT):
        first = choose_formulas(compat).first_warmup_step
        scales[compat] = [lr_scale(optim, step, 100, first_warmup_step=first) for step in range(6)]
    assert scales == {None: [0.25, 0.5, 0.75, 1, 1, 1], COMPAT: [0, 0.25, 0.5, 0.75, 1, 1]}
