"""report.html: one self-contained page about a run, made from the files in its folder and nothing else.

Reads metrics.jsonl, eval/step_N/result.json (of earlier versions eval/step_N.json and eval_*.json), summary.json,
config.yaml and *.mp4.
Every rate on the page is computed here from counted episodes and shown with them and its 95 % interval.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlinf.errors import UserError
from rlinf.metrics.console import PHASES
from rlinf.metrics.curves import STYLE, Series, curve_svg
from rlinf.metrics.loggers import read_jsonl
from rlinf.metrics.names import CANONICAL, GROUPS, METRICS, task_metric
from rlinf.metrics.stats import Rate
from rlinf.results.result import results_of_run
from rlinf.storage.atomic_folder import make_folder, write_file
from rlinf.storage.redaction import redacted_text

logger = logging.getLogger(__name__)
MAX_VIDEOS = 12
TASK_SUCCESS = re.compile("env/(task/[^/]+/success_once)")
PAGE_STYLE = """
body { margin: 0 auto; max-width: 1080px; padding: 24px; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 12px; }
p.sub, td.dim, figcaption { color: var(--dim); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px; }
.card b { display: block; font-size: 21px; } .card span { color: var(--dim); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 14px; }
.chart { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 16px 4px 0; border-bottom: 1px solid var(--rule); }
td.num, th.num { text-align: right; }
.bar { display: inline-block; height: 9px; border-radius: 2px; background: var(--c0); }
a { color: var(--c0); } figure { margin: 0; } video { width: 100%; border-radius: 8px; }
pre { overflow-x: auto; background: var(--card); border-radius: 8px; padding: 12px; font-size: 13px; }
"""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation file: every episode played."""

    path: Path
    step: int | None
    episodes: list[dict[str, Any]]
    rates: dict[str, Rate]  # shares the simulator itself measures: subtasks of a chain


def write_report(run_dir: Path, *, out: Path | None = None) -> Path:
    """Write report.html (into the run's folder unless told otherwise) and return its path."""
    out = out or run_dir / "report.html"
    metrics = run_dir / "metrics.jsonl"
    rows = sorted(read_jsonl(metrics), key=lambda row: row["step"]) if metrics.exists() else []
    evaluations = _read_evaluations(run_dir)
    summary = _read_object(run_dir / "summary.json") or {}
    if not rows and not evaluations and not summary:
        raise UserError(f"{run_dir} holds nothing to report: no metrics.jsonl, no evaluation, no summary.json")
    body = [
        *_head(run_dir, rows, summary),
        *_success(rows, evaluations),
        *_success_by_task(rows, evaluations),
        *_evaluations(evaluations, out),
        *_curves(rows),
        *_times(rows),
        *_videos(run_dir, out),
        *_config(run_dir),
    ]
    title = escape(run_dir.resolve().name)
    make_folder(out.parent)
    write_file(
        out,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{PAGE_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n",
    )
    return out


def _read_evaluations(run_dir: Path) -> list[Evaluation]:
    found = []
    for path in [*results_of_run(run_dir), *run_dir.glob("eval/step_*.json"), *run_dir.glob("eval_*.json")]:
        data = _read_object(path)
        if data is None:
            continue
        try:
            rates = {name: Rate(rate["successes"], rate["trials"]) for name, rate in data.get("rates", {}).items()}
            step = data.get("step")
            one = Evaluation(path, None if step is None else int(step), data["episodes"], rates)
            _episode_table("", {"": one.episodes})  # refuses episodes that lack something
            found.append(one)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is left out of the report: it is no evaluation (%r)", path, error)
    return sorted(found, key=lambda e: (e.step is None, e.step or 0, e.path.name))


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or, with a warning, where it holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict):
            return data
        problem: Any = "it is not an object"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = error
    logger.warning("%s is left out of the report: %s", path, problem)
    return None


