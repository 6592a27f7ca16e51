"""Episodes go to processes that have their task loaded: equal loads, nothing built twice, and equal results."""

import contextlib
import os
import signal
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.data.types import EnvStep
from rlinf.envs.config import EnvConfig
from rlinf.envs.fleet import FILMED, Fleet
from rlinf.envs.routing import assign, missing_copies, tasks_per_process
from rlinf.envs.spec import env_spec
from rlinf.envs.vec import VecEnv
from rlinf.simulators.metaworld import suite

SMALL = EnvConfig(
    env_type="metaworld",
    task_suite_name="metaworld_45_ood",
    total_num_envs=6,
    max_episode_steps=4,
    init_params={"image_size": 32, "render": "fast"},
)


@pytest.mark.parametrize("group_size", [1, 8])
def test_every_draw_of_50_tasks_finds_its_task_loaded_with_equal_loads(group_size: int) -> None:
    cfg = EnvConfig(env_type="metaworld", total_num_envs=64, num_processes=16, group_size=group_size)
    limit = tasks_per_process(cfg, replace(env_spec(cfg), loaded_task_bytes=1 << 20), 64)
    assert limit == (19 if group_size == 1 else 38)  # of 50: 6 or 12 copies in 16 processes
    loaded = missing_copies(range(50), [[] for _ in range(16)], limit)
    copies = Counter(task for there in loaded for task in there)
    assert all(len(set(there)) == len(there) == limit for there in loaded)
    assert max(copies.values()) - min(copies.values()) <= 1
    rng, unequal = np.random.default_rng(1), 0
    for _ in range(100):
        tasks = dict(enumerate(rng.integers(50, size=64 // group_size).repeat(group_size).tolist()))
        where = assign(tasks, dict.fromkeys(tasks, 1.0), loaded, [0.0] * 16, tolerated=2.0)
        assert all(tasks[row] in loaded[p] for row, p in where.items())
        unequal += set(Counter(where.values()).values()) != {4}
    assert unequal <= 2


def test_slow_tasks_are_dealt_out_evenly() -> None:
    rng = np.random.default_rng(2)
    seconds = dict(enumerate(rng.choice([1.0, 2.0, 5.0], size=50, p=[0.6, 0.3, 0.1]).tolist()))
    loaded = missing_copies(range(50), [[] for _ in range(16)], 19)
    worst = []
    for _ in range(50):
        tasks = dict(enumerate(rng.integers(50, size=64).tolist()))
        work = [0.0] * 16
        of_row = {row: seconds[task] for row, task in tasks.items()}
        for row, p in assign(tasks, of_row, loaded, [0.0] * 16, tolerated=2.0).items():
            assert tasks[row] in loaded[p]
            work[p] += seconds[tasks[row]]
        worst.append(max(work) / (sum(work) / 16))
    assert np.mean(worst) < 1.12


def place(
    tasks: dict[int, int], loaded: list[list[int]], running: list[float], tolerated: float = 1.25
) -> dict[int, int]:
    return assign(tasks, dict.fromkeys(tasks, 1.0), loaded, running, tolerated=tolerated)


def test_a_task_that_everybody_plays_is_loaded_everywhere() -> None:
    everybody = dict.fromkeys(range(8), 7)
    assert Counter(place(everybody, [[], [], [7], []], [0.0] * 4).values()) == {p: 2 for p in range(4)}
    assert Counter(place(everybody, [[7], [], [7], []], [0.0] * 4, tolerated=2.0).values()) == {0: 4, 2: 4}


def test_episodes_that_go_on_count_as_work() -> None:
    assert place({0: 1, 3: 1}, [[1], [1], []], [2.0, 1.0, 0.0]) == {0: 1, 3: 2}


def test_new_tasks_are_built_where_there_is_least_to_do() -> None:
    where = place({0: 5, 1: 5, 2: 6, 3: 7}, [[1, 2], [], []], [0.0] * 3, tolerated=2.0)
    assert where[0] == where[1]  # built once
    assert sorted(Counter(where.values()).values()) == [1, 1, 2]


def test_a_process_keeps_what_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = EnvConfig(env_type="metaworld", total_num_envs=64, num_processes=16)
    memory = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * 4 * 7 * suite.LOADED_TASK_BYTES // 4096}
    monkeypatch.setattr("os.sysconf", memory.__getitem__)
    monkeypatch.setattr("rlinf.envs.routing.usable_cores", lambda: 16)
    assert tasks_per_process(cfg, env_spec(cfg), 64) == 7


def make(processes: int, *, routed: bool = True) -> VecEnv:
    cfg = replace(SMALL, num_processes=processes)
    spec = env_spec(cfg)
    spec = spec if routed else replace(spec, loaded_task_bytes=0)
    return VecEnv(cfg, spec, env_ids=range(6), mode="train", chunk_size=2, seed=3)


def play(env: VecEnv, epochs: int = 3) -> tuple[list[EnvStep], list[int]]:
    """Steps of all epochs, and the number of tasks built until the end of each."""
    generator = torch.Generator().manual_seed(0)
    steps, built = [], []
    with contextlib.closing(env):
        for _ in range(epochs):
            steps.append(env.reset())
            steps += [env.chunk_step(torch.rand(6, 2, 4, generator=generator) * 2 - 1) for _ in range(2)]
            built.append(env.num_tasks_built)
    return steps, built


def same(one: list[EnvStep], other: list[EnvStep]) -> bool:
    return all(
        torch.equal(a.obs.images, b.obs.images)
        and torch.equal(a.obs.states, b.obs.states)
        and torch.equal(a.rewards, b.rewards)
        and a.obs.task_descriptions == b.obs.task_descriptions
        for a, b in zip(one, other, strict=True)
    )


def test_from_the_third_epoch_on_no_task_is_built_and_results_do_not_depend_on_processes() -> None:
    fixed, _ = play(make(1, routed=False))
    routed, built = play(make(2), epochs=4)
    assert same(fixed, routed[: len(fixed)])
    assert 0 < built[0] <= built[1] == 10  # 5 tasks in each process
    assert built[2:] == [10, 10]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_any_number_of_processes_plays_the_same(processes: int) -> None:
    fixed, _ = play(make(processes, routed=False))
    routed, built = play(make(processes))
    assert same(fixed, routed)
    assert same(fixed, play(make(2))[0])
    assert built[2] == built[1]


@pytest.mark.slow
def test_episodes_continue_in_other_processes_and_a_dead_process_is_replaced() -> None:
    still = torch.zeros(6, 2, 4)
    with contextlib.closing(make(2)) as env, contextlib.closing(make(3)) as other:
        env.reset()
        env.reset()
        env.chunk_step(still)
        saved = env.state()
        assert same([other.load_state(saved)], [env.load_state(saved)])
        assert same([other.chunk_step(still)], [env.chunk_step(still)])
        os.kill(env._fleet.pids()[0], signal.SIGKILL)
        env.reset()
        assert env.num_restarts == 1
        assert env.chunk_step(still).valid.all()


def test_filmed_rows_are_spread_over_the_processes() -> None:
    loaded = missing_copies(range(50), [[] for _ in range(16)], 19)
    tasks = dict(enumerate(np.random.default_rng(3).integers(50, size=64).tolist()))
    seconds = {row: 4.0 if row < 9 else 1.0 for row in tasks}
    where = assign(tasks, seconds, loaded, [0.0] * 16, tolerated=2.0)
    assert len({where[row] for row in range(9)}) == 9
    work = Counter[int]()
    for row, p in where.items():
        work[p] += int(seconds[row])
    assert max(work.values()) <= 7  # of 91 in 16 processes


def test_what_filming_costs_is_measured_apart() -> None:
    cfg = EnvConfig(env_type="metaworld", total_num_envs=4, num_processes=2)
    spec = replace(env_spec(cfg), loaded_task_bytes=1 << 20)
    fleet = Fleet(cfg, spec, range(4), options=suite.Options(), chunk_size=5, playing=str, num_recorded=1)
    assert [fleet._seconds_per_step()(row, 7) for row in (0, 1)] == [FILMED, 1.0]  # nothing is known yet
    fleet._task_of = {0: 7, 1: 7, 2: 8}
    fleet._note_times({str(row): {"steps": 5, "seconds": s} for row, s in ((0, 1.0), (1, 0.1), (2, 0.3))})
    assert [round(fleet._seconds_per_step()(row, task), 6) for row, task in ((0, 7), (1, 7), (1, 8), (0, 8))] == [
        0.2, 0.02, 0.06, 0.2
    ]  # fmt: skip
