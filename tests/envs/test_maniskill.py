"""The put-on-plate simulator: every id plays, equal starts everywhere, flags and rewards, missing files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlinf.simulators.maniskill as maniskill
from benchmarks.maniskill_env import published_world
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec
from rlinf.envs.vec import VecEnv
from rlinf.simulators import installed
from rlinf.simulators.contract import AbsentError, SetupError
from rlinf.simulators.maniskill import Options, Scene
from rlinf.simulators.maniskill.assets import Assets, find_assets
from rlinf.simulators.maniskill.constants import NATIVE_SIZE
from rlinf.simulators.maniskill.expert import Expert
from rlinf.simulators.maniskill.judge import NEAR, Judgement, level, nearness
from rlinf.simulators.maniskill.picture import blend, compose, interpolation, sample, shrink
from rlinf.simulators.maniskill.reset_ids import OOD, STRIDE
from rlinf.simulators.maniskill.tasks import ENV_IDS, PREFIX, VARIANTS, episode

pytestmark = pytest.mark.usefixtures("maniskill_path")

MAIN = PREFIX + "Main-v3"
BOTTLE = 192369  # put plastic bottle on plate; it lies across the open fingers
STILL = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)


@pytest.fixture(scope="module")
def assets(maniskill_path: Path) -> Assets:
    return find_assets([(env_id, obj_set) for env_id in ENV_IDS for obj_set in VARIANTS[env_id]])


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene(Options(image_size=64))
    yield made
    made.close()


def wander(steps: int, seed: int = 0) -> np.ndarray:
    """Random actions f32 [steps, 7] of the size a policy's have."""
    rng = np.random.default_rng(seed)
    moves = rng.uniform(-1, 1, (steps, 6)) * [0.02, 0.02, 0.02, 0.1, 0.1, 0.1]
    return np.concatenate([moves, rng.choice([-1, 1], (steps, 1))], axis=1).astype(np.float32)


def everything(scene: Scene) -> dict[str, Any]:
    world, seen = scene.world, scene.observe()
    return seen | {"object": world.object_pose, "plate": world.plate_pose, "flags": np.array(world.judge.judgement)}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert np.array_equal(value, b[name]) if isinstance(value, np.ndarray) else value == b[name], name


def solve(scene: Scene) -> tuple[np.ndarray, list[tuple[float, bool]]]:
    """Take the object from above and put it on the plate; actions f32 [N, 7], and reward and success after each."""
    world, actions, got = scene.world, [], []

    def act(move: np.ndarray, grip: float) -> None:
        x, y, z = np.clip(move, -0.03, 0.03)
        actions.append(np.array([-x, -y, z, 0, 0, 0, grip], np.float32))  # the base looks backwards
        result = scene.step_chunk(actions[-1][None], stop_on_success=False, record=False)
        got.append((float(result.rewards[0]), bool(result.success[0])))

    def go(over: str, height: float, grip: float, limit: int) -> None:
        for _ in range(limit):
            there = world.object_pose if over == "object" else world.plate_pose
            move = there[:3] - world.gripper_pose[:3] + np.array([0, 0, height])
            if np.linalg.norm(move) < 0.008:
                break
            act(move, grip)

    go("object", 0.06, 1, 15)
    go("object", 0.0, 1, 10)
    for _ in range(3):
        act(np.zeros(3), -1)
    for _ in range(4):
        act(np.array([0, 0, 0.025]), -1)
    go("plate", 0.10, -1, 12)
    go("plate", 0.03, -1, 6)
    for _ in range(4):
        act(np.zeros(3), 1)
    return np.array(actions), got


# episodes


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_every_id_resets_steps_and_renders(env_id: str) -> None:
    """One process plays them all: what costs time at the start is shared."""
    for obj_set in VARIANTS[env_id]:
        options = Options(id=env_id, obj_set=obj_set, image_size=64)
        scene, shape = Scene(options), maniskill.spec(options)
        reset_id = shape.reset_ids["eval"][0]
        scene.reset(reset_id)
        first = scene.observe()
        result = scene.step_chunk(wander(2), stop_on_success=True, record=False)
        then = scene.observe()
        assert (result.steps, result.done.any()) == (2, False)
        assert first["images"].shape == (64, 64, 3)
        assert first["images"].dtype == np.uint8
        assert first["images"].std() > 10
        assert not np.array_equal(first["images"], then["images"])
        assert first["states"].shape == (8,)
        assert np.array_equal(first["states"], np.float32(episode(env_id, obj_set, reset_id).qpos))
        assert first["critic_state"].shape == (shape.critic_state_dim,)
        assert scene.assets.objects[scene.episode.object.index].name in first["task_description"]
        assert scene.assets.plates[scene.episode.plate.index].name in first["task_description"]
        assert scene.task() == shape.tasks[0] == env_id
        scene.close()


