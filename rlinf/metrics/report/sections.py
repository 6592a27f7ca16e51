"""The parts of a report that are text and tables: evaluations, time by phase, videos, config."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlinf.config.compose import ABSENT
from rlinf.metrics.names import METRICS
from rlinf.metrics.report.charts import REST, phase_seconds
from rlinf.metrics.report.config_changes import differences
from rlinf.metrics.report.run_files import Evaluation, RunFiles, Video
from rlinf.metrics.report.tags import bar, counted, div, folded, interval, swatch, table
from rlinf.metrics.stats import Rate
from rlinf.storage.redaction import redacted_text

EMBEDDED_VIDEO, EMBEDDED_VIDEOS = 600_000, 2_400_000  # bytes: of one, of all
MOST_LINKS = 200  # of videos that are named but not shown
SPEEDS = ("0.1", "0.25", "0.5", "1")  # of videos
Link = Callable[[Path], str]  # a file -> its address as seen from the page
EPISODE_HEAD = (
    "<th>success at any step</th><th class=interval></th><th>at the end</th>"
    "<th class=num>mean steps</th><th class=num>starts</th>"
)
OTHER_PROTOCOLS = (
    "<p class=note>These evaluations were played under different protocols (horizon, renderer, versions and the "
    "like): their numbers do not compare. <code>rlinf compare</code> names the keys.</p>"
)


def evaluations(runs: Sequence[RunFiles], link: Link) -> list[str]:
    """Every evaluation with counts and intervals; below, folded, its tasks and the benchmark's own numbers."""
    protocols = {one.protocol for run in runs for one in run.evaluations}
    rows, below = [], []
    for index, run in enumerate(runs):
        for one in run.evaluations:
            name = one.path.relative_to(run.folder).as_posix().removeprefix("eval/")
            policy = f'<td class="dim" title="{escape(one.policy)}">{escape(Path(one.policy).name)}</td>'
            cells = [
                _run_cell(index, run, runs),
                f"<td class=num>{'' if one.step is None else one.step}</td>",
                _episode_cells(one.episodes),
                f"<td><code>{escape(one.protocol[:8])}</code></td>" if len(protocols) > 1 else "",
                f'<td><a href="{escape(link(one.path))}">{escape(name)}</a></td>{policy}',
            ]
            rows.append(f"<tr>{''.join(cells)}</tr>")
            if inner := _by_task(one):
                label = f"by task: {run.name}, {name}" if len(runs) > 1 else f"by task: {name}"
                below.append(folded(f"eval-{index}-{name}", label, inner))
    if not rows:
        return []
    head = f"{_run_head(runs)}<th class=num>step</th>{EPISODE_HEAD}"
    head += f"{'<th>protocol</th>' if len(protocols) > 1 else ''}<th>file</th><th>policy</th>"
    return [OTHER_PROTOCOLS if len(protocols - {""}) > 1 else "", table(head, rows), *below]


def phase_table(runs: Sequence[RunFiles]) -> str:
    """Where an average step of each run spends its seconds, the longest phase first."""
    phases = [phase_seconds(run) for run in runs]
    names = sorted(
        {name for one in phases for name in one}, key=lambda name: -max(one.get(name, 0.0) for one in phases)
    )
    rows = []
    for name in names:
        cells = []
        for one in phases:
            share = one.get(name, 0.0) / (sum(one.values()) or 1.0)
            cells.append(f"<td class=num>{one.get(name, 0.0):.2f} s</td><td class=num>{100 * share:.0f} %</td>")
            cells.append(f"<td>{bar(share)}</td>")
        meaning = "" if name == REST else METRICS[f"time/{name}"].meaning
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}<td class=dim>{escape(meaning)}</td></tr>")
    heads = [f"{swatch(i)}{escape(run.name)}" if len(runs) > 1 else "per step" for i, run in enumerate(runs)]
    return table(f"<th>phase</th>{''.join(f'<th colspan=3>{head}</th>' for head in heads)}<th></th>", rows)


def videos(runs: Sequence[RunFiles], link: Link, *, embeds: bool) -> list[str]:
    """Of each run the first and the last recording of its evaluations and of training, labelled; the rest by name.

    With `embeds`, small recordings become a part of the page; others are linked.
    """
    figures, others, room = [], [], EMBEDDED_VIDEOS if embeds else 0
    for index, run in enumerate(runs):
        chosen = _before_and_after(run)
        for label, video in chosen.items():
            size = video.path.stat().st_size
            inside = size <= min(EMBEDDED_VIDEO, room)
            room -= size if inside else 0
            source = _data_address(video.path) if inside else link(video.path)
            figures.append(
                f'<figure><video controls loop muted playsinline preload="metadata" src="{escape(source)}"></video>'
                f"<figcaption><b>{who(index, run, runs)}{escape(label)}</b> {_file_link(video.path, run, link)}"
                "</figcaption></figure>"
            )
        others += [(run, video.path) for video in run.videos if video not in chosen.values()]
    if not figures:
        return []
    speeds = "".join(f'<button type="button" data-speed="{speed}">{speed}×</button>' for speed in SPEEDS)
    rest = "".join(f"<li>{_file_link(path, run, link, named=len(runs) > 1)}</li>" for run, path in others[-MOST_LINKS:])
    more = folded("other-videos", counted(len(others), "other recording"), f"<ul>{rest}</ul>") if others else ""
    return [f'<p class="speeds" hidden>speed {speeds}</p>', div("videos", *figures), more]


