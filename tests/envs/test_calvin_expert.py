"""CALVIN's scripted expert: every kind of task and a chain in scene D, judged by the benchmark, nothing drawn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rlinf.demos.player import DemoJob, DemoPlayer
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec
from rlinf.simulators.calvin import Expert, Options, Scene
from rlinf.simulators.calvin.expert import PLANS
from rlinf.simulators.calvin.starts import CHAIN_SLOT, TCP_POSE, ids_of, start_of
from rlinf.simulators.calvin.tasks import TASKS
from rlinf.simulators.calvin.touch import POINTS

pytestmark = pytest.mark.usefixtures("calvin_path")

MAX_STEPS = {  # one of each kind, with room over what it takes
    "turn_on_led": 20,
    "turn_off_lightbulb": 40,
    "turn_on_lightbulb": 40,
    "open_drawer": 40,
    "close_drawer": 45,
    "move_slider_left": 40,
    "rotate_pink_block_left": 60,
    "push_blue_block_left": 50,
    "lift_red_block_table": 35,
    "lift_pink_block_slider": 50,
    "lift_blue_block_drawer": 35,
    "place_in_slider": 45,
    "place_in_drawer": 35,
    "stack_block": 35,
    "unstack_block": 35,
    "push_into_drawer": 50,
}
PUSH_THEN_DRAWER = 37  # number of an official chain


def task_id(task: str, layout: int, scene: str = "D") -> int:
    return ids_of(scene, [TASKS.index(task)], range(1000))[layout]


def chain_id(number: int, scene: str = "D") -> int:
    return ids_of(scene, [CHAIN_SLOT], range(1000))[number]


def make_scene(letter: str) -> Scene:
    return Scene(Options(task_suite_name=f"calvin_{letter.lower()}", protocol="official", renderer="tiny"))


def play(scene: Scene, expert: Expert, steps: int) -> np.ndarray:
    """The expert's actions f32 [n, 7], until the episode is over or `steps` are taken."""
    actions: list[np.ndarray] = []
    while not scene.chain.over and len(actions) < steps:
        actions.append(expert.act(scene))
        scene.step_chunk(actions[-1][None], stop_on_success=True, record=False)
    return np.array(actions)


