"""Pieces of HTML that several parts of a report are made of. What is inserted must be escaped already."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlinf.metrics.stats import Rate

COLOURS = 8  # of runs, in page.css


def part(title: str, *inner: str) -> str:
    """A section of the page; empty where there is nothing in it."""
    text = "".join(inner)
    return f'<section data-part="{escape(title)}"><h2>{escape(title)}</h2>{text}</section>' if text else ""


def div(kind: str, *inner: str) -> str:
    """A block of a class of page.css; empty where there is nothing in it."""
    text = "".join(inner)
    return f'<div class="{kind}">{text}</div>' if text else ""


def table(head: str, rows: Sequence[str]) -> str:
    """A table that scrolls by itself on a narrow screen; empty without rows."""
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>' if rows else ""


def folded(id_: str, summary: str, inner: str) -> str:
    """What is shown on a click; the id lets a live page keep it open."""
    return f'<details id="{escape(id_)}"><summary>{escape(summary)}</summary>{inner}</details>'


def swatch(run: int) -> str:
    """A square in the colour of a run."""
    return f'<i class="swatch run{run % COLOURS}"></i>'


def interval(rate: Rate) -> str:
    """A rate on a line from 0 to 100 % with its interval."""
    low, high, at = (f"{100 * value:.1f}" for value in (rate.low, rate.high, rate.rate))
    return (
        '<svg class="interval" viewBox="-3 0 106 10" preserveAspectRatio="xMinYMid" aria-hidden="true">'
        '<line class="axis" x1="0" x2="100" y1="5" y2="5"/>'
        f'<line class="range" x1="{low}" x2="{high}" y1="5" y2="5"/><circle cx="{at}" cy="5" r="3"/></svg>'
    )


def bar(share: float) -> str:
    """A bar of a length from 0 to 1."""
    width = f"{100 * min(share, 1):.1f}"
    shape = f'<rect width="{width}" height="10"/>'
    return f'<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{shape}</svg>'


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`, `no steps`."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
