"""The same checkpoint on any number of envs and stages plays the same trials with the same noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.commands import jobs
from rlinf.config.load import load_config
from rlinf.data.noise import Noise
from rlinf.results.result import Episode, Result, read_result

HOW = ("env_id", "first_call", "video")  # who played a trial, when, and the file of its env: all that may differ

TRIALS = 16


def evaluate(folder: Path, envs: int, stages: int, *overrides: str, name: str = "toy_ppo_compact") -> Result:
    where = folder / f"{envs}_{stages}"
    own = ["runner.eval_random=true", f"env.eval.total_num_envs={envs}", f"rollout.pipeline_stage_num={stages}"]
    own += [f"runner.logger.log_path={where}", "runner.logger.logger_backends=[]", *overrides]
    jobs.evaluate(load_config(name, own, purpose="eval", devices=[0]))
    return read_result(where)


def outcome(episode: Episode) -> dict[str, object]:
    return {name: value for name, value in vars(episode).items() if name not in HOW}


def differing(first: Result, second: Result) -> list[int]:
    """Numbers of the episodes that are not equal."""
    pairs = zip(first.episodes, second.episodes, strict=True)
    return [a.index for a, b in pairs if outcome(a) != outcome(b)]


def test_noise_belongs_to_the_trial_and_the_call() -> None:
    trials = torch.tensor([[7, 0], [1_000_007, 3], [7, 1]])
    whole = Noise.of_trials(trials, seed=5).normal((4,))
    assert torch.equal(Noise.of_trials(trials[[1]], seed=5).normal((4,)), whole[[1]])
    assert not torch.equal(whole[0], whole[2])
    assert not torch.equal(Noise.of_trials(trials, seed=6).normal((4,)), whole)


def test_batches_of_one_size_give_equal_records(tmp_path: Path, actions: dict[tuple[int, int], bytes]) -> None:
    one_task = ["env.eval.num_trials=9", "env.eval.task_suite_name=toy_red", "env.eval.num_processes=1"]
    two_envs, played = evaluate(tmp_path, 2, 1, *one_task), dict(actions)
    actions.clear()
    four_in_two_stages = evaluate(tmp_path, 4, 2, *one_task)
    assert {len(batch) for r in (two_envs, four_in_two_stages) for batch in r.batches} == {2}
    assert differing(two_envs, four_in_two_stages) == []
    assert actions == played  # bit for bit
    assert two_envs.protocol_hash == four_in_two_stages.protocol_hash


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy_ppo_compact", "metaworld_50_ppo_openpi"])
def test_envs_and_stages_change_no_trial(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], actions: dict[tuple[int, int], bytes]
) -> None:
    settings = [f"env.eval.num_trials={TRIALS}", "actor.model.size=compact", "env.eval.video_cfg.save_video=false"]
    if name.startswith("metaworld"):
        settings += ["env.eval.task_suite_name=drawer-close-v3", "env.eval.init_params={image_size: 32, render: fast}"]
        settings += ["env.eval.max_episode_steps=30", "env.eval.max_steps_per_rollout_epoch=30"]
    hows = [(1, 1), (4, 1), (4, 2), (8, 2), (16, 1), (16, 2), (2, 1)]
    results, executed = {}, {}
    for how in hows:
        results[how], executed[how] = evaluate(tmp_path, *how, *settings, name=name), dict(actions)
        actions.clear()
    wanted = [(e.index, e.task, e.reset_id) for e in results[1, 1].episodes]
    assert len(wanted) == TRIALS
    for how, result in results.items():
        assert [(e.index, e.task, e.reset_id) for e in result.episodes] == wanted
        assert result.protocol_hash == results[1, 1].protocol_hash
        for trial in wanted:  # the first call sees the same scene: the same noise gives the same actions, up to floats
            first, here = (np.frombuffer(executed[at][trial[2], 0], np.float32) for at in ((1, 1), how))
            np.testing.assert_allclose(here, first, rtol=1e-3, atol=1e-4)
        others = len(differing(results[1, 1], result))
        with capsys.disabled():
            print(
                f"\n{name}: {how[0]} envs, {how[1]} stages: {others} of {TRIALS} episodes differ from one env", end=""
            )
        assert others <= TRIALS // 8  # by what the size of a batch does to floats
    one_task = name.startswith("metaworld")  # prompts of two lengths are padded by the batch they are in
    if one_task:
        assert differing(results[4, 1], results[8, 2]) == []
        assert differing(results[2, 1], results[4, 2]) == []
