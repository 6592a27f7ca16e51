"""The curve of a row of results as an SVG file: training episodes of each seed, and its evaluations with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlinf.results.headline import Headline, Measured, TrainedSeed

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 622, 46, 262  # of the plot, pixels
COLOURS = (
    ("#2563c9", "#7aaaf7"),
    ("#c2570c", "#f0a060"),
    ("#1d8a5f", "#5fcf9f"),
    ("#8a45b5", "#c79be8"),
)  # light, dark
_STYLE = """<style>
:root { --ink: #1c2330; --dim: #667085; --rule: #e3e7ee; --paper: #ffffff; %s }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --rule: #2f3644; --paper: #14181f; %s } }
text { font: 12px system-ui, sans-serif; fill: var(--dim); }
.title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.grid { stroke: var(--rule); }
</style>"""


def draw_curve(headline: Headline) -> str:
    """The SVG text; the same numbers give the same text."""
    measured = [m for run in headline.seeds for m in (run.before, run.after) if m is not None]
    is_share = all(m.number == "success" for m in measured)
    last = max(run.steps for run in headline.seeds)
    curves = [value for run in headline.seeds if run.curve_number is None for _, value in run.curve]
    top = 1.0 if is_share else _ceiling([*(m.high for m in measured), *curves])
    has_shares = not is_share and any(run.curve_number == "success" for run in headline.seeds)
    what = "success" if is_share else measured[0].number
    light, dark = ("".join(f"--c{i}: {pair[k]}; " for i, pair in enumerate(COLOURS)) for k in (0, 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(headline.name)}: {escape(what)} over training steps">',
        _STYLE % (light, dark),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>',
        f'<text class="title" x="{LEFT}" y="18">{escape(f"{headline.name}: {what}, {headline.suite}")}</text>',
        *_axes(last, top, is_share=is_share, has_shares=has_shares),
    ]
    x = LEFT
    for index, run in enumerate(headline.seeds):
        colour, label = f"var(--c{index % len(COLOURS)})", f"seed {run.seed}"
        shift = 5 * (index - (len(headline.seeds) - 1) / 2)  # pixels by which dots of several seeds stand apart
        parts += [
            *_seed(run, last, top, colour, shift),
            f'<rect x="{x}" y="29" width="14" height="3" fill="{colour}"/>',
        ]
        parts.append(f'<text x="{x + 19}" y="35">{label}</text>')
        x += 80
    lines = "line: success of training episodes, right" if has_shares else "line: training episodes"
    told = f"{lines}, dots: evaluations" if any(run.curve for run in headline.seeds) else "evaluations"
    parts.append(f'<text x="{x}" y="35">{told}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axes(last: int, top: float, *, is_share: bool, has_shares: bool) -> list[str]:
    """Lines and numbers; `has_shares` adds a scale in per cent at the right."""
    parts = []
    for quarter in range(5):
        value = top * quarter / 4
        y = _y(value, top)
        text = f"{100 * value:.0f} %" if is_share else f"{value:g}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 14}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        if has_shares:
            parts.append(f'<text x="{WIDTH - 2}" y="{y - 4:.1f}" text-anchor="end">{25 * quarter} %</text>')
    for quarter in range(5):
        step = round(last * quarter / 4)
        parts.append(f'<text x="{_x(step, last):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{step}</text>')
    return [*parts, f'<text x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">training step</text>']


def _seed(run: TrainedSeed, last: int, top: float, colour: str, shift: float) -> list[str]:
    scale = 1.0 if run.curve_number == "success" else top
    line = " ".join(f"{_x(step, last):.1f},{_y(value, scale):.1f}" for step, value in run.curve)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>'] if run.curve else []
    ends = [(run.before, 0), (run.after, run.steps)]  # an evaluation may not know its step
    dots = [(m, _x(m.step or step, last)) for m, step in ends if m is not None]
    return parts + [part for m, x in dots for part in _dot(m, x + shift, top, colour)]


def _dot(measured: Measured, x: float, top: float, colour: str) -> list[str]:
    low, y, high = (_y(value, top) for value in (measured.low, measured.value, measured.high))
    return [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="1.4"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>',
    ]


def _x(step: float, last: int) -> float:
    return LEFT + (RIGHT - LEFT) * min(step, last) / max(last, 1)


def _y(value: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * min(max(value, 0.0), top) / top


def _ceiling(values: Sequence[float]) -> float:
    """A round number that no value exceeds: 1, 2, 4 or 5 times a power of ten."""
    most = max(values, default=1.0)
    scale = 10.0 ** (len(str(int(most))) - 1) if most >= 1 else 1.0
    return next(scale * factor for factor in (1, 2, 4, 5, 10) if scale * factor >= most)
