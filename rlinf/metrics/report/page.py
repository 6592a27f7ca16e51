"""Runs -> the HTML of their report. Text is escaped here; charts are drawn by page.js from values in the page.

The page loads nothing: its Content-Security-Policy allows its scripts and its style by their hashes, and videos that
lie beside it or inside it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.metrics.report.charts import Chart, constant_of, make_charts
from rlinf.metrics.report.run_files import RunFiles
from rlinf.metrics.report.sections import Link, at_step, config, evaluations, phase_table, text_of, videos, who
from rlinf.metrics.report.tags import counted, div, interval, part, swatch
from rlinf.metrics.stats import Rate
from rlinf.storage.redaction import redacted_text

GENERATOR = "rlinf report"
WIDE = ("Success", "Success by task", "Time")  # sections with large charts


def make_page(runs: Sequence[RunFiles], *, link: Link, live: bool = False) -> str:
    """The whole page; `link` addresses a file, `live` makes it ask its server for a newer one and embeds no video."""
    made = make_charts(runs)
    constant = {
        section: {c["title"]: v for c in of if (v := constant_of(c)) is not None} for section, of in made.items()
    }
    charts = {section: [c for c in of if c["title"] not in constant[section]] for section, of in made.items()}
    ids = {section: [f"{section}-{i}" for i in range(len(found))] for section, found in charts.items()}
    flat = dict(zip(chain(*ids.values()), chain(*charts.values()), strict=True))

    def drawn(section: str) -> str:
        kind = "wide" if section in WIDE else "small"
        figures = (_placeholder(id_, flat[id_], runs) for id_ in ids.get(section, ()))
        return div(f"charts {kind}", *figures) + _constants(constant.get(section, {}))

    parts = [
        part("Success", drawn("Success")) if "Success" in charts else "",
        part("Evaluations", *evaluations(runs, link)),
        part("Success by task", drawn("Success by task")) if "Success by task" in charts else "",
        part("Videos", *videos(runs, link, embeds=not live)),
        part("Time", phase_table(runs), drawn("Time")) if "Time" in charts else "",
        *(part(name, drawn(name)) for name in charts if name not in WIDE),
        part("Config", *config(runs)),
    ]
    body = [_head(runs), _controls(runs, live), "<main>", *parts, "</main>"]
    data = {"runs": [run.name for run in runs], "live": live, "charts": flat}
    title = runs[0].name if len(runs) == 1 else ", ".join(run.name for run in runs)
    return _document(title, [run.identity for run in runs], "\n".join(part for part in body if part), data, live)


def policy_of(page_scripts: Sequence[str], style: str, *, live: bool) -> str:
    """The Content-Security-Policy of a page: these scripts and this style, videos of its own place, nothing else."""
    scripts = " ".join(f"'{_hash(script)}'" for script in page_scripts)
    asks = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src {scripts}; style-src '{_hash(style)}'; media-src 'self' file: data:; "
        f"{asks}img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def page_code() -> tuple[tuple[str, str], str]:
    """The scripts (uPlot's, then the page's) and the style (likewise)."""
    try:
        library = importlib.metadata.distribution("uplot-python")
        plots, looks = (
            Path(str(library.locate_file(f"uplot/static/{name}"))).read_text(encoding="utf-8")
            for name in ("uPlot.iife.js", "uPlot.min.css")
        )
    except (importlib.metadata.PackageNotFoundError, OSError) as error:
        raise UserError(
            f"report.html draws with uPlot, which the package uplot-python brings: pip install uplot-python ({error})"
        ) from error
    here = Path(__file__).parent
    own, style = ((here / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    for text in (plots, own):
        if "</script" in text or "<!--" in text:
            raise ValueError("a script that holds </script or <!-- cannot stand in a page")
    return (plots, own), looks + style


def _document(title: str, identities: Sequence[str], body: str, data: Mapping[str, Any], live: bool) -> str:
    scripts, style = page_code()
    values = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy_of(scripts, style, live=live)}">',
            f'<meta name="generator" content="{GENERATOR}">',
            f'<meta name="rlinf-runs" content="{escape(" ".join(identities))}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            body,
            "<noscript><p>The charts need JavaScript; the numbers and tables do without.</p></noscript>",
            f'<script type="application/json" id="data">{values}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _head(runs: Sequence[RunFiles]) -> str:
    """Each run's name, state and length, and its success before anything else."""
    title = f"<h1>{escape(runs[0].name)}</h1>" if len(runs) == 1 else f"<h1>{len(runs)} runs</h1>"
    blocks = []
    for index, run in enumerate(runs):
        minutes = sum(value for _, value in run.points("time/step")) / 60
        facts = [run.state]
        if run.record.get("kind") != "eval":
            facts += [counted(run.steps, "training step"), f"{minutes:.1f} min of training"]
        name = f"<h2>{swatch(index)}{escape(run.name)}</h2>" if len(runs) > 1 else ""
        said = " · ".join(escape(fact) for fact in facts if fact)
        cards = [_card(label, rate) for label, rate in _headlines(run).items()]
        blocks.append(
            div("run", name, f'<p class="sub">{said}</p>', div("cards", *cards), *_plain_summary(run), _origin(run))
        )
    return f'<header data-part="head">{title}{div("runs", *blocks)}</header>'


