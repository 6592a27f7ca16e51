"""The MetaWorld scene against MetaWorld itself: equal starts, equal pixels, and scenes that share a world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlinf.demos.player import Demo, DemoJob, DemoPlayer
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec, ids_of_task
from rlinf.simulators.contract import TASK_STRIDE
from rlinf.simulators.metaworld import Options, Scene, spec
from rlinf.simulators.metaworld.expert import Expert
from rlinf.simulators.metaworld.tasks import all_tasks, task_table
from rlinf.simulators.opengl import choose_backend

choose_backend("auto")  # MuJoCo reads it when it is imported
pytest.importorskip("metaworld")

FAST = {"image_size": 48, "render": "fast"}


def reset_id(task: str, layout: int) -> int:
    return all_tasks().index(task) * TASK_STRIDE + layout


def scene(task: str, layout: int, **options: Any) -> Scene:
    made = Scene(Options(task_suite_name=task, **(options or FAST)))
    made.reset(reset_id(task, layout))
    return made


def image(made: Scene) -> np.ndarray:
    """What the camera sees; a scene gives a function that fetches it."""
    return made.observe()["images"]()


def actions(seed: int, count: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (count, 4)).astype(np.float32)


def published_start(task: str, layout: np.ndarray, **kwargs: Any) -> Any:
    """MetaWorld's own class and reset, then the 16 settling steps."""
    from metaworld import ALL_V3_ENVIRONMENTS

    env: Any = ALL_V3_ENVIRONMENTS[task](**kwargs)
    env._set_task_called, env._partially_observable, env._freeze_rand_vec = True, False, True
    env.__dict__.pop("sawyer_observation_space", None)
    env._last_rand_vec = layout
    env.model.cam_pos[2] = (0.75, 0.075, 0.7)
    env.reset()
    for _ in range(16):
        env.step(np.zeros(4, np.float32))
    return env


def test_the_table_is_metaworlds() -> None:
    from metaworld import ALL_V3_ENVIRONMENTS
    from metaworld.env_dict import ML45_V3

    assert sorted(all_tasks()) == sorted(ALL_V3_ENVIRONMENTS)
    assert sorted(task_table()["ml45_test"]) == sorted(ML45_V3["test"])
    assert sorted(t for tasks in task_table()["difficulty"].values() for t in tasks) == sorted(all_tasks())


@pytest.mark.parametrize("task", ["handle-press-side-v3", "coffee-pull-v3", "pick-place-v3", "lever-pull-v3"])
def test_our_reset_equals_the_published_one(task: str) -> None:
    """One hand reset instead of two, the layout drawn by us, an env used before: bit for bit the same episode."""
    ours = scene(task, 7)
    ours.step_chunk(actions(0, 20), stop_on_success=False, record=False)
    ours.reset(reset_id(task, 3))
    theirs = published_start(task, ours.world().env._last_rand_vec.copy())
    assert np.array_equal(ours.world().obs, theirs._last_stable_obs)
    for action in actions(1):
        obs, *_, info = theirs.step(action)
        result = ours.step_chunk(action[None], stop_on_success=False, record=False)
        assert np.array_equal(ours.world().obs, obs)
        assert result.success[0] == bool(info["success"])
    theirs.close()
    ours.close()


def test_exact_pixels_are_the_published_ones() -> None:
    ours = scene("button-press-v3", 5, image_size=480)
    theirs = published_start(
        "button-press-v3", ours.world().env._last_rand_vec.copy(), render_mode="rgb_array", camera_id=2
    )
    assert np.array_equal(image(ours), theirs.render()[::-1, ::-1])
    theirs.close()
    ours.close()


@pytest.mark.parametrize("limit", [0, 1])
def test_scenes_that_share_a_world_do_not_touch_each_other(limit: int) -> None:
    """Interleaved scenes (with limit 1: rebuilt at every turn) equal each one played alone."""
    tasks = ["hammer-v3", "drawer-open-v3", "hammer-v3"]
    options = FAST | {"max_loaded_tasks": limit}

    def play(made: Scene, seed: int) -> tuple[np.ndarray, np.ndarray]:
        made.step_chunk(actions(seed), stop_on_success=False, record=False)
        return image(made).copy(), made.world().obs.copy()

    together = [scene(task, i, **options) for i, task in enumerate(tasks)]
    mixed = [[play(s, 10 * i + turn) for i, s in enumerate(together)] for turn in range(2)]
    for s in together:
        s.close()
    for i, task in enumerate(tasks):
        alone = scene(task, i, **options)
        for turn in range(2):
            pixels, obs = play(alone, 10 * i + turn)
            assert np.array_equal(pixels, mixed[turn][i][0])
            assert np.array_equal(obs, mixed[turn][i][1])
        alone.close()


def test_metaworlds_own_step_limit_does_not_bite() -> None:
    made = scene("reach-v3", 0)
    result = made.step_chunk(np.zeros((520, 4), np.float32), stop_on_success=False, record=False)
    assert result.steps == 520
    made.close()


def test_fast_and_decimated_images_resemble_the_exact_ones() -> None:
    made = [
        scene("drawer-close-v3", 1, image_size=128, **kw)
        for kw in ({}, {"render": "fast", "decimate": False}, {"render": "fast"})
    ]
    exact, fast, thin = (image(s).astype(float) for s in made)
    assert 0 < np.abs(fast - exact).mean() < 20
    assert 0 < np.abs(thin - fast).mean() < 6
    for s in made:
        s.close()


