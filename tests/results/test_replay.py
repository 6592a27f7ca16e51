"""`rlinf replay` plays the recorded episode: the same actions bit for bit, in a batch of the recorded shape."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlinf.commands import jobs
from rlinf.commands.cli import DIFFERS, app
from rlinf.commands.replay import run_replay
from rlinf.commands.selection import best_checkpoint
from rlinf.config.load import load_config
from rlinf.demos.probe import Probe
from rlinf.errors import UserError
from rlinf.results.result import find_result, read_result
from tests.runs import toy_config

Actions = dict[tuple[int, int], bytes]  # (reset id, call of the episode) -> the actions that were executed
TOY = ["runner.logger.logger_backends=[]", "env.eval.num_processes=1"]
RENDER = "{image_size: 32, render: fast}"


def evaluate(folder: Path, name: str, *overrides: str) -> None:
    own = [f"runner.logger.log_path={folder}", *overrides]
    jobs.evaluate(load_config(name, own, purpose="eval", devices=[0]))


def replays(folder: Path, name: str, *overrides: str, actions: Actions, count: int = 10) -> None:
    """Evaluate, replay some random episodes: success, steps, return and every action are as recorded."""
    evaluate(folder, name, *overrides)
    first, episodes = dict(actions), read_result(folder).episodes
    actions.clear()
    chosen = random.Random(1).sample(range(len(episodes)), count)
    played, video = run_replay(f"{folder}#{','.join(map(str, chosen))}")
    assert [p.recorded.index for p in played] == chosen
    assert [str(p) for p in played if p.differences] == []
    assert first.items() >= actions.items()
    assert video is not None
    assert video.stat().st_size > 0
    if "runner.eval_expert=true" not in overrides:
        assert len(actions) == sum(p.recorded.calls for p in played)


def test_a_toy_result_with_mixed_prompts_and_two_stages(tmp_path: Path, actions: Actions) -> None:
    settings = ["runner.eval_random=true", "env.eval.num_trials=17", "env.eval.total_num_envs=6", *TOY]
    replays(tmp_path, "toy_ppo_compact", *settings, "rollout.pipeline_stage_num=2", actions=actions, count=4)
    assert read_result(tmp_path).batches == ((0, 2, 4), (1, 3, 5))
    for given, says in {
        f"{tmp_path}#17": "#17: its episodes are numbered 0 to 16",
        f"{tmp_path}#-1": "#-1: its episodes are numbered 0 to 16",
        f"{tmp_path}#x": "after # stand numbers of episodes",
        f"{tmp_path}": "name what to replay",
        f"{tmp_path / 'video'}#1": "does not exist",
    }.items():
        with pytest.raises(UserError, match=says):
            run_replay(given)
    with pytest.raises(UserError, match=r"--task=reach-rde: .*did you mean 'reach-red'"):
        run_replay(str(tmp_path), task="reach-rde")
    with pytest.raises(UserError, match="was played by the random policy, which has no files"):
        run_replay(f"{tmp_path}#0", policy=tmp_path)
    whole = json.loads(find_result(tmp_path).read_text())
    first = whole["episodes"][0]
    for change, says in (
        ({"config": {}}, "its config has no runner$"),
        ({"config": whole["config"] | {"actor": {}}}, r"its config has no actor\.model"),
        ({"batches": []}, r"its batches do not hold env_id 0 of episode #0"),
        ({"batches": [[0, 99]]}, "episodes of env_id 99 have no instructions"),
        ({"episodes": [first | {"instructions": []}]}, "episodes of env_id 0 have no instructions"),
        ({"episodes": [first, first | {"index": 1}]}, "two of its episodes have the same reset_id"),
        ({"episodes": []}, "it holds no episodes"),
        ({"device": {"threads": "x"}}, "device.threads='x' must be an integer"),
    ):
        find_result(tmp_path).write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match=rf"result\.json is damaged: {says}"):
            run_replay(f"{tmp_path}#0")
    policy = {"kind": "checkpoint", "path": "absent", "sha256": "00", "training_run": None}
    find_result(tmp_path).write_text(json.dumps(whole | {"policy": policy, "provenance": {}}))
    with pytest.raises(UserError, match="was played by absent, which does not exist"):
        run_replay(f"{tmp_path}#0")


@pytest.mark.slow
def test_failures_of_a_task_on_one_sheet(tmp_path: Path) -> None:
    evaluate(tmp_path, "toy_ppo_compact", "runner.eval_random=true", "env.eval.num_trials=40", *TOY)
    failed = [e.index for e in read_result(tmp_path).episodes if e.task == "reach-red" and not e.success_once]
    played, sheet = run_replay(str(tmp_path), failures=True, task="reach-red")
    assert [p.recorded.index for p in played] == failed
    assert not any(p.played.success_once or p.differences for p in played)
    assert sheet == tmp_path / "eval/step_0/replay/failures_reach-red.mp4"
    again = run_replay(f"{tmp_path}/eval/step_0/result.json", failures=True, task="reach-red")[1]
    assert again == sheet.with_name("failures_reach-red-2.mp4")  # nothing is overwritten


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The result of a run, changed."""
    path = read_result(folder).path
    assert path is not None
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def test_an_expert_result_and_what_differs_from_it(tmp_path: Path, actions: Actions) -> None:
    settings = ["runner.eval_expert=true", "env.eval.num_trials=3", "env.eval.total_num_envs=2", *TOY]
    replays(tmp_path, "toy_ppo_compact", *settings, actions=actions, count=2)
    changed(tmp_path, lambda content: content["episodes"][1].update({"steps": 99}))
    ran = CliRunner().invoke(app, ["replay", f"{tmp_path}#0,1", "--no-video"])
    assert ran.exit_code == DIFFERS
    first, second, last = ran.stdout.splitlines()
    assert first.endswith("; as recorded")
    assert second.endswith(", recorded 99")
    assert last == "1 of 2 as recorded"
    changed(tmp_path, lambda content: content["protocol"].update({"simulator.version.toy": "1.0"}))
    with pytest.raises(UserError, match=r"cannot be replayed here: simulator\.version\.toy is None, recorded 1\.0"):
        run_replay(f"{tmp_path}#0")


