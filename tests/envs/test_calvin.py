"""The CALVIN simulator: chains through VecEnv, equal starts everywhere, the files it needs, and bad input."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rlinf.simulators.calvin as calvin
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec
from rlinf.envs.vec import VecEnv
from rlinf.errors import NotInstalledError, UserError
from rlinf.metrics.episode_summary import own_metrics, summarise
from rlinf.metrics.names import expand
from rlinf.simulators import installed
from rlinf.simulators.calvin import Options, Scene
from rlinf.simulators.calvin.assets import check_folder, find_folder, read_annotations
from rlinf.simulators.calvin.starts import CHAIN_SLOT, SCENES, ids_of, start_of
from rlinf.simulators.calvin.symbolic import evaluation_sequences
from rlinf.simulators.calvin.tasks import COLOURS, TASKS
from rlinf.simulators.contract import AbsentError, SetupError
from rlinf.simulators.opengl import egl_works

pytestmark = pytest.mark.usefixtures("calvin_path")

REPO = Path(__file__).parents[2]
SMALL = {"image_size": 32, "wrist_image_size": 32, "render": "fast", "renderer": "tiny"}
LED_FIRST = 53  # turn_on_led, open_drawer, ...
STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


def chain_id(number: int, scene: str = "D") -> int:
    return ids_of(scene, [CHAIN_SLOT], range(1000))[number]


def press_button() -> np.ndarray:
    """From the start over scene D's button and down onto it, fingers closed; f32 [20, 7]."""
    plan = [((-0.1459, 0.1113, 0.0), 9), ((0.0, 0.0, -0.105), 8), ((0.0, 0.0, 0.0), 3)]
    return np.array([[*(np.array(way) / 0.02 / n), 0, 0, 0, -1] for way, n in plan for _ in range(n)], np.float32)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene(Options(**SMALL))
    yield made
    made.close()


def make_env(*, trials: list[int] | None = None, chunk: int = 5, envs: int = 1, **keys: Any) -> VecEnv:
    params = SMALL | keys.pop("init_params", {})
    keys = {"max_episode_steps": 60, "num_processes": 1, "use_rel_reward": True} | keys
    cfg = EnvConfig(env_type="calvin", total_num_envs=envs, init_params=params, **keys)
    mode = "train" if trials is None else "eval"
    return VecEnv(cfg, env_spec(cfg), env_ids=range(envs), mode=mode, chunk_size=chunk, seed=1, trials=trials)


def test_the_instruction_changes_in_the_middle_of_a_chunk_and_the_press_pays_once() -> None:
    """A whole press in one chunk; the finger then rests on the button, which lights nothing and pays nothing."""
    first, second = evaluation_sequences()[LED_FIRST][1][:2]
    assert (first, second) == ("turn_on_led", "open_drawer")
    env = make_env(trials=[chain_id(LED_FIRST)], chunk=20, reward_coef=5.0)
    try:
        told = env.reset().obs.task_descriptions
        step = env.chunk_step(torch.from_numpy(press_button())[None])
        assert told == ["press the button to turn on the led light"]
        assert step.obs.task_descriptions == ["pull the handle to open the drawer"]
        assert sorted(set(step.rewards[0].tolist())) == [0.0, 5.0]
        assert step.rewards.sum() == 5.0
        assert 5 < int(step.rewards[0].argmax()) < 19
        for _ in range(2):
            step = env.chunk_step(torch.from_numpy(np.tile(STILL, (20, 1)))[None])
            assert step.rewards.sum() == 0
        (record,) = env.drain_episodes()
    finally:
        env.close()
    assert (record.task, record.steps, record.success_once, record.episode_return) == ("chain-D", 60, False, 5.0)
    assert record.extra == {
        "avg_len": 1.0,
        **{f"success_len_{n}": float(n == 1) for n in range(1, 6)},
        "task/turn_on_led/success_once": 1.0,
        "task/open_drawer/success_once": 0.0,
    }
    metrics = expand({f"eval/{k}": v for k, v in summarise([record]).items()})
    assert metrics["eval/avg_num_subtasks"] == metrics["eval/avg_len"] == 1.0
    assert sum(metrics[f"eval/success_len_{n}"] for n in range(1, 6)) == 1.0
    assert str(own_metrics([record])["success_len_1"]) == "1/1 = 100.0 % [20.7, 100.0]"