def _head(run_dir: Path, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    trained = [row["step"] for row in rows if any(name.startswith(("train/", "env/")) for name in row)]
    steps = f"{trained[-1]} training steps" if trained else "no training steps"
    seconds = sum(row.get("time/step") or 0.0 for row in rows)
    out = [
        f"<h1>{escape(run_dir.resolve().name)}</h1>",
        f'<p class="sub">{steps}, {seconds / 60:.1f} min of training</p>',
        *_origin(_read_object(run_dir / "run.json") or {}),
    ]
    cards = [
        _card(name, Rate(value["successes"], value["trials"]))
        for name, value in summary.items()
        if isinstance(value, dict) and {"successes", "trials"} <= value.keys()
    ]
    plain = {k: v for k, v in summary.items() if isinstance(v, int | float | str) and not isinstance(v, bool)}
    if cards:
        out.append(f'<div class="cards">{"".join(cards)}</div>')
    if plain:
        said = " · ".join(
            f"{escape(k)}: {escape(f'{v:.6g}' if isinstance(v, float) else str(v))}" for k, v in plain.items()
        )
        out.append(f'<p class="sub">{said}</p>')
    return out


def _origin(record: dict[str, Any]) -> list[str]:
    """The id of the run and where it was last started: command, commit, machine."""
    if "id" not in record:
        return []
    starts = record.get("starts")
    last = starts[-1] if isinstance(starts, list) and starts and isinstance(starts[-1], dict) else {}
    told = [
        ("run", record["id"]),
        ("started", last.get("at")),
        ("on", last.get("host")),
        ("commit", last.get("commit")),
    ]
    said = " · ".join(escape(f"{name} {value}") for name, value in told if value)
    return [f'<p class="sub">{said}</p>', f"<pre>{escape(redacted_text(str(last.get('command', ''))))}</pre>"]


def _card(name: str, rate: Rate) -> str:
    return f'<div class="card"><span>{escape(name)}</span><b>{100 * rate.rate:.1f} %</b><span>{rate}</span></div>'


def _success(rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]) -> list[str]:
    series = _success_series(_points(rows, "env/success_once"), evaluations)
    if not series:
        return []
    return ["<h2>Success</h2>", curve_svg(series, title="success_once", percent=True, width=1040, height=360)]


def _success_by_task(rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]) -> list[str]:
    """A small chart of success for every task, where there are several: in training and in evaluations."""
    logged = {match.group(1) for row in rows for name in row if (match := TASK_SUCCESS.fullmatch(name))}
    split = [_episodes_by_task(one) for one in evaluations]
    played = {name for episodes in split for name in episodes}
    charts = []
    for name in sorted(logged | played if len(played) > 1 else logged):
        own = [replace(one, episodes=its.get(name, [])) for one, its in zip(evaluations, split, strict=True)]
        series = _success_series(_points(rows, f"env/{name}"), own)
        if series:
            title = name.removeprefix("task/").removesuffix("/success_once")
            charts.append(curve_svg(series, title=title, percent=True, width=400, height=220))
    return ["<h2>Success by task</h2>", f'<div class="charts">{"".join(charts)}</div>'] if charts else []


def _episodes_by_task(evaluation: Evaluation) -> dict[str, list[dict[str, Any]]]:
    """The episodes of an evaluation by the name of their task's success metric."""
    found: dict[str, list[dict[str, Any]]] = {}
    for episode in evaluation.episodes:
        found.setdefault(task_metric(episode["task"], "success_once"), []).append(episode)
    return found


def _success_series(train: Sequence[tuple[float, float]], evaluations: Sequence[Evaluation]) -> list[Series]:
    """Success of training episodes as a line, and of the evaluations that belong to a step as dots with intervals."""
    series = []
    if train:
        series.append(Series("training episodes", train))
    placed = [
        (float(e.step), Rate.of(episode["success_once"] for episode in e.episodes))
        for e in evaluations
        if e.step is not None and e.episodes
    ]
    if placed:
        points = [(step, rate.rate) for step, rate in placed]
        series.append(Series("evaluation, 95 % interval", points, [(rate.low, rate.high) for _, rate in placed]))
    return series


def _evaluations(evaluations: Sequence[Evaluation], out: Path) -> list[str]:
    if not evaluations:
        return []
    rows = {}
    for one in evaluations:
        step = "" if one.step is None else f"step {one.step}, "
        rows[f'{step}<a href="{_link(one.path, out)}">{escape(one.path.name)}</a>'] = one.episodes
    parts = ["<h2>Evaluations</h2>", _episode_table("evaluation", rows)]
    last = evaluations[-1]
    tasks = sorted({e["task"] for e in last.episodes})
    if len(tasks) > 1:
        by_task = {escape(task): [e for e in last.episodes if e["task"] == task] for task in tasks}
        parts += [f"<h2>By task, {escape(last.path.name)}</h2>", _episode_table("task", by_task)]
    if last.rates:
        counts = "".join(f"<tr><td>{escape(name)}</td><td>{rate}</td></tr>" for name, rate in last.rates.items())
        parts.append(f"<h2>The simulator's own measures, {escape(last.path.name)}</h2>")
        parts.append(f"<table><tr><th>measure</th><th>episodes</th></tr>{counts}</table>")
    return parts


