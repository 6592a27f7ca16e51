"""`rlinf bench --sweep`: what is tried, what is kept, and that it ends in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.commands import sweep
from rlinf.commands.sweep import Timing, run_sweep, search, settings, short_run
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.errors import UserError
from tests.runs import toy_config


@pytest.fixture
def recipe() -> Config:
    return load_config("metaworld_50_ppo_openpi", [], purpose="plan", devices=[1])


def test_a_short_run_keeps_the_batch_arithmetic(recipe: Config) -> None:
    assert short_run(recipe) == [
        "env.train.rollout_epoch=1", "algorithm.update_epoch=1", "actor.global_batch_size=256"
    ]  # fmt: skip
    load_config("metaworld_50_ppo_openpi", short_run(recipe), purpose="plan", devices=[1])


def test_the_faster_value_of_each_setting_is_kept(
    recipe: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = [("stages", [2]), ("processes", [8, 16]), ("micro", [256])]
    monkeypatch.setattr(sweep, "settings", lambda cfg: iter(tried))
    gains = {"stages=2": -1.0, "processes=8": 0.5, "processes=16": -2.0, "micro=256": 0.25}
    assert (recipe.env.train.rollout_epoch, recipe.algorithm.update_epoch) == (8, 4)

    def trial(extra: list[str]) -> Timing | str:
        if "micro=256" in extra:
            return "CUDA out of memory"
        return Timing(rollout=10.0 + sum(gains[e] for e in extra), update=1.0)

    assert search(recipe, trial, seconds=1e9) == ["stages=2", "processes=16"]
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "best: 88.0 s a step instead of 112.0 s; paste: stages=2 processes=16"
    assert "  stages=2 processes=16 micro=256: failed (CUDA out of memory)" in out


def test_no_run_begins_that_would_pass_the_limit(
    recipe: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "settings", lambda cfg: iter([("a", [1, 2, 3])]))
    now = [0.0]

    def trial(extra: list[str]) -> Timing:
        now[0] += 40.0
        return Timing(1.0, 1.0)

    assert search(recipe, trial, seconds=130.0, clock=lambda: now[0]) == []
    assert now == [120.0]
    assert capsys.readouterr().out.splitlines()[-2:] == ["time is up before a=3; give --minutes more", "best: as it is"]


def test_every_setting_of_every_kind_of_recipe_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    for name in ("metaworld_50_ppo_openpi", "metaworld_50_grpo_openvlaoft", "toy_grpo_compact"):
        cfg = load_config(name, [], purpose="plan", devices=[1])
        found = dict(settings(cfg))
        assert found["actor.micro_batch_size"] or name.startswith("toy")
        for key, values in found.items():
            for value in values:
                load_config(name, [f"{key}={value}"], purpose="plan", devices=[1])


@pytest.mark.slow
def test_a_sweep_of_the_toy_prints_overrides_that_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["env.train.total_num_envs=8", "actor.micro_batch_size=32", "actor.global_batch_size=32"]
    cfg = toy_config(tmp_path, *small)
    best = run_sweep("toy_ppo_compact", small, cfg, minutes=2.0)
    assert "failed" not in capsys.readouterr().out
    toy_config(tmp_path, *small, *best)


def test_a_recipe_that_cannot_be_measured_is_an_error(recipe: Config) -> None:
    with pytest.raises(UserError, match="cannot be measured"):
        search(recipe, lambda extra: "no such simulator", seconds=1e9)