def test_the_same_press_in_chunks_is_the_same_episode(scene: Scene) -> None:
    scene.reset(chain_id(LED_FIRST))
    whole = scene.step_chunk(press_button(), stop_on_success=True, record=False)
    after, seen = scene.world.scene_obs(), scene.observe()
    scene.reset(chain_id(LED_FIRST))
    parts = [scene.step_chunk(p, stop_on_success=True, record=True) for p in np.split(press_button(), 4)]
    assert np.array_equal(np.concatenate([p.rewards for p in parts]), whole.rewards)
    assert np.array_equal(scene.world.scene_obs(), after)
    assert [len(p.frames) for p in parts] == [5, 5, 5, 5]
    assert np.array_equal(parts[-1].frames[-1], seen["images"])
    assert scene.chain.task == "open_drawer"
    assert seen["critic_state"].shape == (calvin.spec(scene.options).critic_state_dim,)
    assert seen["critic_state"][39 + TASKS.index("open_drawer")] == 1
    assert seen["critic_state"][-1] == np.float32(0.2)


def test_a_finished_chain_pays_no_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that always says yes: five rewards, then none, however long one plays on."""
    monkeypatch.setattr(calvin.scene, "solved", lambda *_: True)
    scene.reset(chain_id(0))
    result = scene.step_chunk(np.tile(STILL, (9, 1)), stop_on_success=False, record=False)
    assert result.rewards.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert result.success.tolist() == [False] * 4 + [True] * 5
    assert not result.done.any()
    assert result.info["avg_len"] == 5.0
    scene.reset(chain_id(0))
    assert scene.step_chunk(np.tile(STILL, (9, 1)), stop_on_success=True, record=False).steps == 5


@pytest.mark.parametrize(("protocol", "compat"), [("official", False), ("official", True), ("rl", False)])
def test_a_solved_subtask_ends_the_chunk_in_the_official_protocol(protocol: Any, compat: bool) -> None:
    """As the benchmark's evaluator, which asks the policy at once; elsewhere the rest of the chunk is played."""
    made = Scene(Options(**SMALL, protocol=protocol, compat=compat))
    made.reset(chain_id(LED_FIRST))
    result = made.step_chunk(press_button(), stop_on_success=True, record=False)
    state, facts = made.get_state(), made.world.scene_obs()
    made.set_state(state)
    again = made.world.scene_obs()
    made.close()
    at_once = protocol == "official" and not compat
    assert result.steps == (int(result.rewards.argmax()) + 1 if at_once else 20)
    assert result.rewards.sum() == 1
    assert made.chain.task == "open_drawer"
    assert np.array_equal(again, facts)


def test_an_official_evaluation_plays_all_trials_though_chunks_end_early() -> None:
    env = make_env(trials=[chain_id(LED_FIRST)], chunk=20, max_episode_steps=1800, init_params={"protocol": "official"})
    try:
        env.reset()
        step = env.chunk_step(torch.from_numpy(press_button())[None])
        played = int(step.valid.sum())
        assert played < 20
        assert step.valid[0].tolist() == [True] * played + [False] * (20 - played)
        assert step.obs.task_descriptions == ["pull the handle to open the drawer"]
        assert not step.terminated.any()
        assert not step.lost.any()
        while not env.done:
            env.chunk_step(torch.from_numpy(np.tile(STILL, (1, 20, 1))))
        (record,) = env.drain_episodes()
    finally:
        env.close()
    assert record.steps == played + 360
    assert record.extra["fail_once"] == record.extra["fail_at_end"] == 1.0