def _episode_table(what: str, rows: dict[str, list[dict[str, Any]]]) -> str:
    """Counts, rates and intervals of the episodes in each row."""
    out = [
        f"<table><tr><th>{what}</th><th>success at any step</th><th>success at the end</th>"
        "<th class=num>mean steps</th><th class=num>starts</th></tr>"
    ]
    for name, episodes in rows.items():
        once, at_end = (Rate.of(e[key] for e in episodes) for key in ("success_once", "success_at_end"))
        steps = sum(e["steps"] for e in episodes) / max(len(episodes), 1)
        starts = len({(e["task"], e["reset_id"]) for e in episodes})
        numbers = f"<td class=num>{steps:.1f}</td><td class=num>{starts}</td>"
        out.append(f"<tr><td>{name}</td><td>{once}</td><td>{at_end}</td>{numbers}</tr>")
    return "".join(out) + "</table>"


def _curves(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A small chart per logged metric, in the order of the table; aliases, single tasks and timers have no chart."""
    out: list[str] = []
    logged = {name for row in rows for name in row} - CANONICAL.keys()
    for group in ("Training", "Rollout", "Environment"):
        charts = []
        for metric in GROUPS[group]:
            points = _points(rows, metric.name) if metric.name in logged else []
            if points:
                charts.append(curve_svg([Series(metric.name, points)], title=metric.name, width=400, height=220))
        if charts:
            out += [f"<h2>{group}</h2>", f'<div class="charts">{"".join(charts)}</div>']
    return out


def _times(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where an average step spends its seconds."""
    whole = _mean(rows, "time/step")
    if not whole:
        return []
    parts = {name: _mean(rows, f"time/{name}") for name in PHASES}
    parts["everything else"] = max(whole - sum(parts.values()), 0.0)
    out = ["<h2>Time</h2>", f"<p class=sub>{whole:.2f} s per training step on average</p>", "<table>"]
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds:
            share = seconds / whole
            meaning = METRICS[f"time/{name}"].meaning if name in PHASES else ""
            out.append(
                f"<tr><td>{escape(name)}</td><td class=num>{seconds:.2f} s</td><td class=num>{100 * share:.0f} %</td>"
                f'<td style="width: 240px"><i class="bar" style="width: {240 * min(share, 1):.0f}px"></i></td>'
                f"<td class=dim>{escape(meaning)}</td></tr>"
            )
    return [*out, "</table>"]


def _videos(run_dir: Path, out: Path) -> list[str]:
    """The newest videos, linked relative to the page."""
    paths = sorted(
        (p for p in run_dir.rglob("*.mp4") if not p.name.endswith(".part.mp4")),
        key=lambda p: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", str(p))],
    )
    if not paths:
        return []
    shown = paths[-MAX_VIDEOS:]
    figures = []
    for path in shown:
        link = _link(path, out)
        name = escape(path.relative_to(run_dir).as_posix())
        figures.append(
            f'<figure><video controls preload="metadata" src="{link}"></video><figcaption>{name}</figcaption></figure>'
        )
    more = f"<p class=sub>{len(paths)} videos, the last {len(shown)} shown</p>" if len(paths) > len(shown) else ""
    return ["<h2>Videos</h2>", more, f'<div class="charts">{"".join(figures)}</div>']


def _config(run_dir: Path) -> list[str]:
    path = run_dir / "config.yaml"
    if not path.exists():
        return []
    text = escape(redacted_text(path.read_text(encoding="utf-8", errors="replace")))
    return ["<h2>Config</h2>", f"<details><summary>config.yaml, resolved</summary><pre>{text}</pre></details>"]


def _link(path: Path, out: Path) -> str:
    """Relative to the page, so that the folder can be moved or zipped."""
    return escape(quote(Path(os.path.relpath(path, out.parent)).as_posix()))


def _points(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Mean over all training steps; a step without the phase spent nothing on it."""
    steps = [row for row in rows if "time/step" in row]
    return sum(row.get(name) or 0.0 for row in steps) / len(steps) if steps else 0.0
