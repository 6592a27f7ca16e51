"""Metrics of a set of finished episodes."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.data.types import EpisodeRecord
from rlinf.metrics.stats import wilson_interval

__all__ = ["per_task", "summarise", "wilson_interval"]


def summarise(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Means over episodes, and over each task's episodes where there are several tasks; empty without episodes."""
    if not records:
        return {}
    metrics = _means(records) | {"num_trajectories": float(len(records))}
    tasks = per_task(records)
    if len(tasks) > 1:
        for task, own in tasks.items():
            means = _means(own)
            metrics |= {f"task/{task}/{name}": means[name] for name in ("success_once", "success_at_end")}
    return metrics


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
        metrics[f"extra/{name}"] = sum(values) / len(values)
    return metrics
