"""Metrics of finished episodes."""

from __future__ import annotations

from rlinf.data.types import EpisodeRecord
from rlinf.metrics.episode_summary import own_metrics, summarise
from rlinf.metrics.stats import Rate


def record(task: str, steps: int, episode_return: float, once: bool, end: bool, **extra: float) -> EpisodeRecord:
    return EpisodeRecord(
        suite="s",
        task=task,
        reset_id=0,
        seed=0,
        env_id=0,
        steps=steps,
        episode_return=episode_return,
        success_once=once,
        success_at_end=end,
        extra=extra,
    )


def test_means_over_episodes_and_tasks() -> None:
    records = [
        record("reach", 10, 1.0, True, True, grasped=1.0),
        record("reach", 20, 0.0, True, False, grasped=0.0),
        record("push", 30, 0.0, False, False),
    ]
    assert summarise(records) == {
        "success_once": 2 / 3,
        "success_at_end": 1 / 3,
        "return": 1 / 3,
        "episode_len": 20.0,
        "reward": (1 / 10) / 3,
        "num_trajectories": 3.0,
        "extra/grasped": 0.5,
        "task/push/success_once": 0.0,
        "task/push/success_at_end": 0.0,
        "task/push/return": 0.0,
        "task/push/episode_len": 30.0,
        "task/push/num_trajectories": 1.0,
        "task/reach/success_once": 1.0,
        "task/reach/success_at_end": 0.5,
        "task/reach/return": 0.5,
        "task/reach/episode_len": 15.0,
        "task/reach/num_trajectories": 2.0,
    }


def test_a_simulators_own_metrics_take_their_documented_names() -> None:
    """A chain's records: subtasks in a row, shares with counts, and each subtask over the episodes that reached it."""
    chains = [(2, {"open_drawer": 1.0, "turn_on_led": 1.0, "stack_block": 0.0}), (0, {"turn_on_led": 0.0})]
    records = []
    for length, outcome in chains:
        extra = {"avg_len": float(length), "success_len_1": float(length >= 1), "temperature": 3.0}
        extra |= {f"task/{task}/success_once": value for task, value in outcome.items()}
        records.append(record("chain-D", 480, length, False, False, **extra))
    metrics = summarise(records)
    assert metrics["avg_len"] == 1.0
    assert metrics["success_len_1"] == 0.5
    assert metrics["extra/temperature"] == 3.0
    assert (metrics["task/open_drawer/success_once"], metrics["task/turn_on_led/success_once"]) == (1.0, 0.5)
    own = own_metrics(records)
    assert own["avg_len"] == 1.0
    assert own["task/turn_on_led/success_once"] == Rate(1, 2)
    assert own["task/stack_block/success_once"] == Rate(0, 1)
    assert list(own)[:2] == ["avg_len", "success_len_1"]
    assert "temperature" not in own
    assert own_metrics([record("reach", 1, 0.0, True, True)]) == {}


def test_one_task_needs_no_table_and_no_episodes_no_metrics() -> None:
    assert not any(name.startswith("task/") for name in summarise([record("reach", 1, 0.0, False, False)]))
    assert summarise([]) == {}


def test_groups_of_tasks_weigh_the_same_in_their_average():
    records = [record("reach", 1, 0.0, done, done) for done in (True, True, True, False)]
    records += [record("push", 1, 0.0, False, False)]
    metrics = summarise(records, {"easy": ["reach"], "hard": ["push"], "never played": ["sweep"]})
    assert metrics["group/easy/success_once"] == 0.75
    assert metrics["group/hard/success_once"] == 0.0
    assert metrics["group_average"] == 0.375
    assert not any("never" in name for name in metrics)


def test_a_slash_in_a_task_name_does_not_split_its_metric():
    metrics = summarise([record(task, 1, 0.0, True, True) for task in ("open/close", "push")])
    assert metrics["task/open-close/success_once"] == 1.0