def test_the_suite_plays_every_row() -> None:
    scene = Scene(Options(id=OOD, image_size=64, trials_per_task=1))
    shape = maniskill.spec(scene.options)
    for task, reset_id in zip(shape.tasks, shape.reset_ids["eval"], strict=True):
        scene.reset(reset_id)
        assert scene.task() == task
        assert scene.episode.env_id == PREFIX + task.removesuffix("-train")
        assert scene.episode.obj_set == ("train" if task.endswith("-train") else "test")
        assert scene.step_chunk(wander(1), stop_on_success=True, record=False).steps == 1
    with pytest.raises(ValueError, match="is not one of ood"):
        scene.reset(16 * STRIDE)


def test_an_episode_is_the_same_again_and_beside_others(scene: Scene) -> None:
    scene.reset(BOTTLE)
    scene.step_chunk(wander(6), stop_on_success=False, record=False)
    want = everything(scene)
    other = Scene(Options(image_size=64))
    other.reset(17)
    other.step_chunk(wander(3, seed=1), stop_on_success=False, record=False)
    scene.reset(579494)  # another object, seen and simulated in between
    scene.observe()
    scene.reset(BOTTLE)
    for action in wander(6):  # one by one, the other scene taking turns
        scene.step_chunk(action[None], stop_on_success=False, record=False)
        other.step_chunk(STILL[None], stop_on_success=False, record=False)
        other.observe()
    assert_same(everything(scene), want)


def test_a_saved_episode_goes_on_bit_for_bit(scene: Scene) -> None:
    scene.reset(BOTTLE)
    actions = wander(8)
    scene.step_chunk(actions[:3], stop_on_success=False, record=False)
    saved, there = scene.get_state(), everything(scene)
    scene.step_chunk(actions[3:], stop_on_success=False, record=False)
    want = everything(scene)
    other = Scene(Options(image_size=64))
    other.set_state(saved)
    assert_same(everything(other), there)
    other.step_chunk(actions[3:], stop_on_success=False, record=False)
    assert_same(everything(other), want)


def test_a_solved_episode_pays_1_2_in_another_process_as_here(scene: Scene) -> None:
    """The levels come one after another; a child plays the same actions to the same pixels and pays the differences."""
    scene.reset(BOTTLE)
    actions, got = solve(scene)
    levels = [pay for pay, _ in got]
    assert sorted(set(levels)) == pytest.approx([0.0, 0.1, 0.2, 1.2])
    assert scene.world.judge.judgement == (True, True, True, True)
    end = next(i for i, (_, success) in enumerate(got) if success) + 1
    scene.reset(BOTTLE)
    chunk = scene.step_chunk(actions, stop_on_success=True, record=False)
    assert chunk.steps == end
    assert chunk.info["is_src_obj_grasped"] == chunk.info["consecutive_grasp"] == chunk.info["src_on_target"] == 1.0
    assert max(chunk.info["carrot_plate_dist"], chunk.info["gripper_carrot_dist"]) < 0.06

    cfg = EnvConfig(
        env_type="maniskill",
        total_num_envs=2,
        max_episode_steps=80,
        num_processes=1,
        init_params={"image_size": 64, "sim_backend": "cpu"},
    )
    env = VecEnv(
        cfg,
        env_spec(cfg, "env.eval"),
        env_ids=[0, 1],
        mode="eval",
        chunk_size=end,
        seed=0,
        trials=[BOTTLE, BOTTLE],
        critic_state=True,
    )
    try:
        env.reset()
        both = torch.from_numpy(np.stack([actions[:end], np.tile(STILL, (end, 1))]))
        step = env.chunk_step(both)
        assert step.terminated[0, -1]
        assert step.rewards[0].sum().item() == pytest.approx(1.2, abs=1e-6)
        assert sorted(step.rewards[0].unique().tolist()) == pytest.approx([0.0, 0.1, 1.0], abs=1e-6)
        assert step.rewards[1].sum() == 0
        record = env.drain_episodes()[0]
        assert (record.success_once, record.steps, record.task, record.reset_id) == (True, end, MAIN, BOTTLE)
        assert record.extra["consecutive_grasp"] == 1.0
        scene.reset(BOTTLE)
        scene.step_chunk(np.tile(STILL, (end, 1)), stop_on_success=True, record=False)
        here = scene.observe()
        assert np.array_equal(step.obs.images[1].numpy(), here["images"])
        assert np.array_equal(step.obs.states[1].numpy(), here["states"])
        assert np.array_equal(step.obs.critic_state[1, :-1].numpy(), here["critic_state"])
    finally:
        env.close()


