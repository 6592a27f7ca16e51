"""CALVIN without its simulator: the benchmark's sequences and starts, symbolic rules, reset ids, bad options."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlinf.config.load import load_config
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_options, env_spec, ids_of_task
from rlinf.errors import UserError
from rlinf.simulators import calvin
from rlinf.simulators.calvin import Options, symbolic
from rlinf.simulators.calvin.chain import Chain
from rlinf.simulators.calvin.nearness import done
from rlinf.simulators.calvin.starts import (
    CHAIN_SLOT,
    GEOMETRY,
    SCENES,
    benchmark_scene_obs,
    fnv1_32,
    geometry,
    ids_of,
    start_of,
    task_states,
)
from rlinf.simulators.calvin.symbolic import after, category, evaluation_sequences, initial_states, random_chain
from rlinf.simulators.calvin.tasks import COLOURS, JUDGES, TASKS, Block, Facts, rotation_between
from rlinf.simulators.contract import DEMO_LAYOUTS
from tools.make_calvin_sequences import chains_per_state, draw_chains, shuffled

SEQUENCES_SHA256 = "840cb992c69ce9b6d59f6020966b6300c15233f8e0b9667b6486c1962424d308"
SCENE_OBS_SHA256 = "1a25eaf9bb3f57459937b95423f2a673e277945064e5c09c9c7cb97b3ff87150"


def test_the_1000_sequences_are_the_benchmarks() -> None:
    rows = [[vars(state), list(tasks)] for state, tasks in evaluation_sequences()]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest() == SEQUENCES_SHA256
    assert rows[0][1] == [
        "rotate_blue_block_right",
        "move_slider_right",
        "lift_red_block_slider",
        "place_in_slider",
        "turn_off_lightbulb",
    ]


def test_the_1000_starts_are_the_benchmarks() -> None:
    digest = hashlib.sha256()
    for state, _ in evaluation_sequences():
        digest.update(benchmark_scene_obs(state, geometry("D")).astype("<f8").tobytes())
    assert digest.hexdigest() == SCENE_OBS_SHA256
    assert fnv1_32("hello world") == 3799943344


@pytest.mark.parametrize("index", [0, 39, 40, 191])
def test_drawing_a_states_sequences_again_gives_the_stored_ones(index: int) -> None:
    counts = chains_per_state()
    assert (len(initial_states()), sum(counts), counts[39], counts[40]) == (192, 1000, 6, 5)
    order, first = shuffled(), sum(counts[:index])
    for offset, chain in enumerate(draw_chains(index, counts[index])):
        stored = evaluation_sequences()[order.index(first + offset)]
        assert stored == (initial_states()[index], tuple(TASKS[n] for n in chain))


def test_the_task_table_is_the_users_file(calvin_path: Path) -> None:
    kinds = {
        "rotate_object": ("rotated", {"colour": 0, "degrees": 1}),
        "push_object": ("pushed", {"colour": 0, "distance": 1}),
        "lift_object": ("lifted", {"colour": 0, "height": 1, "link": 3}),
        "place_object": ("placed", {"link": 1}),
        "stack_objects": ("stacked", {}),
        "unstack_objects": ("unstacked", {}),
        "move_door_rel": ("door_moved", {"door": 0, "distance": 1}),
        "toggle_light": ("light_turned", {"light": 0, "on": 2}),
        "push_object_into": ("pushed_into", {"source": 2, "target": 4}),
    }
    table = yaml.safe_load((calvin_path / "tasks/new_playtable_tasks.yaml").read_text())["tasks"]
    assert tuple(table) == TASKS
    assert len(TASKS) == 34
    for task, (kind, *arguments) in table.items():
        name, positions = kinds[kind]
        judge = JUDGES[task]
        expected = {k: arguments[i] for k, i in positions.items()}
        for key in ("colour", "door"):
            if key in expected:
                expected[key] = expected[key].removeprefix("block_").removeprefix("base__")
        assert getattr(judge, "func", judge).__name__ == name, task
        assert getattr(judge, "keywords", {}) == expected, task


def test_every_sequence_and_every_random_chain_can_be_done() -> None:
    rng = np.random.default_rng(0)
    chains = [*evaluation_sequences(), *((s, random_chain(s, rng)) for s in initial_states())]
    for start, tasks in chains:
        state: symbolic.State | None = start
        for task in tasks:
            assert state is not None
            state = after(state, task)
        assert state is not None
        assert len({symbolic.category(task) for task in tasks}) == 5


def test_random_chains_are_as_likely_as_by_rejection() -> None:
    """All chains of a state are equally likely: first tasks come as often as the chains that begin with them."""
    state, rng = initial_states()[5], np.random.default_rng(1)
    ways = dict(symbolic._completions(state, frozenset(), 5))
    total, draws = sum(ways.values()), 4000
    drawn = [TASKS.index(random_chain(state, rng)[0]) for _ in range(draws)]
    for number, count in ways.items():
        expected = draws * count / total
        assert abs(drawn.count(number) - expected) < 5 * np.sqrt(expected)


def test_a_chain_pays_each_task_once() -> None:
    chain = Chain(("a", "b", "c"))
    for solved in (False, True, True):
        chain.count_step(solved)
    assert (chain.solved, chain.task, chain.steps, chain.over) == (2, "c", 0, False)
    assert chain.metrics() == {
        "avg_len": 2.0,
        "success_len_1": 1.0,
        "success_len_2": 1.0,
        "success_len_3": 0.0,
        "task/a/success_once": 1.0,
        "task/b/success_once": 1.0,
        "task/c/success_once": 0.0,
    }
    chain.count_step(True)
    assert chain.complete
    assert chain.task == "c"
    with pytest.raises(AssertionError):
        chain.count_step(True)


def test_the_official_limit_counts_from_the_last_success() -> None:
    chain = Chain(("a", "b"), step_limit=3)
    for solved in (False, False, True, False, False):
        chain.count_step(solved)
    assert not chain.over
    chain.count_step(False)
    assert chain.failed
    assert chain.metrics()["avg_len"] == 1.0
    assert Chain(("a",)).metrics() == {}


def test_a_seed_is_the_same_situation_in_every_scene_and_a_scattered_start() -> None:
    layouts = range(500_000, 500_200)
    for layout in layouts:
        starts = [start_of(ids_of(scene, [CHAIN_SLOT], range(layout, layout + 1))[0]) for scene in SCENES]
        assert len({start.tasks for start in starts}) == 1
    ids = ids_of("D", [CHAIN_SLOT], layouts)
    assert np.array_equal(start_of(ids[3]).scene_obs, start_of(ids[3]).scene_obs)
    assert not np.array_equal(start_of(ids[3]).scene_obs, start_of(ids[4]).scene_obs)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_starts_from_which_it_can_be_done(task: str) -> None:
    assert len(task_states(task)) >= 48
    for layout in range(20):
        start = start_of(ids_of("B", [TASKS.index(task)], range(500))[layout])
        assert start.tasks == (task,)
        assert (start.gripper < 0) == (task in ("place_in_slider", "place_in_drawer", "stack_block"))


def test_tasks_in_a_row_begin_as_single_ones_do() -> None:
    """The id's own start and task, then tasks of the list that are possible, no kind twice; demos stay single."""
    known = ("open_drawer", "close_drawer", "move_slider_left", "move_slider_right", "turn_on_led", "turn_off_led")
    seen = set()
    for layout in range(500_000, 500_100):
        for task in known:
            reset_id = ids_of("D", [TASKS.index(task)], range(layout, layout + 1))[0]
            alone, row = start_of(reset_id), start_of(reset_id, known, 5)
            assert (row.tasks[:1], len(row.tasks)) == ((task,), 3)  # a drawer, a slider and a light
            assert np.array_equal(row.scene_obs, alone.scene_obs)
            assert len({category(t) for t in row.tasks}) == 3
            assert start_of(reset_id, known, 2).tasks == row.tasks[:2]
            seen.add(row.tasks)
    assert len(seen) == 6 * 4 * 2  # the others in either order, each with the one task that is possible
    demo = ids_of("D", [TASKS.index("open_drawer")], DEMO_LAYOUTS)[0]
    assert start_of(demo, known, 3).tasks == ("open_drawer",)
    with pytest.raises(UserError, match="in_a_row=2 must be 1 where `tasks` names fewer than two"):
        env_spec(EnvConfig(env_type="calvin", init_params={"in_a_row": 2, "tasks": ["open_drawer"]}))


