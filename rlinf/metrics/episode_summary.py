"""Metrics of a set of finished episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.data.types import EpisodeRecord
from rlinf.metrics.names import episode_metric, guide_name, task_metric
from rlinf.metrics.stats import Rate

AVERAGE_OF_GROUPS = "average of groups"  # row of a benchmark's table: a share without counts
PER_TASK = ("success_once", "success_at_end", "return", "episode_len")


def evaluation_metrics(
    records: Sequence[EpisodeRecord], groups: Mapping[str, Sequence[str]] | None = None
) -> dict[str, float]:
    """`eval/...` of an evaluation's episodes, with the interval of their success."""
    rate = Rate.of(r.success_once for r in records)
    interval = {"success_low": rate.low, "success_high": rate.high}
    return {f"eval/{name}": value for name, value in (summarise(records, groups) | interval).items()}


def summarise(
    records: Sequence[EpisodeRecord], groups: Mapping[str, Sequence[str]] | None = None, *, by_task: bool = False
) -> dict[str, float]:
    """Means over episodes, over each task's, over groups of tasks; empty without episodes.

    Single tasks are told where several were played, or `by_task` says that there are others.
    """
    if not records:
        return {}
    metrics = _means(records) | {"num_trajectories": float(len(records))}
    tasks = per_task(records)
    if len(tasks) > 1 or by_task:
        for task, own in tasks.items():
            means = _means(own)
            metrics |= {task_metric(task, name): means[name] for name in PER_TASK}
            metrics[task_metric(task, "num_trajectories")] = float(len(own))
    rates = group_rates(records, groups or {})
    if rates:
        metrics |= {f"group/{name}/success_once": rate.rate for name, rate in rates.items()}
        played = [task for name in rates for task in (groups or {})[name]]
        if len(set(played)) == len(played):
            metrics["group_average"] = sum(rate.rate for rate in rates.values()) / len(rates)
    return metrics


def group_rates(records: Sequence[EpisodeRecord], groups: Mapping[str, Sequence[str]]) -> dict[str, Rate]:
    """success_once of each group of tasks that was played, with counts."""
    rates = {name: Rate.of(r.success_once for r in records if r.task in tasks) for name, tasks in groups.items()}
    return {name: rate for name, rate in rates.items() if rate.trials}


def task_rates(records: Sequence[EpisodeRecord], groups: Mapping[str, Sequence[str]]) -> dict[str, Rate]:
    """success_once of every task where there are several, with counts; those in groups come first, as listed there."""
    played = per_task(records)
    if len(played) < 2:
        return {}
    order = dict.fromkeys([*(task for tasks in groups.values() for task in tasks if task in played), *played])
    return {task: Rate.of(r.success_once for r in played[task]) for task in order}


def own_metrics(records: Sequence[EpisodeRecord]) -> dict[str, Rate | float]:
    """What the simulator itself measures under names of metrics/names.py: shares with counts, else means.

    CALVIN: subtasks solved in a row, the share of episodes with at least k, the success of each subtask that was tried.
    """
    found: dict[str, Rate | float] = {}
    for name in dict.fromkeys(name for r in records for name in r.extra):
        values, row = [r.extra[name] for r in records if name in r.extra], episode_metric(name)
        if row is not None:
            found[name] = Rate.of(v > 0 for v in values) if row.unit == "share" else sum(values) / len(values)
    return found


def benchmark_table(
    records: Sequence[EpisodeRecord], groups: Mapping[str, Sequence[str]], suite: str
) -> dict[str, Any]:
    """The table under which a benchmark is published: title, columns and rows, for result.json and reports.

    Groups of tasks (MetaWorld's difficulty classes, ManiSkill's suites) with the averages over classes and over
    episodes; what the simulator itself measures (CALVIN's Len-1 to 5 and avg_num_subtasks); else tasks and all.
    """
    own, classes, tasks = own_metrics(records), group_rates(records, groups), task_rates(records, groups)
    own = {name: value for name, value in own.items() if not name.startswith("task/")}
    rows = [_row(name, rate) for name, rate in (classes or (tasks if not own else {})).items()]
    if len(classes) > 1 and "group_average" in (metrics := summarise(records, groups)):
        rows.append([AVERAGE_OF_GROUPS, metrics["group_average"], None, None, None, None])
    if not own or rows:
        rows.append(_row("all episodes" if rows else suite, Rate.of(r.success_once for r in records)))
    rows += [_row(guide_name(name), value) for name, value in own.items()]
    return {"title": suite, "columns": ["", "value", "low", "high", "successes", "trials"], "rows": rows}


def _row(name: str, value: Rate | float) -> list[Any]:
    if isinstance(value, Rate):
        return [name, value.rate, value.low, value.high, value.successes, value.trials]
    return [name, value, None, None, None, None]


def per_task(records: Sequence[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
    """Episodes by task, tasks in alphabetical order."""
    return {task: [r for r in records if r.task == task] for task in sorted({r.task for r in records})}


def _means(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    n = len(records)
    steps = sum(r.steps for r in records)
    metrics = {
        "success_once": sum(r.success_once for r in records) / n,
        "success_at_end": sum(r.success_at_end for r in records) / n,
        "return": sum(r.episode_return for r in records) / n,
        "episode_len": steps / n,
        "reward": sum(r.episode_return / max(r.steps, 1) for r in records) / n,
    }
    for name in sorted({name for r in records for name in r.extra}):
        values = [r.extra[name] for r in records if name in r.extra]
        metrics[name if episode_metric(name) else f"extra/{name}"] = sum(values) / len(values)
    return metrics