def test_episodes_are_found_by_their_index_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "pick#ed"
    evaluate(folder, "toy_ppo_compact", "runner.eval_expert=true", "env.eval.num_trials=3", *TOY)
    file = changed(folder, lambda content: content["episodes"].reverse())
    for episode in run_replay(f"{folder}#2,0", film=False)[0]:
        assert not episode.differences
        assert episode.played.reset_id == episode.recorded.reset_id
    assert [p.recorded.index for p in run_replay(str(file), task="reach-red", film=False)[0]] == [1, 0]
    changed(folder, lambda content: content["episodes"].pop(0))
    with pytest.raises(UserError, match="#2: its episodes are numbered 0 to 1"):
        run_replay(f"{folder}#2")
    ran = CliRunner().invoke(app, ["replay", f"{file}#0", "--output", str(file / "x")])
    assert isinstance(ran.exception, UserError)
    assert str(ran.exception).startswith(f"--output={file / 'x'} cannot be written: Not a directory")


@pytest.mark.slow
def test_the_policy_of_a_training_run_is_found_chosen_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    few = [
        "env.train.total_num_envs=4",
        "env.eval.total_num_envs=2",
        "env.eval.num_trials=3",
        "env.train.num_processes=1",
    ]
    few += [
        "algorithm.update_epoch=1",
        "actor.micro_batch_size=8",
        "actor.global_batch_size=8",
        "env.eval.num_processes=1",
    ]
    settings = ["runner.max_epochs=2", "runner.val_check_interval=1", "runner.save_interval=2", *few]
    jobs.train(toy_config(run, *settings))
    first, last = (read_result(run / f"eval/step_{n}") for n in (1, 2))
    checkpoint = run / "toy_ppo_compact/checkpoints/global_step_2"
    assert (last.policy.path, last.policy.training_run) == (str(checkpoint), last.run)
    with pytest.raises(UserError, match="the policy of step 1 was never saved"):
        run_replay(f"{first.path}#0")
    assert [p.differences for p in run_replay(f"{run}#0,2", film=False)[0]] == [[], []]

    ids: list[int] = []
    play = Probe.play_policy
    monkeypatch.setattr(
        Probe, "play_policy", lambda self, policy: (ids.extend(self.env._ids.trials), play(self, policy))[1]
    )
    best, selection = best_checkpoint("toy_ppo_compact", [*few, f"runner.ckpt_path={run}"], 4)
    assert best == checkpoint
    assert (selection["trials"], [c["step"] for c in selection["candidates"]]) == (4, [2])
    assert not {*ids} & {e.reset_id for e in last.episodes}
    assert "selection: global_step_2 " in capsys.readouterr().out

    moved = tmp_path / "moved"
    shutil.move(checkpoint, moved)
    with pytest.raises(UserError, match="which does not exist; --policy names the place it was moved to"):
        run_replay(f"{run}#0")
    assert not run_replay(f"{run}#0", policy=moved / "actor/model", film=False)[0][0].differences
    with (moved / "actor/model/norm_stats.json").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="its files have changed"):
        run_replay(f"{run}#0", policy=moved / "actor/model")