@pytest.fixture(scope="module")
def demos() -> list[Demo]:
    cfg = EnvConfig(env_type="metaworld", task_suite_name="handle-press-side-v3", num_processes=2, init_params=FAST)
    spec = env_spec(cfg)
    first, second, third = ids_of_task(spec, "demo", "handle-press-side-v3")[:3]
    with DemoPlayer(cfg, spec) as player:
        jobs = [DemoJob(first, 80), DemoJob(second, 80, noise_std=0.3, noise_seed=4), DemoJob(third, 5)]
        return [*player.play(jobs), *player.play(jobs[1:2])]


def test_experts_succeed_and_labels_are_clean(demos: list[Demo]) -> None:
    clean, noisy, short, again = demos
    assert clean.success
    assert np.array_equal(clean.labels, clean.actions)
    assert 32 < len(clean.labels) < 80
    assert clean.images.shape == (len(clean.labels), 48, 48, 3)
    assert clean.states.shape == (len(clean.labels), 4)
    assert not np.array_equal(noisy.labels, noisy.actions)
    assert np.abs(noisy.actions).max() <= 1
    assert (short.success, len(short.labels)) == (False, 5)
    assert np.array_equal(noisy.images, again.images)
    assert np.array_equal(noisy.actions, again.actions)
    assert clean.description == "Press a handle down sideways"


def test_images_drawn_side_by_side() -> None:
    """What a GPU does with the scenes of a process: drawn on one sheet, of all tasks, fetched together, as if alone."""
    from rlinf.simulators.metaworld.renderer import Canvas, Renderer

    played = [scene("handle-press-side-v3", 4, render="exact"), scene("hammer-v3", 4, render="exact")]
    vis = played[0].world().model.vis
    vis.quality.shadowsize = 256  # software takes its time for 4096
    alone, sheets = (Canvas(played[0].options, vis, across) for across in (1, 2))
    renderers = {c: [Renderer(s.world().model, s.options, c) for s in played] for c in (alone, sheets)}
    wanted, drawn = [], []
    for i in range(7):  # one sheet full, the next begun
        task, world = i % 2, played[i % 2].world()
        played[task].step_chunk(actions(i), stop_on_success=False, record=False)
        wanted.append(renderers[alone][task].draw(world.data)())
        drawn.append(renderers[sheets][task].draw(world.data))
    for renderer in [*renderers[alone], *renderers[sheets]]:
        renderer.close()  # a world may be freed while its images are still to be fetched
    images = [fetch() for fetch in drawn]
    alone.close()
    sheets.close()
    for s in played:
        s.close()
    assert all(np.array_equal(one, other) for one, other in zip(wanted, images, strict=True))
    assert len({pixels.tobytes() for pixels in images}) == 7


def test_the_last_image_of_a_film_is_what_the_policy_sees() -> None:
    filmed, other = scene("handle-press-side-v3", 4), scene("handle-press-side-v3", 4)
    result = filmed.step_chunk(actions(1), stop_on_success=False, record=True)
    other.step_chunk(actions(1), stop_on_success=False, record=False)
    assert filmed.observe()["images"] is result.frames[-1]  # not drawn again
    assert np.array_equal(result.frames[-1], image(other))
    filmed.step_chunk(actions(2), stop_on_success=False, record=False)
    assert not np.array_equal(image(filmed), result.frames[-1])
    filmed.close()
    other.close()


def test_a_process_fetches_images_after_all_scenes_were_observed() -> None:
    first, second = scene("handle-press-side-v3", 4), scene("handle-press-side-v3", 5)
    fetch = [s.observe()["images"] for s in (first, second)]
    assert np.array_equal(fetch[0](), image(first))
    assert np.array_equal(fetch[1](), image(second))
    assert not np.array_equal(fetch[0](), fetch[1]())
    first.close()
    second.close()


def test_a_critic_may_be_told_the_task() -> None:
    options = Options(task_suite_name="metaworld_50", image_size=32, render="fast", critic_task=True)
    made = Scene(options)
    made.reset(reset_id("reach-v3", 3))
    seen = made.observe()["critic_state"]
    assert seen is not None
    assert seen.shape == (spec(options).critic_state_dim,) == (39 + 50,)
    assert np.flatnonzero(seen[39:]).tolist() == [all_tasks().index("reach-v3")]
    made.close()


def test_the_shaped_reward_is_metaworlds_own_beside_success() -> None:
    """The expert reaches: the level grows, a tenth of MetaWorld's number, and success adds 1; physics stay the same."""
    plain, shaped = scene("reach-v3", 3), scene("reach-v3", 3, **FAST, shaped_reward=2.0)
    expert, levels = Expert(shaped.options), []
    for _ in range(100):
        action = np.asarray(expert.act(shaped), np.float32)
        own = shaped.world().env.evaluate_state  # MetaWorld's formula, asked again with the state after the step
        level, success, _ = shaped.step(action)
        reward = own(shaped.world().env._get_obs(), action)[0]
        assert level == pytest.approx(success + 2.0 * reward / 10.0)
        assert plain.step(action)[0] == float(success)
        levels.append(level)
        if success:
            break
    assert success
    assert levels[0] < 0.5 < levels[-2] < levels[-1]
    plain.close()
    shaped.close()