def _headlines(run: RunFiles) -> dict[str, Rate]:
    """The rates to show first: of the summary, else of the first and the last evaluation; then of training."""
    found = {name: rate for name, value in run.summary.items() if (rate := _rate(value))}
    played = [one for one in run.evaluations if one.episodes]
    played = [one for one in played if one.is_of_curve] or played
    if played and not found:
        shown = {f"evaluation{at_step(one)}": one.success for one in (played[0], played[-1])}
        found = shown if len(shown) > 1 else {f"evaluation{at_step(played[-1])}": played[-1].success}
    rates = _training_rates(run)
    for step in dict.fromkeys([*rates][:1] + [*rates][-1:]):
        found[f"training, step {step}"] = rates[step]
    return found


def _rate(value: Any) -> Rate | None:
    """The rate that an object with successes and trials stands for, if it is one."""
    try:
        return Rate(value["successes"], value["trials"])
    except (KeyError, TypeError, ValueError):
        return None


def _training_rates(run: RunFiles) -> dict[int, Rate]:
    """Step -> counted successes of the training episodes that ended in it."""
    episodes = {step: round(count) for step, count in run.points("env/num_trajectories") if count > 0}
    return {
        step: Rate(min(round(share * episodes[step]), episodes[step]), episodes[step])
        for step, share in run.points("env/success_once")
        if step in episodes
    }


def _plain_summary(run: RunFiles) -> list[str]:
    plain = {k: v for k, v in run.summary.items() if isinstance(v, int | float | str) and not isinstance(v, bool)}
    if not plain:
        return []
    return [f'<p class="sub">{" · ".join(escape(f"{name}: {text_of(value)}") for name, value in plain.items())}</p>']


def _origin(run: RunFiles) -> str:
    """The id of the run and where it was last started: command, commit, machine."""
    if "id" not in run.record:
        return ""
    starts = run.record.get("starts")
    last = starts[-1] if isinstance(starts, list) and starts and isinstance(starts[-1], dict) else {}
    gpus = last.get("gpus") if isinstance(last.get("gpus"), list) else []
    told = {
        "run": run.record["id"],
        "started": last.get("at"),
        "on": last.get("host"),
        "with": ", ".join(map(str, gpus or [])),
        "commit": str(last.get("commit") or "")[:12],
    }
    said = " · ".join(escape(f"{name} {value}") for name, value in told.items() if value)
    command = escape(redacted_text(str(last.get("command") or "")))
    return f'<p class="sub">{said}</p>' + (f'<pre class="command">{command}</pre>' if command else "")


def _card(label: str, rate: Rate) -> str:
    number = f"<b>{100 * rate.rate:.1f} %</b>" if rate.trials else "<b>no trials</b>"
    counts = f"{rate.successes} of {rate.trials}, 95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f} %"
    return div("card", f"<span>{escape(label)}</span>", number, interval(rate), f"<span>{counts}</span>")


def _controls(runs: Sequence[RunFiles], live: bool) -> str:
    """What acts on all charts; shown once the script runs."""
    chips = [
        f'<label class="chip">{swatch(i)}<input type="checkbox" data-run="{i}" checked>{escape(run.name)}</label>'
        for i, run in enumerate(runs)
    ]
    slider = (
        '<label class="slider">smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0.6">'
        '<output id="smoothed">0.60</output></label>'
    )
    status = '<span id="live" class="live" role="status">live</span>' if live else ""
    reset = '<button id="reset" type="button" hidden>show all steps</button>'
    hint = '<span class="hint">drag across a chart to zoom, double-click to see all; on a phone pinch</span>'
    shown = [*(chips if len(runs) > 1 else ()), slider, reset, status, hint]
    return f'<div class="bar" id="controls" hidden>{"".join(shown)}</div>'


def _constants(values: Mapping[str, float]) -> str:
    """Metrics that never changed, in a line instead of a chart each."""
    said = ", ".join(f"<code>{escape(name)}</code> {value:g}" for name, value in values.items())
    return f'<p class="sub">the same in every step: {said}</p>' if said else ""


def _placeholder(id_: str, chart: Chart, runs: Sequence[RunFiles]) -> str:
    """Where the script draws a chart; its heading is here for those who do without it."""
    of = who(chart["run"], runs[chart["run"]], runs) if "run" in chart else ""
    about = f' <span class="about">{escape(chart["about"])}</span>' if chart.get("about") else ""
    unit = chart.get("unit")
    of_unit = f' <span class="about">in {escape(unit)}</span>' if unit and unit not in ("1", "share") else ""
    size = "large" if chart.get("large") else ""
    heading = f"<h3>{of}{escape(chart['title'])}{of_unit}{about}</h3>"
    return f'<figure class="chart {size}" data-chart="{escape(id_)}">{heading}<div class="plot"></div></figure>'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