def test_the_official_protocol_ends_a_subtask_after_360_steps() -> None:
    made = Scene(Options(**SMALL, protocol="official"))
    made.reset(chain_id(LED_FIRST))
    result = made.step_chunk(press_button(), stop_on_success=True, record=False)
    solved_at = int(result.rewards.argmax())
    idle = made.step_chunk(np.tile(STILL, (400, 1)), stop_on_success=True, record=False)
    made.close()
    assert (result.steps - 1 - solved_at) + idle.steps == 360
    assert idle.done.nonzero()[0].tolist() == [idle.steps - 1]
    assert not idle.success.any()
    assert idle.info["avg_len"] == 1.0
    spec = env_spec(EnvConfig(env_type="calvin", max_episode_steps=1800, init_params={"protocol": "official"}))
    assert spec.min_episode_steps == 1800


def digest(scene: Scene, reset_id: int) -> str:
    """Everything seen at a start and after a few steps."""
    made = hashlib.sha256()
    scene.reset(reset_id)
    for actions in (None, np.random.default_rng(reset_id).uniform(-1, 1, (10, 7)).astype(np.float32)):
        if actions is not None:
            scene.step_chunk(actions, stop_on_success=True, record=False)
        seen = scene.observe()
        for name in ("images", "wrist_images", "states", "critic_state"):
            made.update(np.ascontiguousarray(seen[name]).tobytes())
        made.update(seen["task_description"].encode())
    return made.hexdigest()


def some_ids() -> list[int]:
    """A chain and a seeded task of every scene."""
    chains = [chain_id(number, scene) for number, scene in enumerate(SCENES)]
    return chains + [ids_of(s, [25 + i], range(500_000, 500_100))[i] for i, s in enumerate(SCENES)]


def test_an_id_is_the_same_in_this_process_again_and_in_another() -> None:
    made = Scene(Options(task_suite_name="calvin_abcd", **SMALL))
    here = [digest(made, i) for i in some_ids()]
    again = [digest(made, i) for i in reversed(some_ids())][::-1]
    made.close()
    code = (
        "from tests.envs.test_calvin import *\n"
        "made = Scene(Options(task_suite_name='calvin_abcd', **SMALL))\n"
        "print('\\n'.join(digest(made, i) for i in some_ids()))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert here == again
    assert here == [word for word in other.stdout.split() if len(word) == 64]
    assert len(set(here)) == len(here)


def test_members_of_a_group_share_scene_state_and_instruction() -> None:
    env = make_env(envs=6, group_size=2, task_suite_name="calvin_abc", use_ordered_reset_state_ids=True)
    try:
        obs = env.reset().obs
    finally:
        env.close()
    assert [start_of(e.reset_id).scene for e in env._episodes] == ["A", "A", "B", "B", "C", "C"]
    for first in (0, 2, 4):
        for name in ("images", "wrist_images", "states"):
            assert torch.equal(getattr(obs, name)[first], getattr(obs, name)[first + 1])
        assert obs.task_descriptions[first] == obs.task_descriptions[first + 1]
    assert not torch.equal(obs.images[0], obs.images[2])


def test_sentences_are_the_validation_ones_in_d_and_drawn_from_training_elsewhere(calvin_path: Path) -> None:
    validation, training = (read_annotations(calvin_path, kind) for kind in ("validation", "training"))
    assert {len(sentences) for sentences in validation.values()} == {1}
    assert sum(map(len, training.values())) == 389
    made = Scene(Options(task_suite_name="calvin_abc", **SMALL))
    told = set()
    for number in range(6):
        made.reset(chain_id(number, "A"))
        assert made.instruction in training[made.chain.task]
        assert made.instruction == made.instruction
        told.add(made.instruction)
    made.close()
    assert len(told) > 3


def test_fast_draws_the_robot_with_fewer_triangles_and_moves_it_the_same(calvin_path: Path) -> None:
    from rlinf.simulators.calvin.world import World

    start, states, images = start_of(chain_id(3)), [], []
    for render in ("exact", "fast"):
        world = World(calvin_path, Options(render=render, renderer="tiny"))
        world.reset("D", start.robot_obs, start.scene_obs)
        images.append((world.static_image().astype(int), world.wrist_image().astype(int)))
        for action in press_button():
            world.step(action)
        states.append(np.concatenate([world.robot_obs(), world.scene_obs()]))
        world.close()
    assert np.array_equal(*states)
    static, wrist = (float(np.abs(a - b).mean()) for a, b in zip(*images, strict=True))
    print(f"mean difference of 255: static {static:.3f}, gripper {wrist:.5f}")
    assert 0 < static < 1.5
    assert wrist < 0.01


def test_egl_draws_the_same_start_again() -> None:
    """Bullet's plugin draws its first frames without shadows; those are thrown away."""
    if not egl_works():
        pytest.skip("no EGL device answers")
    env = make_env(trials=[chain_id(5)], init_params={"renderer": "egl"})
    try:
        first, second = env.reset().obs, env.reset().obs
    finally:
        env.close()
    plain = make_env(trials=[chain_id(5)])
    try:
        software = plain.reset().obs
    finally:
        plain.close()
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.wrist_images, second.wrist_images)
    assert torch.equal(first.states, software.states)
    assert not torch.equal(first.images, software.images)