def config(runs: Sequence[RunFiles]) -> list[str]:
    """What each run changed of its recipe, what differs between the runs, and the configs whole."""
    out = []
    for index, run in enumerate(runs):
        if run.changes is None:
            continue
        recipe, of = f"<code>{escape(run.changes.recipe)}</code>", who(index, run, runs)
        rows = [_key_row(key, values) for key, values in run.changes.keys.items()]
        if rows:
            out.append(f"<h3>{of}changed from the recipe {recipe}</h3>")
            out.append(table("<th>key</th><th>recipe</th><th>this run</th>", rows))
        else:
            out.append(f"<p>{of}as the recipe {recipe} is, but for the run's folder</p>")
    if len(runs) > 1:
        rows = [_key_row(key, values) for key, values in differences([run.config for run in runs]).items()]
        head = "".join(f"<th>{swatch(index)}{escape(run.name)}</th>" for index, run in enumerate(runs))
        out += ["<h3>different between the runs</h3>" if rows else "", table(f"<th>key</th>{head}", rows)]
    for index, run in enumerate(runs):
        if run.config is not None:
            label = "config.yaml, resolved" if len(runs) == 1 else f"{run.name}: config.yaml, resolved"
            out.append(folded(f"config-{index}", label, f"<pre>{escape(redacted_text(run.config))}</pre>"))
    return out


def who(index: int, run: RunFiles, runs: Sequence[RunFiles]) -> str:
    """`■ name: ` where there are several runs."""
    return f"{swatch(index)}{escape(run.name)}: " if len(runs) > 1 else ""


def at_step(one: Evaluation) -> str:
    """`, step 40` where the evaluation belongs to one."""
    return "" if one.step is None else f", step {one.step}"


def text_of(value: Any) -> str:
    """A value of a config or summary as a person would write it."""
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _run_head(runs: Sequence[RunFiles]) -> str:
    return "<th>run</th>" if len(runs) > 1 else ""


def _run_cell(index: int, run: RunFiles, runs: Sequence[RunFiles]) -> str:
    return f"<td>{swatch(index)}{escape(run.name)}</td>" if len(runs) > 1 else ""


def _episode_cells(episodes: Sequence[Mapping[str, Any]]) -> str:
    """Counts, rates and intervals of episodes: the cells under EPISODE_HEAD."""
    once, at_end = (Rate.of(e[key] for e in episodes) for key in ("success_once", "success_at_end"))
    steps = sum(e["steps"] for e in episodes) / max(len(episodes), 1)
    starts = len({(str(e["task"]), str(e["reset_id"])) for e in episodes})
    return (
        f"<td>{once}</td><td>{interval(once)}</td><td>{at_end}</td>"
        f"<td class=num>{steps:.1f}</td><td class=num>{starts}</td>"
    )


def _by_task(one: Evaluation) -> str:
    """Success by task and by group, and what the benchmark itself publishes."""
    out, tasks = [], one.by_task()
    if len(tasks) > 1:
        rows = [f"<tr><td>{escape(name)}</td>{_episode_cells(episodes)}</tr>" for name, episodes in tasks.items()]
        out.append(table(f"<th>task</th>{EPISODE_HEAD}", rows))
    for title, rates in (("group of tasks", one.groups), ("the simulator's own measure", one.rates)):
        rows = [f"<tr><td>{escape(k)}</td><td>{rate}</td><td>{interval(rate)}</td></tr>" for k, rate in rates.items()]
        out.append(table(f"<th>{title}</th><th>episodes</th><th class=interval></th>", rows))
    if one.table:
        rows = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in one.table["rows"]]
        head = "".join(f"<th>{escape(name)}</th>" for name in one.table["columns"])
        out.append(f"<h3>{escape(one.table['title'])}</h3>{table(head, rows)}")
    return "".join(out)


def _before_and_after(run: RunFiles) -> dict[str, Video]:
    """Label -> recording: the first and the last of the evaluations, then of training."""
    chosen: dict[str, Video] = {}
    known = sorted((v for v in run.videos if v.evaluation), key=lambda v: (v.evaluation and v.evaluation.step) or 0)
    of_steps = {at_step(video.evaluation): video for video in reversed(known) if video.evaluation}
    kinds = {
        "evaluation": [*reversed(of_steps.values())] or [v for v in run.videos if not v.training],
        "training": [v for v in run.videos if v.training and not v.evaluation],
    }
    for kind, found in kinds.items():
        whens = [("before: ", ", first recording"), ("after: ", ", last recording")] if len(found) > 1 else [("", "")]
        for (when, order), video in zip(whens, [*found[:1], *found[1:][-1:]], strict=bool(found)):
            one = video.evaluation
            chosen[f"{when}{kind}{f'{at_step(one)}, success {one.success}' if one else order}"] = video
    return chosen


def _file_link(path: Path, run: RunFiles, link: Link, *, named: bool = False) -> str:
    """A link to a file of a run by its path below the run's folder, `named` with the run's name."""
    name = path.relative_to(run.folder).as_posix()
    return f'<a class="dim" href="{escape(link(path))}">{escape(f"{run.name}/{name}" if named else name)}</a>'


def _key_row(key: str, values: Iterable[Any]) -> str:
    shown = ("" if value is ABSENT else redacted_text(text_of(value)) for value in values)
    cells = "".join(f'<td class="value"><code>{escape(text)}</code></td>' for text in shown)
    return f"<tr><td><code>{escape(key)}</code></td>{cells}</tr>"


def _data_address(path: Path) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
