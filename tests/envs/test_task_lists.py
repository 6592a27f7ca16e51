"""Lists of suites and tasks: what they join to, which episodes are drawn, what is refused; every simulator alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rlinf.data.noise import generator
from rlinf.envs.config import EnvConfig
from rlinf.envs.episodes import TaskShares, TrainIds
from rlinf.envs.spec import check_setup, env_options, env_spec, eval_trials, ids_of_task, num_trials
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.metrics.episode_summary import summarise
from rlinf.simulators.calvin.starts import start_of
from rlinf.simulators.contract import JoinedIds
from rlinf.simulators.maniskill.reset_ids import STRIDE, numbered_rows
from rlinf.simulators.maniskill.tasks import PREFIX

MAIN, CARROT, TWO_OBJECTS = PREFIX + "Main-v3", PREFIX + "Carrot-v1", PREFIX + "MultiCarrot-v1"
LISTS = {
    "toy": ["toy_blue", "toy_red"],
    "metaworld": ["reach-v3", "push-v3", "metaworld_45_ood"],
    "calvin": ["open_drawer", "turn_on_led"],
    "maniskill": [MAIN, TWO_OBJECTS],
}


def block(env_type: str, names: str | list[str] | None = None, **keys: Any) -> EnvConfig:
    return EnvConfig(env_type=env_type, task_suite_name=LISTS[env_type] if names is None else names, **keys)


def picks(cfg: EnvConfig, episodes: int, seed: int = 0) -> list[list[int]]:
    """Reset ids by episode number and env."""
    ids = TrainIds(cfg, env_spec(cfg), seed)
    return [[ids.pick(env, number) for env in range(cfg.total_num_envs)] for number in range(episodes)]


def task_of(cfg: EnvConfig, reset_id: int) -> str:
    spec = env_spec(cfg)
    return next(task for task in spec.tasks if reset_id in ids_of_task(spec, "train", task))


@pytest.mark.parametrize(("env_type", "name"), [("toy", "toy_2"), ("metaworld", "reach-v3"), ("calvin", "calvin_abc")])
def test_one_name_is_drawn_as_before_and_a_list_of_one_is_that_name(env_type: str, name: str) -> None:
    single, listed = (block(env_type, given, total_num_envs=6, group_size=2) for given in (name, [name]))
    ids = env_spec(single).reset_ids["train"]
    drawn = [
        [ids[int(generator(3, "reset", 0, env // 2, number).integers(len(ids)))] for env in range(6)]
        for number in range(4)
    ]
    assert picks(single, 4, seed=3) == picks(listed, 4, seed=3) == drawn
    assert env_spec(single) == env_spec(listed)
    assert not env_spec(single).balanced


@pytest.mark.parametrize("env_type", LISTS)
def test_a_list_joins_tasks_and_keeps_what_they_are_for_apart(env_type: str) -> None:
    cfg = block(env_type)
    spec = env_spec(cfg)
    assert spec.balanced
    assert spec.suite == "+".join(LISTS[env_type])
    parts = [env_spec(block(env_type, name)) for name in LISTS[env_type]]
    assert spec.tasks == tuple(task for part in parts for task in part.tasks)
    for split, ids in spec.reset_ids.items():
        assert isinstance(ids, JoinedIds)
        sample = [ids[i * len(ids) // 200] for i in range(200)] if len(ids) > 200 else list(ids)
        assert len(set(sample)) == len(sample)
        assert all(i in ids for i in sample)
        assert not any(i in spec.reset_ids[other] for other in spec.reset_ids if other != split for i in sample)
    first = spec.reset_ids["train"][: len(spec.tasks)]  # in order, every task in turn
    assert [task_of(cfg, i) for i in first] == list(spec.tasks)


@pytest.mark.parametrize("num_groups", [1, 3, 8, 12])
@pytest.mark.parametrize("num_tasks", [2, 3, 5, 50])
def test_every_task_gets_as_many_groups_as_any_other_up_to_one(num_tasks: int, num_groups: int) -> None:
    shares = TaskShares([1.0] * num_tasks, num_groups, seed=7)
    dealt = [[shares.task(group, number) for group in range(num_groups)] for number in range(64)]
    for rollouts in (1, 2, 4, 8, 64):  # of one training step
        for first in range(0, 64, rollouts):
            counts = Counter(task for rollout in dealt[first : first + rollouts] for task in rollout)
            assert max(counts.values()) - min(counts.get(task, 0) for task in range(num_tasks)) <= 1
    assert num_groups == 1 or len({tuple(rollout) for rollout in dealt}) > 1  # no env is tied to a task


def test_weights_are_shares_rounded_up_or_down() -> None:
    weights, num_groups = [3.0, 1.0, 0.5], 10
    shares = TaskShares(weights, num_groups, seed=1)
    for number in range(32):
        counts = Counter(shares.task(group, number) for group in range(num_groups))
        for task, weight in enumerate(weights):
            assert abs(counts[task] - weight / 4.5 * num_groups) < 1
    counts = Counter(shares.task(group, number) for number in range(32) for group in range(num_groups))
    assert [counts[task] for task in range(3)] == [pytest.approx(w / 4.5 * 320, abs=1) for w in weights]


def test_groups_share_task_and_seed_and_nothing_depends_on_how_often_one_asks() -> None:
    cfg = block("metaworld", total_num_envs=12, group_size=3)
    ids = TrainIds(cfg, env_spec(cfg), 5)
    straight = picks(cfg, 6, seed=5)
    for rollout in straight:
        assert [rollout[env] for env in range(12)] == [rollout[env - env % 3] for env in range(12)]
        assert len(set(rollout)) == 4
    again = {(env, number): ids.pick(env, number) for env in (11, 0, 4) for number in (5, 0, 2)}
    assert all(straight[number][env] == reset_id for (env, number), reset_id in again.items())
    assert straight != picks(cfg, 6, seed=6)


def test_weights_on_a_suite_and_ids_in_order() -> None:
    cfg = block("toy", "toy_2", total_num_envs=8, task_weights={"reach-red": 3})
    assert env_spec(cfg).balanced
    for rollout in picks(cfg, 8):
        assert Counter(task_of(cfg, i) for i in rollout) == {"reach-red": 6, "reach-blue": 2}
    ordered = block("toy", total_num_envs=3, use_ordered_reset_state_ids=True)
    played = [i for rollout in picks(ordered, 4) for i in rollout]
    assert [task_of(ordered, i) for i in played] == ["reach-blue", "reach-red"] * 6
    assert len(set(played)) == 12


@pytest.mark.parametrize(
    ("env_type", "asked", "each"),
    [
        ("toy", -1, 500),
        ("toy", 0, 4),
        ("metaworld", -1, 20),
        ("metaworld", 14, 2),
        ("metaworld", 0, 2),
        ("calvin", 8, 4),
        ("maniskill", -1, 64),
        ("maniskill", 6, 3),
    ],
)
def test_an_evaluation_plays_every_task_equally_often(env_type: str, asked: int, each: int) -> None:
    cfg = block(env_type, num_trials=asked, total_num_envs=8)
    spec = env_spec(cfg)
    trials = eval_trials(cfg, spec)
    counts = [sum(i in ids_of_task(spec, "eval", task) for i in trials) for task in spec.tasks]
    assert counts == [each] * len(spec.tasks)
    assert len(set(trials)) == len(trials) == num_trials(cfg, spec)


def test_calvin_plays_listed_tasks_alone_in_the_scenes_asked_for() -> None:
    cfg = block("calvin", init_params={"task_scenes": "abc", "protocol": "official"}, max_episode_steps=360)
    spec = env_spec(cfg)
    starts = [start_of(spec.reset_ids[split][i]) for split in ("train", "demo", "eval") for i in range(12)]
    assert {start.tasks for start in starts} == {("open_drawer",), ("turn_on_led",)}
    assert {start_of(i).scene for i in spec.reset_ids["train"][:12]} == {"A", "B", "C"}
    assert (spec.min_episode_steps, env_options(cfg).scenes) == (360, ("A", "B", "C"))
    one = env_spec(block("calvin", "open_drawer"))
    by_tasks = env_spec(block("calvin", "calvin_d", init_params={"tasks": ["open_drawer"]}))
    assert (one.tasks, one.reset_ids) == (by_tasks.tasks, by_tasks.reset_ids)
    assert env_options(block("calvin")).sentences == "validation"


@pytest.mark.usefixtures("calvin_path")
def test_a_calvin_scene_plays_what_is_listed() -> None:
    from rlinf.simulators.calvin import Scene

    cfg = block("calvin", init_params={"image_size": 32, "wrist_image_size": 32, "render": "fast"})
    scene, spec = Scene(env_options(cfg)), env_spec(cfg)
    for task in spec.tasks:
        scene.reset(ids_of_task(spec, "train", task)[0])
        assert scene.task() == task
    scene.close()


def test_maniskill_ids_of_lists_tell_their_environment() -> None:
    rows = {"Carrot-v1": (CARROT, "test"), "MultiCarrot-v1-train": (TWO_OBJECTS, "train"), MAIN: (MAIN, "train")}
    for names in (list(rows), list(rows)[::-1]):  # an id means the same in any list
        cfg = block("maniskill", names)
        spec, options = env_spec(cfg), env_options(cfg)
        table = numbered_rows(options.id, options.obj_set, options.listed)
        assert {name: row for name, row in table.values()} == rows
        assert [table[spec.reset_ids["eval"][64 * n] // STRIDE][0] for n in range(3)] == names
        assert ids_of_task(spec, "eval", MAIN)[0] % STRIDE == env_spec(block("maniskill", MAIN)).reset_ids["eval"][0]
        numbers = sorted(table)
    assert numbers == sorted(table)
    assert not ids_of_task(spec, "train", "Carrot-v1")


@pytest.mark.usefixtures("maniskill_path")
def test_a_maniskill_scene_plays_what_is_listed() -> None:
    from rlinf.simulators.maniskill import Scene

    cfg = block("maniskill", ["Carrot-v1", MAIN], init_params={"image_size": 32})
    check_setup(cfg, "env.eval")
    scene, spec = Scene(env_options(cfg)), env_spec(cfg)
    for task in spec.tasks:
        scene.reset(ids_of_task(spec, "eval", task)[0])
        assert scene.task() == task
        assert scene.episode.env_id == (MAIN if task == MAIN else CARROT)
    with pytest.raises(ValueError, match=f"reset id 5 is not one of Carrot-v1, {MAIN}"):
        scene.reset(5)
    scene.close()


@pytest.mark.parametrize(
    ("env_type", "names", "keys", "said"),
    [
        ("metaworld", [], {}, r"env\.train\.task_suite_name=\[\] names nothing to play"),
        ("metaworld", ["reach-v3", "reech-v3"], {}, r"task_suite_name='reech-v3' must be .*did you mean 'reach-v3'"),
        ("metaworld", ["reach-v3", "reach-v3"], {}, "names reach-v3 twice; env.train.task_weights gives"),
        ("metaworld", ["reach-v3", "metaworld_50"], {}, "holds reach-v3 twice: in reach-v3 and in metaworld_50"),
        ("metaworld", None, {"task_weights": {"pusch-v3": 1}}, r"task_weights\.pusch-v3: .*did you mean 'push-v3'"),
        ("metaworld", None, {"task_weights": {"push-v3": 0}}, r"task_weights\.push-v3=0 must be a number above 0"),
        ("metaworld", None, {"task_weights": {"push-v3": float("inf")}}, r"push-v3=inf must be a number above 0"),
        ("metaworld", None, {"task_weights": {"push-v3": "much"}}, r"push-v3='much' must be a number above 0"),
        ("calvin", ["open_drawer", "open_drawr"], {}, r"task_suite_name='open_drawr' must be .*mean 'open_drawer'"),
        ("calvin", ["open_drawer", "calvin_d"], {}, r"task_suite_name=calvin_d plays chains of tasks and stands alone"),
        ("calvin", None, {"init_params": {"tasks": ["stack_block"]}}, r"tasks=\['stack_block'\] must be \[\] where"),
        ("calvin", None, {"init_params": {"task_scenes": "dc"}}, "task_scenes='dc' must be letters of scenes"),
        ("maniskill", [MAIN, PREFIX + "Carot-v1"], {}, rf"task_suite_name: .*did you mean '{CARROT}'"),
        ("maniskill", [MAIN, "ood"], {}, "task_suite_name=ood stands alone; in a list name its environments: Carrot"),
        ("maniskill", None, {"init_params": {"sim_backend": "gpu"}}, "a batch on a GPU plays one environment id"),
        ("maniskill", [CARROT, "Carrot-v1"], {"init_params": {"obj_set": "test"}}, "play the same reset ids"),
    ],
)
def test_what_cannot_be_played_is_refused(
    env_type: str, names: list[str] | None, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        env_spec(block(env_type, names, **keys))


def test_simulators_that_fit_no_common_policy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf.simulators import toy

    plain = toy.spec
    wider = {"toy_red": 2, "toy_blue": 5}
    monkeypatch.setattr(toy, "spec", lambda options: replace(plain(options), state_dim=wider[options.task_suite_name]))
    with pytest.raises(UserError, match="toy_red cannot be played beside toy_blue: state_dim differs, 2 and 5"):
        env_spec(block("toy"))


def test_envs_of_a_list_play_its_tasks_and_continue_where_they_stood() -> None:
    cfg = block("toy", total_num_envs=4, max_episode_steps=4, num_processes=2)

    def env() -> VecEnv:
        return VecEnv(cfg, env_spec(cfg), env_ids=range(4), mode="train", chunk_size=4, seed=2)

    first, second = env(), env()
    try:
        first.reset()
        saved = first.state()
        played = [first.reset() for _ in range(2)]
        second.load_state(saved)
        for step in played:
            resumed = second.reset()
            assert resumed.obs.task_descriptions == step.obs.task_descriptions
            assert (resumed.obs.images == step.obs.images).all()
            assert Counter(step.obs.task_descriptions) == {"reach the red dot": 2, "reach the blue dot": 2}
        first.chunk_step(None)
        records = first.drain_episodes()
    finally:
        first.close()
        second.close()
    assert Counter(r.task for r in records) == {"reach-red": 2, "reach-blue": 2}
    assert {r.suite for r in records} == {"toy_blue+toy_red"}
    alone = [r for r in records if r.task == "reach-red"]
    assert summarise(alone, by_task=True)["task/reach-red/num_trajectories"] == 2
    assert not any(name.startswith("task/") for name in summarise(alone))