@pytest.mark.parametrize("scene_name", ["B", "C"])
def test_corrected_cabinet_positions_rest_on_the_plank(scene_name: str, calvin_path: Path) -> None:
    """As published, a block in the left compartment falls past the plank, and lifting it could never count."""
    from rlinf.simulators.calvin.world import World

    world = World(calvin_path, Options(**SMALL))
    on_plank = {}
    for compat in (False, True):
        start = start_of(chain_id(0, scene_name), compat=compat)
        red = evaluation_sequences()[0][0].red_block
        assert red == "slider_left"
        world.reset(scene_name, start.robot_obs, start.scene_obs)
        for _ in range(15):
            world.step(np.array([0, 0, 0, 0, 0, 0, 1.0]))
        facts = world.facts()
        on_plank[compat] = facts.table_links["plank_link"] in facts.blocks["red"].contacts
    world.close()
    assert on_plank == {False: True, True: False}


@pytest.mark.parametrize("scene_name", SCENES)
def test_seeded_starts_let_their_task_be_done(scene_name: str, calvin_path: Path) -> None:
    """After settling, what must be held is held by the robot alone, and what must lie somewhere lies there."""
    from rlinf.simulators.calvin.world import World

    world = World(calvin_path, Options(**SMALL))
    for task in ("place_in_drawer", "unstack_block", *(f"lift_{c}_block_drawer" for c in COLOURS)):
        start = start_of(ids_of(scene_name, [TASKS.index(task)], range(500))[11])
        world.reset(scene_name, start.robot_obs, start.scene_obs)
        for _ in range(start.settle_steps):
            world.step(np.array([0, 0, 0, 0, 0, 0, start.gripper]))
        facts, blocks = world.facts(), world.facts().blocks.values()
        if task == "place_in_drawer":
            (held,) = [b for b in blocks if b.touching == {facts.robot}]
            assert facts.robot_touches == {held.body}
        elif task == "unstack_block":
            assert any(b.touching and b.touching <= facts.block_bodies for b in blocks)
        else:
            assert facts.table_links["drawer_link"] in facts.blocks[task.split("_")[1]].contacts
        assert all(b.slow for b in blocks)
    world.close()


@pytest.mark.parametrize(("column", "value"), [(2, float("nan")), (0, float("inf")), (6, 0.0)])
def test_bad_actions_are_refused_before_and_in_the_simulator(column: int, value: float, scene: Scene) -> None:
    actions = torch.from_numpy(np.tile(STILL, (5, 1)))[None].clone()
    actions[0, 3, column] = value
    env = make_env(trials=[chain_id(1)])
    try:
        env.reset()
        message = "gripper action of env 0 is 0 at step 3" if column == 6 else "action of env 0 is not finite"
        with pytest.raises(UserError, match=message):
            env.chunk_step(actions)
        assert env.num_restarts == 0
    finally:
        env.close()
    scene.reset(chain_id(1))
    with pytest.raises(ValueError, match="gripper action 0" if column == 6 else "action is not finite"):
        scene.step_chunk(actions[0].numpy(), stop_on_success=True, record=False)