def test_a_share_of_the_episodes_begins_after_a_task_of_the_expert() -> None:
    """The id's own start and task, a task of another kind before it that leaves it possible; demos too, no chains."""
    known = ("open_drawer", "close_drawer", "move_slider_left", "move_slider_right", "turn_on_led", "turn_off_led")
    half = 0
    for layout in (*range(500_000, 500_100), *DEMO_LAYOUTS[:100]):
        for task in known:
            reset_id = ids_of("D", [TASKS.index(task)], range(layout, layout + 1))[0]
            alone, later = start_of(reset_id), start_of(reset_id, known, expert_first=1.0)
            assert (alone.done_before, later.tasks) == ("", (task,))
            assert np.array_equal(later.scene_obs, alone.scene_obs)
            assert later.done_before in known
            assert category(later.done_before) != category(task)
            half += start_of(reset_id, known, expert_first=0.5).done_before != ""
    assert 520 < half < 680  # of 1200, with a deviation of 17
    assert start_of(ids_of("D", [CHAIN_SLOT], range(500_000, 500_001))[0], known, expert_first=1.0).done_before == ""
    holding = ids_of("D", [TASKS.index("stack_block")], range(500_000, 500_001))[0]
    assert start_of(holding, ("stack_block", *known), expert_first=1.0).done_before == ""  # it would drop the block
    with pytest.raises(UserError, match=r"expert_first=0\.5 must be 0 where `tasks` names fewer than two"):
        env_spec(EnvConfig(env_type="calvin", init_params={"expert_first": 0.5, "tasks": ["open_drawer"]}))
    with pytest.raises(UserError, match=r"expert_first=0\.5 must be 0 with in_a_row=2: choose one"):
        env_spec(EnvConfig(env_type="calvin", init_params={"expert_first": 0.5, "in_a_row": 2, "tasks": list(known)}))