def solved_chain(scene: Scene, reset_id: int) -> int:
    """Subtasks the expert solves with 360 steps for each."""
    scene.reset(reset_id)
    play(scene, Expert(scene.options), 5 * 360)
    return scene.chain.solved


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Scene D, where drawing is forbidden."""
    made = make_scene("D")

    def draw(*_: object) -> None:
        raise AssertionError("the expert needs no images")

    monkeypatch.setattr(made.world, "_image", draw)
    yield made
    made.close()


def test_every_task_has_a_plan() -> None:
    assert set(PLANS) == set(TASKS)


@pytest.mark.parametrize("task", MAX_STEPS)
def test_one_of_each_kind(scene: Scene, task: str) -> None:
    for layout in (0, 1):
        scene.reset(task_id(task, layout))
        actions = play(scene, Expert(scene.options), MAX_STEPS[task])
        assert scene.chain.complete, f"{task}, layout {layout}"
        assert np.abs(actions[:, :6]).max() <= 1
        assert set(np.unique(actions[:, 6])) <= {-1.0, 1.0}


def test_a_chain_is_done_within_the_time_of_training_and_then_nothing_moves(scene: Scene) -> None:
    scene.reset(chain_id(0))
    expert = Expert(scene.options)
    actions = play(scene, expert, 480)
    assert scene.chain.complete
    assert actions.dtype == np.float32
    assert np.array_equal(expert.act(scene)[:6], np.zeros(6))
    scene.reset(chain_id(0))
    assert np.array_equal(play(scene, Expert(scene.options), 480), actions)  # bit for bit


def test_a_pushed_block_ends_untouched_so_that_the_next_task_may_push_it(scene: Scene) -> None:
    """push_into_drawer counts for a block that nothing but the table touched when it began."""
    assert solved_chain(scene, chain_id(PUSH_THEN_DRAWER)) == 5
    assert scene.chain.tasks[1:3] == ("push_red_block_right", "push_into_drawer")


def test_the_door_is_pushed_from_before_a_block(scene: Scene) -> None:
    scene.reset(task_id("lift_red_block_slider", 0))
    world = scene.world
    open_at = world.joint("slide")
    world.client.resetJointState(world.table, world.joints["slide"], 0.28 - open_at)
    play(scene, Expert(scene.options), 150)
    assert scene.chain.complete
    assert abs(world.joint("slide") - open_at) < 0.1


def test_demonstrations_have_clean_labels_although_noise_moves_the_arm() -> None:
    small = {"image_size": 32, "wrist_image_size": 32, "render": "fast", "renderer": "tiny", "tasks": ["open_drawer"]}
    cfg = EnvConfig(env_type="calvin", init_params=small, num_processes=1)
    spec = env_spec(cfg)
    jobs = [DemoJob(spec.reset_ids["demo"][0], max_steps=120, noise_std=std, noise_seed=3) for std in (0.0, 0.3)]
    with DemoPlayer(cfg, spec) as player:
        clean, noisy = player.play(jobs)
    assert clean.success
    assert noisy.success
    assert clean.description == "pull the handle to open the drawer"
    assert np.array_equal(clean.labels, clean.actions)
    assert np.abs(noisy.labels - noisy.actions).max() > 0.3
    assert np.array_equal(noisy.labels[0], clean.labels[0])
    assert set(np.unique(noisy.labels[:, 6])) <= {-1.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("letter", "least"), [("A", 0.90), ("B", 0.80), ("C", 0.90), ("D", 0.95)])
def test_all_tasks_in_every_scene(letter: str, least: float) -> None:
    scene, solved, trials = make_scene(letter), 0, 4
    for task in TASKS:
        for layout in range(trials):
            scene.reset(task_id(task, layout, letter))
            play(scene, Expert(scene.options), 360)
            solved += scene.chain.complete
    scene.close()
    print(f"scene {letter}: {solved}/{trials * len(TASKS)}")
    assert solved >= least * trials * len(TASKS)


@pytest.mark.slow
def test_the_first_125_official_chains_of_scene_d() -> None:
    scene = make_scene("D")
    lengths = [solved_chain(scene, chain_id(number)) for number in range(125)]
    scene.close()
    print(f"avg_num_subtasks {np.mean(lengths):.3f}")
    assert np.mean(lengths) >= 4.2


def test_an_episode_begins_where_the_expert_solved_another_task() -> None:
    """The drawer is open and the gripper at its handle, then the episode counts from nothing; the same each time."""
    tasks = ("open_drawer", "turn_on_led")
    scene = Scene(Options(tasks=tasks, expert_first=1.0, renderer="tiny"))
    ids = [task_id("turn_on_led", layout) for layout in range(50)]
    led = next(i for i in ids if start_of(i, tasks, expert_first=1.0).done_before)
    try:
        scene.reset(led)
        arm, drawer = scene.world.robot_obs(), scene.world.joint("drawer")
        assert drawer > 0.12
        assert np.linalg.norm(arm[:3] - TCP_POSE[:3]) > 0.15
        assert (scene.chain.tasks, scene.chain.solved, scene.chain.steps) == (("turn_on_led",), 0, 0)
        assert not scene.chain.over
        assert play(scene, Expert(scene.options), 60).shape[0] < 60
        assert scene.chain.complete
        scene.reset(led)
        assert np.array_equal(scene.world.robot_obs(), arm)
    finally:
        scene.close()


@pytest.mark.parametrize(
    "task",
    [
        *("open_drawer", "close_drawer", "move_slider_right", "turn_on_lightbulb", "turn_off_lightbulb", "turn_on_led"),
        *("push_pink_block_left", "rotate_red_block_right", "lift_blue_block_drawer", "place_in_drawer"),
    ],
)
def test_the_shaped_reward_grows_while_the_expert_plays(task: str) -> None:
    """What is paid adds up to the way that was left: nothing is lost or paid twice, and the physics stay the same."""
    plain, shaped = (
        Scene(Options(protocol="official", renderer="tiny", shaped_reward=weight)) for weight in (0.0, 0.5)
    )
    try:
        for one in (plain, shaped):
            one.reset(task_id(task, 3))
        expert, near, paid = Expert(plain.options), [shaped._near], 0.0
        while not plain.chain.over:
            action = expert.act(plain)
            (event, *ended), (reward, *same) = plain.step(action), shaped.step(action)
            assert ended == same
            paid += reward - event
            near.append(shaped._near)
        assert plain.chain.complete
        assert np.array_equal(plain.world.scene_obs(), shaped.world.scene_obs())
        assert paid == pytest.approx(0.5 * (1 - near[0]))
        assert shaped.step(action)[0] == 0.0  # the chain is over
        way = np.array(near[:-1])
        assert np.diff(way).min() > -0.06  # nearly every step brings it nearer
        if task in POINTS:
            assert 0.0 < way[0] < 0.2 < 0.4 < way[-1] < 1.0
        else:
            assert way.tolist() == [0.0] * len(way)
    finally:
        plain.close()
        shaped.close()


def test_a_solved_task_begins_the_way_to_the_next() -> None:
    scene = Scene(Options(protocol="official", renderer="tiny", shaped_reward=1.0))
    try:
        scene.reset(chain_id(0))
        assert {scene.chain.tasks[0], scene.chain.tasks[1]} <= POINTS.keys()
        expert, rewards, near = Expert(scene.options), [], scene._near
        while scene.chain.solved < 1:
            rewards.append(scene.step(expert.act(scene))[0])
        assert sum(rewards) == pytest.approx(1 + 1 - near)
        near = scene._near
        assert 0 < near < 0.5  # of the next task, from where the hand now is
        rewards = [scene.step(expert.act(scene))[0] for _ in range(5)]
        assert sum(rewards) == pytest.approx(scene._near - near)
    finally:
        scene.close()
