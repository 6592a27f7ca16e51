"""RoboTwin's adapter: what it says without RoboTwin, and what it does with a double of its task API."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.demos.player import DemoJob, DemoPlayer
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import check_setup, env_spec, eval_trials
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.models import images
from rlinf.simulators.robotwin.assets import COMMIT, asset_hash, commit_of
from rlinf.simulators.robotwin.picture import center_crop
from rlinf.simulators.robotwin.seeds import FORMAT, MAX_SUBSTITUTES, SPLITS, substitute
from rlinf.simulators.robotwin.tasks import UNSUPPORTED, all_tasks, task_and_seed
from tests.robotwin_double import write_double

PIPER = {"embodiment": ["piper", "piper", 0.6]}
FIRST = 100_100_000  # held-out seeds


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROBOTWIN_PATH", "ASSETS_PATH", "ROBOTWIN_PYTHON", "ROBOT_PLATFORM"):
        monkeypatch.delenv(name, raising=False)


def config(double: Path | None = None, **given: Any) -> EnvConfig:
    """An env block of stack_blocks_two."""
    params = {"render": "fast", **given.pop("init_params", {})}
    if double is not None:
        params["robotwin_path"] = str(double)
    task_config = {"task_name": "stack_blocks_two", **PIPER, **given.pop("task_config", {})}
    return EnvConfig(env_type="robotwin", task_config=task_config, init_params=params, **given)


def make(cfg: EnvConfig, *, chunk: int = 5, mode: Any = "eval", trials: list[int] | None = None) -> VecEnv:
    spec, envs = env_spec(cfg), range(cfg.total_num_envs)
    return VecEnv(cfg, spec, env_ids=envs, mode=mode, chunk_size=chunk, seed=0, trials=trials)


def targets(*first_joints: float) -> torch.Tensor:
    """A chunk [1, C, 14] whose first column is given; grippers stay open."""
    actions = torch.zeros(1, len(first_joints), 14)
    actions[..., 0] = torch.tensor(first_joints)
    actions[..., [6, 13]] = 1.0
    return actions


def test_46_tasks_and_four_refusals() -> None:
    assert len(all_tasks()) == 46
    for task in all_tasks():
        spec = env_spec(config(task_config={"task_name": task}))
        assert (spec.tasks, spec.action_dim, spec.state_dim) == ((task,), 14, 14)
        assert 400 <= spec.step_limits[task] <= 1700
        for split, numbers in SPLITS.items():
            ids = spec.reset_ids[split]
            assert len(ids) >= 100
            assert ids[0] in numbers
            assert ids[len(ids) - 1] in numbers
    for task in UNSUPPORTED:
        with pytest.raises(UserError, match=f"'{task}' is not supported"):
            env_spec(config(task_config={"task_name": task}))
    with pytest.raises(UserError, match="did you mean 'click_bell'"):
        env_spec(config(task_config={"task_name": "click_bel"}))


def test_observations_have_the_published_shapes() -> None:
    assert env_spec(config()).image_size == (240, 320)
    assert env_spec(config(center_crop=True)).image_size == (224, 224)
    spec = env_spec(config(task_config={"camera": {"collect_wrist_camera": True, "head_camera_type": "Large_D435"}}))
    assert (spec.image_size, spec.num_wrist_images, spec.wrist_image_size) == ((480, 640), 2, (240, 320))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"task_config": {"embodiment": ["piper"] * 2}}, "task_config.embodiment"),
        ({"task_config": {"embodiment": ["franka-panda"]}}, "7 joints"),
        ({"task_config": {"step_lim": 0}}, "task_config.step_lim=0"),
        ({"task_config": {"camera": {"head_camera_type": "D415"}}}, "D415"),
        ({"task_config": {"camera": {"collect_head_camera": False}}}, "collect_head_camera"),
        ({"task_suite_name": "click_bell"}, "must not differ"),
        ({"task_config": {"task_name": "lift_pot"}, "init_params": {"reward": "dense"}}, "none for lift_pot"),
        ({"use_custom_reward": True, "init_params": {"reward": "dense"}}, "use_custom_reward"),
        ({"seeds_path": "/nowhere/seeds.json"}, "seeds_path=/nowhere/seeds.json cannot be read"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told.replace("[", "\\[")):
        env_spec(config(**given))


def test_a_list_of_tasks_keeps_seeds_and_step_limits_apart() -> None:
    cfg = EnvConfig(
        env_type="robotwin", task_suite_name=["stack_blocks_two", "click_bell"], task_config=PIPER, num_trials=6
    )
    spec = env_spec(cfg, "env.eval")
    assert spec.step_limits == {"stack_blocks_two": 800, "click_bell": 400}
    played = [task_and_seed(i, "?") for i in eval_trials(cfg, spec)]
    assert [task for task, _ in played] == ["stack_blocks_two"] * 3 + ["click_bell"] * 3
    assert all(seed in SPLITS["eval"] for _, seed in played)


def test_published_lists_apply_unless_assets_are_others(tmp_path: Path) -> None:
    published = "REPO/rlinf/envs/robotwin/seeds/eval_seeds.json"
    listed = env_spec(config(seeds_path=published)).reset_ids
    assert (listed["eval"][0], len(listed["eval"]), len(listed["train"])) == (FIRST, 100, 1000)
    double = write_double(tmp_path)
    assert isinstance(env_spec(config(double)).reset_ids["eval"], range)  # no clutter objects: not the originals
    (tmp_path / "assets/objects/objaverse/list.json").write_text('{"item_names": ["apple"]}')
    assert len(env_spec(config(write_double(tmp_path / "b"))).reset_ids["train"]) == 100_000


def test_a_list_of_ones_own_belongs_to_its_assets(tmp_path: Path) -> None:
    double, path = write_double(tmp_path), tmp_path / "seeds.json"
    own = {"format": FORMAT, "version": 1, "assets": asset_hash(double.resolve())}
    own["tasks"] = {"stack_blocks_two": {"seeds": [3, FIRST + 7, 5]}}
    path.write_text(json.dumps(own))
    ids = env_spec(config(double, seeds_path=str(path))).reset_ids
    assert (ids["train"], ids["eval"]) == ([3, 5], [FIRST + 7])
    path.write_text(json.dumps(own | {"assets": "0" * 16}))
    with pytest.raises(UserError, match="made with other assets"):
        env_spec(config(double, seeds_path=str(path)))
    path.write_text(json.dumps({"click_bell": [1]}))
    with pytest.raises(UserError, match=r"has no seeds of stack_blocks_two.*rlinf seeds robotwin stack_blocks_two"):
        env_spec(config(double, seeds_path=str(path)))


def test_substitutes_are_seeds_of_no_list() -> None:
    tried = [substitute(seed, n) for seed in (0, FIRST, 3 * 10**8 - 1) for n in range(1, MAX_SUBSTITUTES + 1)]
    assert len(set(tried)) == len(tried)
    assert max(tried) < 2**32
    assert not any(seed in numbers for seed in tried for numbers in SPLITS.values())


def test_missing_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refused(cfg: EnvConfig) -> str:
        with pytest.raises(UserError) as caught:
            check_setup(cfg, "env.train")
        return str(caught.value)

    assert "ROBOTWIN_PATH is not set" in refused(config())
    assert "robotwin_path=/nowhere is not a folder" in refused(config(init_params={"robotwin_path": "/nowhere"}))
    (tmp_path / "other").mkdir()
    assert "must be RoboTwin's branch RLinf_support" in refused(config(tmp_path / "other"))
    double = write_double(tmp_path / "double")
    assert "assets_path=/nowhere holds no assets/embodiments" in refused(config(double, assets_path="/nowhere"))
    assert "franka" not in refused(config(double, task_config={"embodiment": ["aloha-agilex"]}))
    assert "aloha-agilex/config.yml is missing" in refused(config(double, task_config={"embodiment": ["aloha-agilex"]}))
    textured = {"domain_randomization": {"random_background": True}}
    assert "random_background: false" in refused(config(double, task_config=textured))
    check_setup(config(double), "env.train")
    assert "of an unknown commit, not 0008ae68" in caplog.text


def test_the_commit_is_read_without_git(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    git.mkdir()
    assert commit_of(tmp_path) is None
    (git / "HEAD").write_text("ref: refs/heads/RLinf_support\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/RLinf_support\n")
    assert commit_of(tmp_path) == COMMIT
    (git / "HEAD").write_text("0" * 40)
    assert commit_of(tmp_path) == "0" * 40


def test_the_crop_is_the_models_own() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    want = images.center_crop(torch.from_numpy(picture)[None], 224)[0].numpy()
    assert np.array_equal(center_crop(picture, (224, 224)), want)


def test_a_chunk_is_one_path_with_its_reward_at_the_end(tmp_path: Path) -> None:
    cfg = config(write_double(tmp_path), total_num_envs=1, max_episode_steps=12, reward_coef=5.0)
    env = make(cfg, trials=[FIRST, FIRST + 1])
    try:
        obs = env.reset().obs
        assert obs.task_descriptions == [f"stack_blocks_two block {FIRST} {FIRST}"]  # of this very seed
        assert obs.states is not None
        assert obs.states[0, 7] == np.float32(np.random.RandomState(FIRST).rand())
        assert obs.images[0, 0, :2, 0].tolist() == [1, 1]  # one picture, and the renderer was told once
        step = env.chunk_step(targets(0.1, 0.2, 0.3, 0.4, 0.5))
        assert step.obs.images[0, 0, :2, 0].tolist() == [2, 2]  # though there were 51 physics steps
        assert step.rewards.sum() == 0
        step = env.chunk_step(targets(0.6, 0.7, 1.0, 0.0, 0.0))
        assert step.rewards.tolist() == [[0, 0, 0, 0, 5.0]]
        assert step.terminated.tolist() == [[False] * 4 + [True]]
        assert step.obs.task_descriptions == [f"stack_blocks_two block {FIRST + 1} {FIRST + 1}"]
        for _ in range(3):
            step = env.chunk_step(targets(0.0, 0.0, 0.0, 0.0, 0.0))
        assert step.valid.tolist() == [[True, True, False, False, False]]  # cut at 12
        assert [(r.success_once, r.steps) for r in env.drain_episodes()] == [(True, 10), (False, 12)]
    finally:
        env.close()


def test_chunks_of_one_and_the_shaped_reward(tmp_path: Path) -> None:
    cfg = config(write_double(tmp_path), total_num_envs=1, init_params={"reward": "dense"}, task_config={"step_lim": 2})
    env = make(cfg, chunk=1, trials=[FIRST, FIRST + 1])
    try:
        env.reset()
        paid = [env.chunk_step(targets(x)) for x in (0.25, 0.5, 0.75, 1.0)]
        rewards = [step.rewards.item() for step in paid]
        assert rewards == pytest.approx([0.25, 0.25, 0.75, 0.25])
        assert [step.truncated.item() for step in paid] == [False, True, False, False]  # step_lim cuts the first
        assert [step.terminated.item() for step in paid] == [False, False, False, True]
    finally:
        env.close()


def test_faults_are_survived_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faults = {FIRST + 1: "unstable", substitute(FIRST + 1, 1): "unstable", FIRST + 2: "hang", FIRST + 3: "die"}
    double = write_double(tmp_path, faults)
    cfg = config(double, total_num_envs=2, num_processes=2, max_episode_steps=5, step_deadline_s=3.0)
    env = make(cfg, trials=[FIRST + i for i in range(4)])
    try:
        with caplog.at_level(logging.WARNING):
            env.reset()
            while not env.done:
                env.chunk_step(targets(0.0, 0.0, 0.0, 0.0, 1.0).expand(2, -1, -1))
        records = sorted(env.drain_episodes(), key=lambda record: record.reset_id)
        assert [(r.reset_id, r.success_once) for r in records] == [(FIRST + i, True) for i in range(4)]
        assert [r.extra["unstable_seeds"] for r in records] == [0.0, 2.0, 0.0, 0.0]
        assert env.num_restarts == 2
    finally:
        env.close()
    tried = f"seed {FIRST + 1}, {substitute(FIRST + 1, 1)} do not come to rest; seed {substitute(FIRST + 1, 2)} is"
    assert tried in caplog.text
    assert "gave no sign of life for 3 s" in caplog.text
    assert "exit status 9" in caplog.text


def test_as_published_the_first_seed_is_described(tmp_path: Path) -> None:
    double = write_double(tmp_path, {FIRST + 2: "unstable"})
    cfg = config(double, total_num_envs=1, max_episode_steps=1, init_params={"compat": True})
    env = make(cfg, chunk=1, trials=[FIRST, FIRST + 2])
    try:
        env.reset()
        obs = env.chunk_step(targets(0.0)).obs
        assert obs.task_descriptions == [f"stack_blocks_two block {FIRST} {FIRST + 2}"]
        assert obs.states is not None
        assert obs.states[0, 7] == np.float32(np.random.RandomState(FIRST + 3).rand())
    finally:
        env.close()


def test_a_leak_ends_the_process_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = write_double(tmp_path, {FIRST + i: "leak" for i in range(5)})
    cfg = config(double, total_num_envs=1, max_episode_steps=1, init_params={"max_growth_mb": 100}, max_restarts=9)
    env = make(cfg, chunk=1, trials=[FIRST + i for i in range(5)])
    try:
        env.reset()
        while not env.done:
            env.chunk_step(targets(0.0))
        assert len(env.drain_episodes()) == 5
        assert env.num_restarts >= 1
    finally:
        env.close()
    assert "memory grew by" in caplog.text


def test_the_planner_shows_how_and_its_targets_solve_the_task(tmp_path: Path) -> None:
    double = write_double(tmp_path)
    cfg = config(double, total_num_envs=1, max_episode_steps=100)
    with DemoPlayer(cfg, env_spec(cfg), num_processes=1) as player:
        (demo,) = player.play([DemoJob(reset_id=2 * 10**8, max_steps=100)])
    assert demo.success
    assert demo.actions.shape == (40, 14)
    assert np.allclose(demo.actions[:, 0], 0.025 * np.arange(1, 41))
    assert np.array_equal(demo.states[1:], demo.actions[:-1])
    assert demo.images[:, 0, 0, 0].tolist() == list(range(1, 41))  # a picture for every row
    env = make(cfg, chunk=32, trials=[FIRST])
    try:
        env.reset()
        while not env.done:
            env.chunk_step(None)
        (record,) = env.drain_episodes()
        assert (record.success_once, record.steps) == (True, 40)
    finally:
        env.close()
