"""What a person sees while a run trains: a progress bar with ETA and, per step, the table also kept in metrics.log.

Log parsers rely on `Global Step:  n/N` and on `name=value` without spaces, so both stay as they are.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from rlinf.metrics.phases import stragglers

WIDTH = 120
BAR = 40
COLUMNS = 3
SECTIONS = {"Time": "time/", "Environment": "env/", "Rollout": "rollout/", "Evaluation": "eval/", "Training": "train/"}
PHASES = ("sync_weights", "offload", "generate_rollouts", "cal_adv_and_returns", "actor_training", "eval", "save")


class RunConsole:
    """Shows each finished step; a live bar on a terminal, plain text everywhere else."""

    def __init__(
        self, log_path: Path, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        stream = stream or sys.stdout
        log_path.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._first = self._total = 0
        self._began = self._last = clock()
        self._file = (log_path / "metrics.log").open("a", encoding="utf-8")
        self._log = Console(file=self._file, width=WIDTH, force_terminal=False, color_system=None)
        self._screen = Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR),
            MofNCompleteColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=self._screen,
            disable=not stream.isatty(),
        )

    def start(self, first_step: int, total_steps: int) -> None:
        """Show the bar; `first_step` steps were done by an earlier run."""
        self._first, self._total = first_step, total_steps
        self._began = self._last = self._clock()
        self._task = self._progress.add_task("training", total=total_steps, completed=first_step, eta="-:--:--")
        self._progress.start()

    def say(self, line: str) -> None:
        """A line of its own, above the bar and in metrics.log."""
        self._screen.print(line, markup=False, soft_wrap=True)
        self._log.print(line, markup=False, highlight=False, soft_wrap=True)
        self._file.flush()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the step that just finished; `step` counts finished steps, so the last one is N."""
        now = self._clock()
        elapsed, step_seconds, self._last = now - self._began, now - self._last, now
        total = max(self._total, step)  # an evaluation alone has no total
        eta = elapsed / max(step - self._first, 1) * (total - step)
        panel = metric_table(step, total, metrics, elapsed=elapsed, eta=eta, step_seconds=step_seconds)
        self._screen.print(panel)
        self._log.print(panel)
        self._file.flush()
        if self._progress.tasks:
            self._progress.update(self._task, completed=step, eta=_clock_text(eta))

    def stop(self) -> None:
        """Take the bar away and close metrics.log."""
        self._progress.stop()
        self._file.close()


def metric_table(
    step: int, total: int, metrics: Mapping[str, float], *, elapsed: float, eta: float, step_seconds: float
) -> RenderableType:
    """The table of one step: position, then Time, Bytes, Environment, Rollout, Evaluation, Training."""
    filled = BAR * step // total if total else BAR
    head = Text.assemble(
        ("Global Step:  ", "bold"),
        (f"{step}/{total}", "bold cyan"),
        f"  [{'#' * filled}{'-' * (BAR - filled)}]",
        f"  elapsed {_clock_text(elapsed)}  ETA {_clock_text(eta)}  step {step_seconds:.2f} s",
    )
    parts: list[RenderableType] = [head]
    if (line := bottleneck(metrics)) is not None:
        parts.append(Text(line, style="dim"))
    for title, prefix in SECTIONS.items():
        own = {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}
        parts += _section(title, {n: v for n, v in own.items() if _is_shown(title, n)})
        if title == "Time":
            parts += _section("Bytes", {n.removesuffix("/bytes"): v for n, v in metrics.items() if "/bytes" in n and v})
        if title == "Evaluation":
            parts += _section("Evaluation: success_once by task", _by_task(own))
    return Panel(Group(*parts), title="Metric Table")


def bottleneck(metrics: Mapping[str, float]) -> str | None:
    """Which phase took most of the step, e.g. `Bottleneck: generate_rollouts 2.1 s of 3.4 s (62 %)`; who lags."""
    phases = {name: metrics[f"time/{name}"] for name in PHASES if f"time/{name}" in metrics}
    if not phases or not metrics.get("time/step"):
        return None
    name = max(phases, key=lambda phase: phases[phase])
    whole = metrics["time/step"]
    line = f"Bottleneck: {name} {phases[name]:.1f} s of {whole:.1f} s ({100 * phases[name] / whole:.0f} %)"
    return "; ".join([line, *(f"straggler {rank}" for rank in stragglers(metrics))])


def _is_shown(title: str, name: str) -> bool:
    """Single tasks and single phases of workers go to the loggers only."""
    if title == "Time":
        return "/" not in name or name.endswith("/busy")
    return not name.startswith("task/")


def _by_task(own: Mapping[str, float]) -> dict[str, float]:
    ends = ("task/", "/success_once")
    return {n[len(ends[0]) : -len(ends[1])]: v for n, v in own.items() if n.startswith(ends[0]) and n.endswith(ends[1])}


def _section(title: str, metrics: Mapping[str, float]) -> list[RenderableType]:
    if not metrics:
        return []
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(COLUMNS):
        grid.add_column(ratio=1, overflow="fold")
    cells = [Text.assemble(name, "=", (_value_text(value), "bold")) for name, value in metrics.items()]
    for i in range(0, len(cells), COLUMNS):
        grid.add_row(*cells[i : i + COLUMNS])
    return [Text(title, style="bold green"), grid]


def _value_text(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def _clock_text(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