RANDOM = ["runner.eval_random=true", "actor.model.size=compact", "runner.logger.logger_backends=[]"]
EXPERT = ["runner.eval_expert=true", "runner.logger.logger_backends=[]"]


@pytest.mark.slow
@pytest.mark.parametrize("player", [RANDOM, EXPERT], ids=["policy", "expert"])
def test_ten_episodes_of_a_metaworld_result(tmp_path: Path, actions: Actions, player: list[str]) -> None:
    settings = ["env.eval.task_suite_name=[drawer-close-v3,reach-v3,door-close-v3]", "env.eval.num_trials=12"]
    settings += ["env.eval.total_num_envs=4", f"env.eval.init_params={RENDER}", "env.eval.max_episode_steps=60"]
    settings += ["env.eval.max_steps_per_rollout_epoch=60"]
    replays(tmp_path, "metaworld_50_ppo_openpi", *player, *settings, actions=actions)
    assert read_result(tmp_path).success["successes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("player", [RANDOM, EXPERT], ids=["policy", "expert"])
def test_ten_episodes_of_a_calvin_result(
    tmp_path: Path, calvin_path: Path, actions: Actions, player: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALVIN_PATH", str(calvin_path))
    render = "{image_size: 32, wrist_image_size: 32, render: fast, renderer: tiny"
    tasks = ", tasks: [open_drawer, turn_on_led]}" if player is EXPERT else ", eval_sequences: 12}"
    settings = [f"env.eval.init_params={render}{tasks}", "env.eval.num_trials=12", "env.eval.total_num_envs=3"]
    settings += ["env.eval.max_episode_steps=120", "env.eval.max_steps_per_rollout_epoch=120"]
    replays(tmp_path, "calvin_d_d_ppo_openpi", *player, *settings, actions=actions)


@pytest.mark.slow
@pytest.mark.parametrize("player", [RANDOM, EXPERT], ids=["policy", "expert"])
def test_ten_episodes_of_a_maniskill_result(
    tmp_path: Path, maniskill_path: Path, actions: Actions, player: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANISKILL_ASSET_DIR", str(maniskill_path))
    settings = ["env.eval.total_num_envs=3", "env.eval.num_trials=11", "env.eval.init_params.image_size=32"]
    replays(tmp_path, "maniskill_ppo_compact", *player, *settings, actions=actions)
