"""An evaluation plays the same trials, each once, on any number of ranks, stages and envs, even or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlinf.commands import jobs
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.spec import env_spec, eval_trials
from tests.inside import worker
from tests.runs import make_runner, toy_config

FIVE_ENVS = ["env.eval.total_num_envs=5", "env.eval.num_trials=7", "env.eval.num_processes=1"]
PLACEMENTS = {
    "one rank": ({"actor,env,rollout": "0"}, 1),
    "two stages": ({"actor,env,rollout": "0"}, 2),
    "more env than rollout ranks": ({"actor": "0", "env": "0:0-2", "rollout": "0:0-1"}, 2),
    "more ranks and stages than envs": ({"actor": "0", "env": "0:0-1", "rollout": "0:0-3"}, 3),
}


Played = list[tuple[int, str, int]]


def played(records: Sequence[EpisodeRecord]) -> Played:
    """Env, task and trial of every episode, in the order of the records."""
    return [(r.env_id, r.task, r.reset_id) for r in records]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(toy_config(tmp_path_factory.mktemp("one"), *FIVE_ENVS))


def play(cfg: Config) -> Played:
    runner = make_runner(cfg)
    try:
        return played(runner.play_trials())
    finally:
        runner.close()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_trial_once_in_uneven_shares(tmp_path: Path, on_one_rank: Played, name: str) -> None:
    placement, stages = PLACEMENTS[name]
    where = [f"cluster.component_placement={json.dumps(placement)}", f"rollout.pipeline_stage_num={stages}"]
    cfg = toy_config(tmp_path, *FIVE_ENVS, "env.train.total_num_envs=48", "runner.val_check_interval=1", *where)
    records = play(cfg)
    assert sorted(r[2] for r in records) == sorted(eval_trials(cfg.env.eval, env_spec(cfg.env.eval)))
    assert records == on_one_rank  # also in the same order


def test_ray_plays_the_same_trials(tmp_path: Path, ray_address: str, on_one_rank: Played) -> None:
    ray = [f"cluster.ray_address={ray_address}", "cluster.backend=ray", "cluster.virtual_devices=2"]
    where = ["cluster.component_placement={'actor,env,rollout': all}", "rollout.pipeline_stage_num=2"]
    own = [f"runner.logger.log_path={tmp_path}", "runner.logger.logger_backends=[]"]
    own += ["runner.eval_random=true"]
    cfg = load_config("toy_ppo_compact", [*own, *FIVE_ENVS, *ray, *where], purpose="eval")
    assert played(jobs.evaluate(cfg)[1]) == on_one_rank


def test_envs_without_a_trial_are_not_started(tmp_path: Path) -> None:
    cfg = toy_config(tmp_path, "env.eval.total_num_envs=64", "env.eval.num_trials=3", "env.eval.num_processes=64")
    assert make_plan(cfg, [0]).eval_envs.num_envs == 3
    runner = make_runner(cfg)
    try:
        runner.cluster.get(runner.env.call("begin", mode="eval", stage=0))
        assert len(worker(runner, "env")._env("eval", 0)._fleet.pids()) == 3
    finally:
        runner.close()


SHORT = ["actor.model.size=compact", "actor.model.model_path=null", "actor.model.precision=fp32"]
SHORT += ["env.eval.max_episode_steps=5", "env.eval.max_steps_per_rollout_epoch=5", "env.eval.num_trials=-1"]
SHORT += ["env.eval.init_params.image_size=64", "env.eval.init_params.render=fast"]
SHORT += ["env.eval.video_cfg.save_video=false", "env.eval.num_processes=1", "runner.logger.logger_backends=[]"]
RECIPES = {  # held-out trials, and what keeps them cheap
    "metaworld_50_ppo_openpi": (500, ["env.eval.init_params.max_loaded_tasks=1"]),
    "metaworld_45_ppo_openpi": (100, ["env.eval.init_params.max_loaded_tasks=2"]),
    "calvin_d_d_ppo_openpi": (
        100,
        ["env.eval.init_params.wrist_image_size=64", "env.eval.init_params.eval_sequences=100"],
    ),
}


def recipe_runs(name: str, folder: Path) -> Iterator[set[tuple[str, int]]]:
    """The (task, trial) pairs that `rlinf eval` records on one and on eight devices, with one and two stages."""
    trials, overrides = RECIPES[name]
    for devices in (1, 8):
        for stages in (1, 2):
            log = folder / f"{devices}_{stages}"
            where = [f"cluster.virtual_devices={devices}", f"rollout.pipeline_stage_num={stages}"]
            where += ["cluster.component_placement={'actor,env,rollout': all}", f"runner.logger.log_path={log}"]
            where += ["runner.eval_random=true"]
            jobs.evaluate(load_config(name, [*SHORT, *overrides, *where], purpose="eval"))
            episodes = json.loads((log / "eval" / "step_0" / "result.json").read_text())["episodes"]
            pairs = {(e["task"], e["reset_id"]) for e in episodes}
            assert len(episodes) == len(pairs) == trials, (devices, stages)
            yield pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_evaluates_alike_on_one_and_eight_devices(
    tmp_path: Path, calvin_path: Path, monkeypatch, name
) -> None:
    monkeypatch.setenv("CALVIN_PATH", str(calvin_path))
    first, *others = recipe_runs(name, tmp_path)
    assert all(pairs == first for pairs in others)