def test_reward_modes() -> None:
    nothing = Judgement()
    pushed = nothing._replace(success=True)  # on the plate without ever having been grasped
    assert [level("default", f) for f in (nothing, pushed)] == [0.0, 0.0]
    assert [level("only_success", f) for f in (nothing, pushed)] == [0.0, 1.0]
    done = Judgement(success=True, is_src_obj_grasped=True, consecutive_grasp=True)
    assert [level(mode, done) for mode in ("default", "only_success", "raw")] == [pytest.approx(1.2), 1.0, 0.0]


def test_nearness_pays_the_way_to_the_object_and_then_to_the_plate() -> None:
    told = {"success": False}
    assert nearness(0.0, 0.3, holding=False, **told) == 0.5
    assert nearness(NEAR, 0.0, holding=False, **told) == pytest.approx(0.5 / np.e)
    assert nearness(0.0, NEAR, holding=True, **told) == pytest.approx(0.5 + 0.5 / np.e)
    assert nearness(1.0, 0.02, holding=False, success=True) == 1.0


def test_the_shaped_reward_grows_while_the_expert_plays(scene: Scene) -> None:
    """It adds its weight times nearness to the published level; the physics stay the same."""
    shaped = Scene(replace(scene.options, shaped_reward=0.5))
    for one in (scene, shaped):
        one.start(5)
    expert, added = Expert(scene.options), []
    for _ in range(40):
        action = expert.act(scene)
        (plain, success, _), (paid, same, _) = scene.step(action), shaped.step(action)
        assert success == same
        added.append(paid - plain)
        if success:
            break
    assert success
    assert 0.0 < added[0] < 0.1
    assert added[-1] == pytest.approx(0.5)
    assert np.diff(added).min() > -0.05  # nearly every step brings it nearer
    shaped.close()