def test_corrections_move_blocks_and_door_of_b_and_c_only() -> None:
    state = next(s for s in initial_states() if s.red_block == "slider_left" and s.slider == "left")
    published = benchmark_scene_obs(state, geometry("B", compat=True))
    for scene in SCENES:
        assert np.array_equal(benchmark_scene_obs(state, geometry(scene, compat=True)), published)
        own = benchmark_scene_obs(state, geometry(scene))
        shift = 0.2 if scene in "BC" else 0.0
        assert own[6] - published[6] == pytest.approx(shift)
        assert own[0] == (0.24 if scene == "C" else 0.28)
        assert np.array_equal(own[[11, 17, 23]], published[[11, 17, 23]])
    assert [GEOMETRY[s].sizes[COLOURS.index("red")] for s in SCENES] == ["middle", "small", "big", "middle"]


def test_suites_and_ids() -> None:
    def spec(**keys):
        return env_spec(EnvConfig(env_type="calvin", **keys))

    one, three = spec(), spec(task_suite_name="calvin_abc")
    assert (one.suite, len(one.tasks), len(one.reset_ids["eval"]), len(three.reset_ids["eval"])) == (
        "calvin_d",
        34,
        1000,
        3000,
    )
    assert [start_of(i).scene for i in three.reset_ids["train"][:4]] == ["A", "B", "C", "A"]
    assert start_of(one.reset_ids["eval"][7]).tasks == evaluation_sequences()[7][1]
    assert one.image_size == (200, 200)
    assert one.wrist_image_size == (84, 84)
    demo = ids_of_task(three, "demo", "open_drawer")
    assert [(start_of(i).scene, start_of(i).tasks) for i in demo[:3]] == [(s, ("open_drawer",)) for s in "ABC"]
    few = spec(init_params={"tasks": ["turn_on_led", "open_drawer"], "eval_sequences": 3})
    assert few.tasks == ("turn_on_led", "open_drawer")
    assert {start_of(i).tasks for i in few.reset_ids["train"][:2]} == {("turn_on_led",), ("open_drawer",)}
    assert len(few.reset_ids["eval"]) == 2 * 500
    assert len(spec(init_params={"eval_sequences": 125}).reset_ids["eval"]) == 125


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"task_suite_name": "calvin_e"},
            r"env\.train\.task_suite_name: task_suite_name='calvin_e' must be calvin_d, ",
        ),
        ({"task_suite_name": "calvin_da"}, r"out of a, b, c, d in this order"),
        ({"init_params": {"tasks": ["open_drawr"]}}, r"task 'open_drawr' is unknown \(did you mean 'open_drawer'\?\)"),
        ({"init_params": {"tasks": ["open_drawer", "open_drawer"]}}, r"names a task twice"),
        ({"init_params": {"eval_sequences": 0}}, r"eval_sequences=0 must be an integer from 1 to 1000; nearest is 1"),
        ({"init_params": {"camera_heights": 200, "image_size": 64}}, r"must be equal: they name one square image"),
        ({"init_params": {"wrist_image_size": 8}}, r"wrist_image_size=8 must be an integer from 16"),
        ({"init_params": {"protocol": "oficial"}}, r"protocol='oficial' must be 'rl' or 'official'"),
        ({"init_params": {"protocol": "official"}}, r"max_episode_steps=100 must be at least 1800"),
    ],
)
def test_bad_options_are_refused(keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        env_spec(EnvConfig(env_type="calvin", **keys))


def test_the_compat_switch_reaches_the_simulator() -> None:
    plain = load_config("calvin_d_d_ppo_compact", devices=[0])
    compat = load_config("calvin_d_d_ppo_compact", ["compat=rlinf-0.4"], devices=[0])
    assert not env_options(plain.env.train).compat
    assert env_options(compat.env.train).compat
    assert env_options(compat.env.eval).compat
    told = load_config(
        "calvin_d_d_ppo_compact", ["compat=rlinf-0.4", "env.train.init_params.compat=false"], devices=[0]
    )
    assert not env_options(told.env.train).compat


def facts(*, x: float = 0.0, z: float = 0.46, yaw: float = 0.0, drawer: float = 0.0, lever: float = 0.0) -> Facts:
    """A red block at a place, the drawer so far open, the lightbulb's lever so far up; nothing else."""
    still, turned = np.zeros(3), np.array([0, 0, np.sin(yaw / 2), np.cos(yaw / 2)])
    block = Block(1, np.array([x, 0, z]), turned, still, still, frozenset())
    return Facts({"red": block}, 0, frozenset(), {}, {"drawer": drawer}, {}, {"lightbulb": lever})


@pytest.mark.parametrize(
    ("task", "now", "share"),
    [
        ("open_drawer", {"drawer": 0.03}, 0.25),
        ("close_drawer", {"drawer": 0.03}, -0.25),
        ("push_red_block_right", {"x": 0.05}, 0.5),
        ("push_red_block_left", {"x": 0.05}, -0.5),
        ("lift_red_block_table", {"z": 0.47}, 0.2),
        ("rotate_red_block_left", {"yaw": np.pi / 6}, 0.5),
        ("turn_on_lightbulb", {"lever": 0.75}, 0.75),
    ],
)
def test_the_share_of_a_task_that_is_done_ends_at_the_judges_threshold(task: str, now: dict, share: float) -> None:
    assert done(task, facts(), facts(**now)) == pytest.approx(share)


def test_a_lever_that_is_up_has_its_way_down_to_go() -> None:
    up = facts(lever=2.0)
    assert [done("turn_off_lightbulb", up, facts(lever=x)) for x in (2.0, 1.5, 1.0)] == [0.0, 0.5, 1.0]


def test_what_training_is_paid_for_is_no_part_of_the_protocol(calvin_path: Path) -> None:
    plain, shaped = (calvin.protocol(Options(shaped_reward=weight)) for weight in (0.0, 1.0))
    assert plain == shaped


def test_rotation_between_orientations() -> None:
    def quaternion(axis: int, degrees: float) -> np.ndarray:
        half = np.radians(degrees) / 2
        made = np.zeros(4)
        made[axis], made[3] = np.sin(half), np.cos(half)
        return made

    assert rotation_between(quaternion(2, 20), quaternion(2, 95)) == pytest.approx((0, 0, 75))
    assert rotation_between(quaternion(2, 170), quaternion(2, -120)) == pytest.approx((0, 0, 70))
    assert rotation_between(quaternion(0, 10), quaternion(0, 50)) == pytest.approx((40, 0, 0))
    assert rotation_between(quaternion(1, -30), quaternion(1, 5)) == pytest.approx((0, 35, 0))
