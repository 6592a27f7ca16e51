"""What the charts of a report draw, as plain values for its script: curves, stacked phases, heat maps.

Long runs are thinned here: a point then stands for several steps, as their mean, smallest and largest value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlinf.metrics.console import PHASES
from rlinf.metrics.names import CANONICAL, GROUPS, METRICS, task_metric
from rlinf.metrics.report.run_files import RunFiles
from rlinf.metrics.stats import Rate

Chart = dict[str, Any]
Points = Sequence[tuple[int, float]]  # step, value
MOST_POINTS = 1000  # of one line; a screen is not wider
ALL_POINTS = 60_000  # of all lines of a page: about 2 MB
FEWEST_POINTS = 50
HEAT_COLUMNS = 60
MOST_TASKS = 200  # rows of a heat map
REST = "everything else"
TASK_SUCCESS = re.compile("env/task/([^/]+)/success_once")
SUCCESS = "env/success_once"
IDLE = ("time/device_idle_mean", "time/device_idle_max")
SYSTEM = (
    "time/env_steps_per_second",
    *(metric.name for metric in (*GROUPS["System"], *GROUPS["Bytes"])),
    "env/restarts",
)
GROUPED = {"Training": GROUPS["Training"], "Rollout": GROUPS["Rollout"], "Environment": GROUPS["Environment"]}


def make_charts(runs: Sequence[RunFiles]) -> dict[str, list[Chart]]:
    """Section -> its charts, in the order of the page; a metric that no run logged has none."""
    logged = {name for run in runs for name in run.curves} - CANONICAL.keys()
    names = {
        "Device idle": [name for name in IDLE if name in logged],
        "System": [name for name in SYSTEM if name in logged],
        **{
            group: [m.name for m in rows if m.name in logged and m.name not in (*SYSTEM, SUCCESS)]
            for group, rows in GROUPED.items()
        },
    }
    lines = len(runs) * sum(map(len, names.values()))
    limit = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(lines, 1)))
    charts: dict[str, list[Chart]] = {
        "Success": _success(runs),
        "Success by task": _heat_maps(runs),
        "Time": [chart for index, run in enumerate(runs) if (chart := _phases(index, run, limit))],
        **{section: [_lines(runs, name, limit) for name in found] for section, found in names.items()},
    }
    return {
        section: found for section, of in charts.items() if (found := [c for c in of if c.get("series") or "rows" in c])
    }


def constant_of(chart: Chart) -> float | None:
    """The value that a metric had in every step of every run; None where it changed."""
    if chart.get("large") or "rows" in chart or chart.get("stack"):
        return None
    values = {value for line in chart["series"] for key in ("y", "low", "high") for value in line.get(key, ())}
    return values.pop() if len(values) == 1 else None


def _success(runs: Sequence[RunFiles]) -> list[Chart]:
    """Success of training episodes as a line per run, and of its evaluations as dots with their intervals."""
    series = []
    for index, run in enumerate(runs):
        if points := run.points(SUCCESS):
            series.append(_line(index, points, MOST_POINTS))
        rates = {e.step: e.success for e in run.evaluations if e.is_of_curve}
        if rates:
            ends = {"low": [_short(r.low) for r in rates.values()], "high": [_short(r.high) for r in rates.values()]}
            y = [_short(rate.rate) for rate in rates.values()]
            said = [str(rate) for rate in rates.values()]
            series.append({"run": index, "dots": True, "x": [*rates], "y": y, "said": said, **ends})
    return [{"title": "success_once", "percent": True, "whole": True, "large": True, "series": series}]


def _lines(runs: Sequence[RunFiles], name: str, limit: int) -> Chart:
    """One metric, a line per run."""
    series = [_line(index, points, limit) for index, run in enumerate(runs) if (points := run.points(name))]
    row = METRICS.get(name)
    return {
        "title": name,
        "about": "" if row is None else row.meaning,
        "unit": "" if row is None else row.unit,
        "percent": row is not None and row.unit == "share",
        "whole": name in IDLE,  # an axis from 0 to 100 %
        "series": series,
    }


def _line(run: int, points: Points, limit: int) -> Chart:
    """A line of at most `limit` points; where steps were put together, with their smallest and largest value."""
    shown = thinned(points, limit)
    out: Chart = {"run": run, "x": [step for step, _ in shown], "y": [value for _, value in shown]}
    if len(points) <= limit:
        return out
    buckets = list(_buckets(points, limit))
    return out | {
        "low": [_short(min(value for _, value in bucket)) for bucket in buckets],
        "high": [_short(max(value for _, value in bucket)) for bucket in buckets],
        "steps": max(map(len, buckets)),
    }


def _phases(index: int, run: RunFiles, limit: int) -> Chart | None:
    """Seconds of each phase of a step on top of each other; `limit` points at most."""
    whole = run.points("time/step")
    if not whole:
        return None
    parts: dict[str, Mapping[int, float]] = {name: dict(run.points(f"time/{name}")) for name in PHASES}
    parts = {name: values for name, values in parts.items() if any(values.values())}
    buckets = list(_buckets(whole, min(limit, 400)))
    layers = {
        name: [_mean([(step, values.get(step, 0.0)) for step, _ in bucket]) for bucket in buckets]
        for name, values in parts.items()
    }
    named = [sum(values) for values in zip(*layers.values(), strict=True)] or [0.0] * len(buckets)
    layers[REST] = [max(_mean(bucket) - sum_, 0.0) for bucket, sum_ in zip(buckets, named, strict=True)]
    colours = {name: index for index, name in enumerate((*PHASES, REST))}  # the same phase, the same colour
    series = [{"label": k, "colour": colours[k], "y": [_short(v) for v in values]} for k, values in layers.items()]
    x = [bucket[-1][0] for bucket in buckets]
    return {"title": "seconds per step", "unit": "s", "stack": True, "run": index, "x": x, "series": series}


def phase_seconds(run: RunFiles) -> dict[str, float]:
    """Mean seconds of each phase per training step, the longest first; a step without it spent nothing on it."""
    whole = [value for _, value in run.points("time/step")]
    if not whole:
        return {}
    seconds = {name: sum(value for _, value in run.points(f"time/{name}")) / len(whole) for name in PHASES}
    seconds[REST] = max(sum(whole) / len(whole) - sum(seconds.values()), 0.0)
    return dict(sorted(((k, v) for k, v in seconds.items() if v), key=lambda item: -item[1]))


def _heat_maps(runs: Sequence[RunFiles]) -> list[Chart]:
    """Success of every task over time, in training and where there are several in evaluations.

    All maps have their tasks in one order: by the success they end with, best first.
    """
    maps = [
        chart for i, run in enumerate(runs) for chart in (_training_heat(i, run), _evaluation_heat(i, run)) if chart
    ]
    ends: dict[str, list[float]] = {}
    for chart in maps:
        for name, rates in chart["tasks"].items():
            ends.setdefault(name, []).extend([rate.rate for rate in rates if rate][-1:])
    order = sorted(ends, key=lambda name: (-sum(ends[name]) / max(len(ends[name]), 1), name))
    return [_in_order(chart, order) for chart in maps]


def _training_heat(index: int, run: RunFiles) -> Chart | None:
    """Counted successes of training episodes, put together where there are more steps than columns."""
    names = sorted({found[1] for name in run.curves if (found := TASK_SUCCESS.fullmatch(name))})
    counts = {name: dict(run.points(f"env/{task_metric(name, 'num_trajectories')}")) for name in names}
    rates = {name: run.points(f"env/{task_metric(name, 'success_once')}") for name in names}
    steps = sorted({step for points in rates.values() for step, _ in points})
    if not steps:
        return None
    edges = [bucket[-1][0] for bucket in _buckets([(step, 0.0) for step in steps], HEAT_COLUMNS)]
    column = dict(zip(steps, _column_of(steps, edges), strict=True))
    cells: dict[str, list[Rate | None]] = {}
    for name in names:
        won, played = [0] * len(edges), [0] * len(edges)
        for step, rate in rates[name]:
            episodes = round(counts[name].get(step, 1))
            won[column[step]] += round(rate * episodes)
            played[column[step]] += episodes
        cells[name] = [Rate(min(w, n), n) if n else None for w, n in zip(won, played, strict=True)]
    return _heat(index, "training episodes", steps[0], edges, cells)


def _evaluation_heat(index: int, run: RunFiles) -> Chart | None:
    placed = [one for one in run.evaluations if one.is_of_curve]
    last = {one.step: one for one in placed}  # of several at one step, the last
    split = [one.by_task() for one in last.values()]
    names = sorted({name for tasks in split for name in tasks})
    if len(names) < 2 or len(last) < 2:  # one evaluation is a table, not a map
        return None
    cells = {
        name: [Rate.of(e["success_once"] for e in tasks[name]) if name in tasks else None for tasks in split]
        for name in names
    }
    return _heat(index, "evaluations", None, [step for step in last if step is not None], cells)


def _heat(run: int, what: str, first: int | None, edges: list[int], cells: dict[str, list[Rate | None]]) -> Chart:
    """`first` is the first step of the first column; None for columns that are one step each."""
    return {"title": f"success of each task, {what}", "run": run, "first": first, "edges": edges, "tasks": cells}


def _in_order(chart: Chart, order: Sequence[str]) -> Chart:
    """A heat map with its rows in this order, as plain values."""
    tasks = chart.pop("tasks")
    names = [name for name in order if name in tasks]
    rows = names[:MOST_TASKS]
    return chart | {
        "rows": rows,
        "left_out": len(names) - len(rows),
        "cells": [[_short(rate.rate) if rate else None for rate in tasks[name]] for name in rows],
        "said": [[f"{rate.successes}/{rate.trials}" if rate else "" for rate in tasks[name]] for name in rows],
    }


def thinned(points: Points, limit: int) -> Points:
    """At most `limit` points: where steps are put together, the last of them and the mean of their values."""
    return [(bucket[-1][0], _short(_mean(bucket))) for bucket in _buckets(points, limit)]


def _buckets(points: Points, limit: int) -> Iterable[Points]:
    """The points in at most `limit` runs of equal length, but for the last."""
    size = max(1, -(-len(points) // limit))
    return [points[start : start + size] for start in range(0, len(points), size)]


def _column_of(steps: Sequence[int], edges: Sequence[int]) -> list[int]:
    """For each step, rising, the index of the first edge that is not below it."""
    out, column = [], 0
    for step in steps:
        while step > edges[column]:
            column += 1
        out.append(column)
    return out


def _mean(points: Points) -> float:
    return sum(value for _, value in points) / len(points)


def _short(value: float) -> float:
    """Five digits: what a chart can show, in as few characters."""
    return float(f"{value:.5g}")