def test_frames_are_drawn_only_while_recording(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0
    picture = scene._renderer.picture

    def count(*given: Any) -> np.ndarray:
        nonlocal drawn
        drawn += 1
        return picture(*given)

    monkeypatch.setattr(scene._renderer, "picture", count)
    scene.reset(BOTTLE)
    assert scene.step_chunk(wander(4), stop_on_success=False, record=False).frames == []
    scene.observe()
    assert drawn == 1
    frames = scene.step_chunk(wander(4), stop_on_success=False, record=True).frames
    assert (len(frames), drawn) == (4, 5)
    assert np.array_equal(scene.observe()["images"], frames[-1])
    assert drawn == 5  # the last frame is the observation


def test_a_target_out_of_reach_leaves_the_arm_where_it_is(scene: Scene) -> None:
    scene.reset(BOTTLE)
    scene.step_chunk(STILL[None], stop_on_success=False, record=False)
    before = scene.world.arm.qpos.copy()
    scene.step_chunk(np.array([[2, 0, 0, 0, 0, 0, 1]], np.float32), stop_on_success=False, record=False)
    assert np.abs(scene.world.arm.qpos - before).max() < 2e-3
    scene.step_chunk(np.array([[-2, 0, 0.02, 0, 0, 0, 1]], np.float32), stop_on_success=False, record=False)
    assert np.abs(scene.world.arm.qpos - before).max() > 0.01  # the target had moved on and has come back


def test_an_action_that_is_not_finite_is_refused(scene: Scene) -> None:
    scene.reset(BOTTLE)
    with pytest.raises(ValueError, match="action is not finite"):
        scene.step_chunk(np.full((1, 7), np.nan, np.float32), stop_on_success=False, record=False)


def test_the_object_jumps_after_five_actions() -> None:
    scene = Scene(Options(id=PREFIX + "PositionChangeTo-v1", obj_set="test", image_size=64))
    scene.reset(516799)
    start = scene.world.object_pose[:2].copy()
    scene.step_chunk(np.tile(STILL, (4, 1)), stop_on_success=False, record=False)
    assert np.abs(scene.world.object_pose[:2] - start).max() < 0.01
    scene.step_chunk(STILL[None], stop_on_success=False, record=False)
    assert scene.world.object_pose[:3] == pytest.approx([-0.085, -0.045, 1.0])


def test_the_published_layout_is_the_same_world(assets: Assets) -> None:
    """Everything that stands behind the camera changes neither a state nor a pixel."""
    from rlinf.simulators.maniskill.cpu.renderer import shared_renderer
    from rlinf.simulators.maniskill.cpu.world import World

    camera = shared_renderer(assets, (120, 160), "minimal")
    ours, theirs = World(assets), published_world(assets)
    for world in (ours, theirs):
        world.reset(episode(MAIN, "train", 647854))
        for action in wander(3):
            world.step(action)
    assert len(theirs.view().bodies) == 42
    assert len(ours.view().bodies) == 2
    assert np.array_equal(ours.object_pose, theirs.object_pose)
    assert np.array_equal(ours.arm.qpos, theirs.arm.qpos)
    assert np.array_equal(camera.picture(ours.view(), ours.episode), camera.picture(theirs.view(), theirs.episode))


# pictures


def test_a_small_picture_shows_what_the_large_one_does(assets: Assets) -> None:
    from rlinf.simulators.maniskill.cpu.renderer import shared_renderer
    from rlinf.simulators.maniskill.cpu.world import World

    world = World(assets)
    world.reset(episode(MAIN, "train", 107417))
    large = shared_renderer(assets, NATIVE_SIZE, "minimal").picture(world.view(), world.episode)
    small = shared_renderer(assets, (120, 160), "minimal").picture(world.view(), world.episode)
    away = np.abs(shrink(large, 120, 160).astype(int) - small)
    assert (away.max(-1) <= 8).mean() > 0.97


def test_shader_packs_draw_the_same_bodies(assets: Assets) -> None:
    from rlinf.simulators.maniskill.cpu.renderer import shared_renderer
    from rlinf.simulators.maniskill.cpu.world import World

    world = World(assets)
    world.reset(episode(MAIN, "train", 107417))
    drawn = [shared_renderer(assets, (120, 160), shader).draw(world.view()) for shader in ("minimal", "default")]
    assert (drawn[0][1] == drawn[1][1]).mean() > 0.999
    assert drawn[1][0].dtype == np.uint8
    assert not np.array_equal(drawn[0][0], drawn[1][0])


def test_the_table_image_fills_what_is_not_robot_or_body() -> None:
    drawn, backdrop = np.full((2, 2, 3), 7, np.uint8), np.full((2, 2, 3), 9, np.uint8)
    mask = np.array([[True, False], [False, True]])
    assert compose(drawn, mask, backdrop)[..., 0].tolist() == [[7, 9], [9, 7]]


def test_blends() -> None:
    picture, mask = np.full((4, 6, 3), 100, np.uint8), np.zeros((4, 6), bool)
    texture = np.full((480, 640, 3), 200, np.uint8)
    assert blend(picture, mask, texture, 0.5, "whole") is picture  # nothing to lay it over
    mask[1:3, 2:4] = True
    mask[1, 2] = False
    inside = blend(picture, mask, texture, 0.3, "bodies")[..., 0]
    assert inside[mask].tolist() == [130, 130, 130]
    assert set(inside[~mask].tolist()) == {100}
    assert set(blend(picture, mask, texture, 0.5, "whole").ravel().tolist()) == {150}
    assert blend(picture, mask, texture, 0.0, "bodies") is picture  # image 0 has no texture


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The whole image as `blend` stretches a texture."""
    down, across = (
        tuple(table[None] for table in interpolation(*sizes))
        for sizes in zip(image.shape[:2], (height, width), strict=True)
    )
    return sample(image[None].astype(np.float32), np.zeros((1, 1), np.int64), down, across)[0]


def test_resizing() -> None:
    ramp = np.repeat(np.arange(4, dtype=np.uint8)[None, :, None] * 10, 3, axis=2)  # [1, 4, 3]
    assert resize(ramp, 1, 8)[0, :, 0].tolist() == [0, 2.5, 7.5, 12.5, 17.5, 22.5, 27.5, 30]
    assert resize(ramp, 1, 2)[0, :, 0].tolist() == [5, 25]  # neighbours, not means of everything between
    assert shrink(ramp, 1, 2)[0, :, 0].tolist() == [5, 25]
    assert shrink(np.repeat(ramp, 3, axis=0), 2, 3)[0, :, 0].tolist() == [3, 15, 28]
    assert shrink(ramp, 1, 4) is ramp


# files


def test_assets_are_found_in_either_folder(
    assets: Assets, monkeypatch: pytest.MonkeyPatch, maniskill_path: Path
) -> None:
    monkeypatch.setenv("MANISKILL_ASSET_DIR", str(maniskill_path / "carrot"))
    assert find_assets([(MAIN, "train")]) == assets
    monkeypatch.setenv("MANISKILL_ASSET_DIR", str(maniskill_path))
    monkeypatch.delenv("MS_ASSET_DIR")
    assert find_assets([(MAIN, "train")]) == assets
    assert [len(part) for part in (assets.objects, assets.plates, assets.images)] == [25, 17, 21]


@pytest.mark.parametrize("guide", [False, True], ids=["install.sh", "guide"])
def test_installed_assets_need_no_variable(
    guide: bool, assets: Assets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, maniskill_path: Path
) -> None:
    """The guide downloads the objects alone, beside the robot that install.sh brought."""
    monkeypatch.setattr(installed, "REPOSITORY", tmp_path)
    for variable in ("MANISKILL_ASSET_DIR", "MS_ASSET_DIR"):
        monkeypatch.delenv(variable)
    (tmp_path / "data/maniskill").mkdir(parents=True)
    (tmp_path / "data/maniskill/data").symlink_to(maniskill_path / "data")
    folder = tmp_path / ("rlinf/envs/maniskill/assets" if guide else "data/maniskill")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "carrot").symlink_to(maniskill_path / "carrot")
    found = find_assets([(MAIN, "train")])
    assert found.urdf.resolve() == assets.urdf.resolve()
    assert [model.folder.resolve() for model in found.objects] == [model.folder.resolve() for model in assets.objects]


def test_what_is_missing_is_named_with_the_line_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, maniskill_path: Path
) -> None:
    monkeypatch.setattr(installed, "REPOSITORY", tmp_path)
    monkeypatch.delenv("MANISKILL_ASSET_DIR")
    with pytest.raises(
        AbsentError,
        match=r"is not set and there is no data/maniskill or rlinf.*bash requirements/envs",
    ):
        Scene(Options())
    monkeypatch.setenv("MANISKILL_ASSET_DIR", str(tmp_path))
    with pytest.raises(SetupError, match="holds no carrot/more_carrot"):
        Scene(Options())
    for name in ("more_carrot", "more_plate", "more_table"):
        (tmp_path / "carrot" / name).mkdir(parents=True)
        shutil.copy(maniskill_path / "carrot" / name / "model_db.json", tmp_path / "carrot" / name)
    with pytest.raises(SetupError, match=r"001_carrot_simpler/collision.obj is missing; `bash"):
        Scene(Options())
    database = tmp_path / "carrot" / "more_plate" / "model_db.json"
    database.write_text(json.dumps({"001_plate_simpler": {}}))
    with pytest.raises(SetupError, match=r"model_db.json must list 17 entries"):
        Scene(Options())
    database.write_text("{")
    with pytest.raises(SetupError, match=r"model_db.json is not JSON"):
        Scene(Options())
    monkeypatch.setenv("MANISKILL_ASSET_DIR", str(maniskill_path))
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    with pytest.raises(SetupError, match=r"wx250s.urdf is missing"):
        Scene(Options())
    shutil.copytree(maniskill_path / "data", tmp_path / "data")
    next((tmp_path / "data").rglob("wx250s.srdf")).unlink()
    with pytest.raises(SetupError, match=r"wx250s.srdf is missing"):
        Scene(Options())


def test_only_what_a_run_needs_must_be_there(assets: Assets, tmp_path: Path) -> None:
    """A trimmed copy with the 16 training objects serves Main-v3, not Carrot-v1's test."""
    objects = tuple(
        replace(model, folder=tmp_path / model.folder.name) if i >= 16 else model
        for i, model in enumerate(assets.objects)
    )
    trimmed = replace(assets, objects=objects)
    trimmed.check([VARIANTS[MAIN]["train"]])
    with pytest.raises(SetupError, match="017_travel cup_1"):
        trimmed.check([VARIANTS[PREFIX + "Carrot-v1"]["test"]])