def test_a_reset_id_of_another_scene_or_of_nothing_is_refused(scene: Scene) -> None:
    with pytest.raises(ValueError, match=r"reset id \d+ is of scene A, not of calvin_d"):
        scene.reset(chain_id(0, "A"))
    with pytest.raises(ValueError, match="belongs to no scene and task of CALVIN"):
        start_of(999_000_000)


def linked_copy(original: Path, folder: Path) -> Path:
    """The same tree as links, to take files out of."""
    for parent, _, files in os.walk(original):
        inside = folder / Path(parent).relative_to(original)
        inside.mkdir(parents=True, exist_ok=True)
        for name in files:
            (inside / name).symlink_to(Path(parent) / name)
    return folder


@pytest.mark.parametrize(
    "missing",
    [
        "tasks/new_playtable_validation.yaml",
        "data/calvin_table_D/urdf/calvin_table_D.urdf",
        "data/calvin_table_D/meshes/drawer_link.obj",
        "data/calvin_table_D/meshes/base_link.mtl",
        "data/calvin_table_D/textures/dark_wood.png",
        "data/franka_panda/meshes/visual/link3.obj",
        "data/blocks/block_pink_big.urdf",
        "data/plane/plane.obj",
    ],
)
def test_a_missing_file_is_named(missing: str, calvin_path: Path, tmp_path: Path) -> None:
    folder = linked_copy(calvin_path, tmp_path / "calvin")
    check_folder(folder, "ABCD")
    (folder / missing).unlink()
    with pytest.raises(SetupError, match=f"lacks {missing}; it should hold data/"):
        check_folder(folder, "D")
    if "table_D" in missing:
        check_folder(folder, "ABC")  # only what is played must be there


def test_a_missing_folder_is_a_line_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALVIN_PATH")
    if not installed.installed_folders("calvin"):
        env = make_env(trials=[chain_id(0)])
        with pytest.raises(NotInstalledError, match=r"simulator 'calvin': CALVIN_PATH is not set and there is no data"):
            env.reset()
    monkeypatch.setattr(installed, "REPOSITORY", tmp_path)
    with pytest.raises(AbsentError, match=r"CALVIN_PATH is not set and there is no data/calvin in .*: no folder"):
        find_folder(None)
    for named in ({"data_path": str(tmp_path / "nowhere")}, {"data_path": str(tmp_path)}):
        env = make_env(trials=[chain_id(0)], init_params=named)
        with pytest.raises(UserError, match=r"is not a folder|lacks data/franka_panda/panda_longer_finger\.urdf"):
            env.reset()


def test_the_installed_folder_needs_no_variable_and_a_variable_wins(
    calvin_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "REPOSITORY", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/calvin").symlink_to(calvin_path)
    (tmp_path / "other").mkdir()
    monkeypatch.delenv("CALVIN_PATH")
    assert find_folder(None) == calvin_path.resolve()
    monkeypatch.setenv("CALVIN_PATH", str(tmp_path / "other"))
    assert find_folder(None) == tmp_path / "other"
    assert find_folder(str(tmp_path)) == tmp_path


def test_a_python_without_bullet_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    version = namedtuple("version", "major minor")(3, 13)
    monkeypatch.setattr(calvin.scene, "sys", SimpleNamespace(version_info=version))
    monkeypatch.setattr(calvin.scene, "find_spec", lambda name: None)
    line = r"^pybullet's wheels end at Python 3\.11 and this is 3\.13; [^\n]*env\.train\.python"
    with pytest.raises(AbsentError, match=line):
        Scene(Options())


def test_broken_annotations_are_named(calvin_path: Path, tmp_path: Path) -> None:
    folder = linked_copy(calvin_path, tmp_path / "calvin")
    file = folder / "tasks/new_playtable.yaml"
    file.unlink()
    file.write_text("open_drawer: [pull]\n")
    with pytest.raises(SetupError, match=r"no sentence for rotate_red_block_right, rotate_red_block_left, .+ \.\.\."):
        read_annotations(folder, "training")
    file.write_text("a: [b\n")
    with pytest.raises(SetupError, match="is not YAML"):
        read_annotations(folder, "training")
