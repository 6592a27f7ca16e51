"""Rounds play every task once, in an order that the seed alone decides; batches are whole rounds that double."""

from rlinf.results.schedule import batches, rounds

FIVE_TASKS = {1_000_000 * task + layout: task for task in range(5) for layout in range(8)}


def test_every_round_plays_every_task_once_and_every_trial_is_played_once() -> None:
    played = rounds(FIVE_TASKS, seed=0)
    assert len(played) == 8
    assert all(sorted(FIVE_TASKS[i] for i in ids) == [0, 1, 2, 3, 4] for ids in played)
    assert sorted(i for ids in played for i in ids) == sorted(FIVE_TASKS)


def test_the_seed_decides_and_neither_task_nor_layout_comes_first() -> None:
    assert rounds(FIVE_TASKS, seed=3) == rounds(dict(reversed(FIVE_TASKS.items())), seed=3)
    assert rounds(FIVE_TASKS, seed=3) != rounds(FIVE_TASKS, seed=4)
    assert len({tuple(FIVE_TASKS[i] for i in ids) for ids in rounds(FIVE_TASKS, seed=3)}) > 1


def test_a_task_with_more_trials_plays_on_alone() -> None:
    assert [len(ids) for ids in rounds({1: "a", 2: "b", 3: "b", 4: "b"}, seed=0)] == [2, 1, 1]
    assert rounds({}, seed=0) == []


def test_batches_double_what_was_played_in_whole_rounds() -> None:
    single = [[i] for i in range(300)]
    assert [len(ids) for ids in batches(single, 32)] == [32, 32, 64, 128, 44]
    assert [len(ids) for ids in batches(rounds(FIVE_TASKS, seed=0), 8)] == [10, 10, 20]
    assert [i for ids in batches(single, 32) for i in ids] == list(range(300))


def test_no_batch_is_smaller_than_the_first() -> None:
    assert [len(ids) for ids in batches([[i] for i in range(90)], 32)] == [32, 58]
    assert [len(ids) for ids in batches([[i] for i in range(20)], 32)] == [20]
