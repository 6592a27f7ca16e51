"""Curves as plain SVG: no plotting library, no script, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { --ink: #1c2330; --dim: #667085; --rule: #e3e7ee; --paper: #ffffff; --card: #f7f8fa;
        --c0: #2563c9; --c1: #c2570c; --c2: #1d8a5f; --c3: #8a45b5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --dim: #98a2b3; --rule: #2f3644; --paper: #14181f; --card: #1b212b;
          --c0: #7aaaf7; --c1: #f0a060; --c2: #5fcf9f; --c3: #c79be8; } }
.chart { font-family: system-ui, sans-serif; }
.chart text { font-size: 12px; fill: var(--dim); }
.chart .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.chart .grid { stroke: var(--rule); }
"""
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 56, 18, 46, 38
MAX_POINTS = 1000
"""Points drawn per line; longer curves are thinned evenly, which no screen could tell apart."""


@dataclass(frozen=True)
class Series:
    """One line; `interval` (low and high per point) draws it as dots with error bars."""

    label: str
    points: Sequence[tuple[float, float]]  # x, y
    interval: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Axes:
    """Maps data to pixels of one chart."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int

    def x(self, value: float) -> float:
        low, high = self.x_range
        return MARGIN_LEFT + (value - low) / (high - low) * (self.width - MARGIN_LEFT - MARGIN_RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - MARGIN_BOTTOM - (value - low) / (high - low) * (self.height - MARGIN_TOP - MARGIN_BOTTOM)


def curve_svg(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "training step",
    percent: bool = False,
    width: int = 640,
    height: int = 300,
) -> str:
    """One chart; `percent` shows shares on a fixed axis of 0 to 100 %."""
    drawn = [_thin(s) for s in series if s.points]
    if not drawn:
        raise ValueError(f"chart {title!r} has no points")
    axes = Axes(_x_range(drawn), (0.0, 1.0) if percent else _y_range(drawn), width, height)
    body = [f'<text class="title" x="{MARGIN_LEFT}" y="18">{escape(title)}</text>', *_grid(axes, x_label, percent)]
    for index, one in enumerate(drawn):
        body += _line(axes, one, f"var(--c{index % 4})", percent)
    if len(drawn) > 1:
        body += _legend(drawn)
    about = f'role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {about}>{"".join(body)}</svg>'


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) from low to high."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _grid(axes: Axes, x_label: str, percent: bool) -> list[str]:
    right, bottom = axes.width - MARGIN_RIGHT, axes.height - MARGIN_BOTTOM
    out = []
    for tick in [0.0, 0.25, 0.5, 0.75, 1.0] if percent else nice_ticks(*axes.y_range):
        y = axes.y(tick)
        out.append(f'<line class="grid" x1="{MARGIN_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = f"{100 * tick:.0f} %" if percent else f"{tick:.4g}"
        out.append(f'<text x="{MARGIN_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in nice_ticks(*axes.x_range, count=6):
        if tick == int(tick):
            out.append(f'<text x="{axes.x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:.0f}</text>')
    out.append(f'<text x="{right}" y="{bottom + 32}" text-anchor="end">{escape(x_label)}</text>')
    return out


def _line(axes: Axes, series: Series, color: str, percent: bool) -> list[str]:
    spots = [(axes.x(x), axes.y(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    out = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8" stroke-linejoin="round"/>']
    for (x, _), (low, high) in zip(spots, series.interval, strict=bool(series.interval)):
        ends = f'y1="{axes.y(low):.1f}" y2="{axes.y(high):.1f}"'
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{color}" stroke-width="1.4"/>')
    if series.interval or len(spots) <= 60:
        radius = 3.5 if series.interval else 1.8
        for (x, y), (step, value) in zip(spots, series.points, strict=True):
            said = f"{100 * value:.1f} %" if percent else f"{value:.5g}"
            tip = f"<title>{escape(series.label)}, {step:g}: {said}</title>"
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}">{tip}</circle>')
    return out


def _legend(series: Sequence[Series]) -> list[str]:
    out, x = [], float(MARGIN_LEFT)
    for index, one in enumerate(series):
        out.append(f'<rect x="{x}" y="29" width="14" height="3" rx="1" fill="var(--c{index % 4})"/>')
        out.append(f'<text x="{x + 19}" y="35">{escape(one.label)}</text>')
        x += 36 + 6.6 * len(one.label)
    return out


def _thin(series: Series) -> Series:
    points = [p for p in series.points if math.isfinite(p[1])]
    if series.interval or len(points) <= MAX_POINTS:
        return Series(series.label, points if not series.interval else series.points, series.interval)
    stride = math.ceil(len(points) / MAX_POINTS)
    return Series(series.label, points[::stride] + points[-1:])


def _x_range(series: Sequence[Series]) -> tuple[float, float]:
    xs = [x for s in series for x, _ in s.points]
    return min(xs), max(max(xs), min(xs) + 1.0)


def _y_range(series: Sequence[Series]) -> tuple[float, float]:
    ys = [y for s in series for _, y in s.points] + [y for s in series for pair in s.interval for y in pair]
    low, high = min(ys), max(ys)
    pad = 0.06 * (high - low) or 0.5 * max(abs(high), 1e-6)
    return low - pad, high + pad
