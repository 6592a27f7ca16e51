"""What a person sees while a run works: a line per step, progress bars, and the table also kept in metrics.log.

Log parsers rely on `Global Step:  n/N` and on `name=value` without spaces in the table, so both stay as they are.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from io import FileIO, StringIO
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from rlinf.metrics.phases import stragglers
from rlinf.progress import listening

WIDTH = 120  # characters of metrics.log, and of a stdout that is no terminal
CELL = 36  # characters that a metric of the table needs
BAR, SHORT_BAR = 40, 16  # of a wide terminal, and of one below 100 characters
PLAIN_INTERVAL_S = 20.0  # between lines about progress where there is no terminal
SECTIONS = {"Time": "time/", "Environment": "env/", "Rollout": "rollout/", "Evaluation": "eval/", "Training": "train/"}
PHASES = ("sync_weights", "offload", "generate_rollouts", "cal_adv_and_returns", "actor_training", "eval", "save")
# What the line of a step adds as far as the terminal is wide, most important first: label, metric, format.
EXTRAS = (
    ("", "time/step", "{:5.2f} s/step"),
    ("return", "env/return", "{:7.3f}"),
    ("kl", "train/actor/approx_kl", "{:8.4f}"),
    ("length", "env/episode_len", "{:6.1f}"),
    ("clipped", "train/actor/clip_fraction", "{:5.3f}"),
    ("gradient", "train/actor/grad_norm", "{:7.3f}"),
    ("explained", "train/critic/explained_variance", "{:6.2f}"),
)


class Bars:
    """Progress bars at the bottom of a terminal; elsewhere a plain line every PLAIN_INTERVAL_S seconds."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        stream = stream or sys.stdout
        self.live = stream.isatty()
        self.screen = Console(file=stream, width=None if self.live else WIDTH, highlight=False)
        self._clock, self._said = clock, clock()
        self._work: TaskID | None = None
        self._began = clock()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(min_width=24)),
            BarColumn(bar_width=bar_width(self.screen.width)),
            MofNCompleteColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=self.screen,
            transient=True,
            disable=not self.live,
        )

    def add(self, what: str, done: int, total: int) -> TaskID:
        """Show a new bar."""
        self._progress.start()
        return self._progress.add_task(what, total=total, completed=done, eta="-:--:--")

    def update(self, bar: TaskID, done: int, eta: float) -> None:
        """Move a bar; `eta` in seconds."""
        self._progress.update(bar, completed=done, eta=clock_text(eta))

    def show(self, what: str, done: int, total: int) -> None:
        """Show the bar of the work that is reported; at its end it goes away."""
        if self._work is None:
            self._work, self._began = self.add(what, done, total), self._clock()  # short work says nothing
        elapsed = self._clock() - self._began
        eta = clock_text(elapsed / done * (total - done)) if done else "-:--:--"
        self._progress.update(self._work, description=what, completed=done, total=total, eta=eta)
        if done >= total:
            self._progress.remove_task(self._work)
            self._work = None
        elif not self.live and self._clock() - max(self._said, self._began) >= PLAIN_INTERVAL_S:
            self._said = self._clock()
            self.screen.print(f"{what}: {done}/{total}  ETA {eta}", markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()


@contextmanager
def showing_progress(stream: TextIO | None = None) -> Iterator[None]:
    """Bars for what the block reports (`rlinf.progress`); what it prints appears above them."""
    bars = Bars(stream)
    try:
        with listening(bars.show):
            yield
    finally:
        bars.stop()


class RunConsole:
    """Shows a line for each finished step above a bar, and the full table every `table_interval` steps; -1 never."""

    def __init__(
        self,
        log_path: Path,
        *,
        table_interval: int = -1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._table_interval = clock, table_interval
        self._first = self._total = 0
        self._began = self._last = clock()
        self._log_path = log_path / "metrics.log"
        self._file: FileIO | None = None  # once the run has begun
        self._bars = Bars(stream, clock=clock)
        self._training: TaskID | None = None
        self._open = ExitStack()
        self._open.callback(self._bars.stop)
        self._open.enter_context(listening(self._bars.show))

    def open(self) -> None:
        """Write to metrics.log from here on; until then its folder is not touched."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._log_path.open("ab", buffering=0)

    def start(self, first_step: int, total_steps: int) -> None:
        """Show the bar; `first_step` steps were done by an earlier run."""
        self._first, self._total = first_step, total_steps
        self._began = self._last = self._clock()
        self._training = self._bars.add("training", first_step, total_steps)

    def say(self, line: str) -> None:
        """A line of its own, above the bar and in metrics.log."""
        self._bars.screen.print(line, markup=False, soft_wrap=True)
        self._write(line)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the step that just finished; `step` counts finished steps, so the last one is N."""
        now = self._clock()
        elapsed, step_seconds, self._last = now - self._began, now - self._last, now
        total = max(self._total, step)  # an evaluation alone has no total
        eta = elapsed / max(step - self._first, 1) * (total - step)

        def table(width: int) -> RenderableType:
            times = {"elapsed": elapsed, "eta": eta, "step_seconds": step_seconds}
            return metric_table(step, total, metrics, width=width, **times)

        screen = self._bars.screen
        screen.print(step_line(step, total, metrics, eta=eta, width=screen.width), soft_wrap=True)
        if self._table_interval > 0 and step % self._table_interval == 0:
            screen.print(table(screen.width))
        self._write(table(WIDTH))
        if self._training is not None:
            self._bars.update(self._training, step, eta)

    def stop(self) -> None:
        """Take the bars away and close metrics.log."""
        self._open.close()
        if self._file is not None:
            self._file.close()

    def _write(self, text: RenderableType) -> None:
        """Add to metrics.log; once that fails it is left alone, for nothing but people reads it."""
        if self._file is None:
            return
        plain = Console(file=StringIO(), width=WIDTH, force_terminal=False, color_system=None)
        with plain.capture() as printed:
            plain.print(text, markup=False, highlight=False, soft_wrap=isinstance(text, str))
        try:
            self._file.write(printed.get().encode())
        except OSError as error:
            self._file.close()
            self._file = None
            self.say(f"warning: {self._log_path} cannot be written ({error.strerror}); the run goes on without it")


def step_line(step: int, total: int, metrics: Mapping[str, float], *, eta: float, width: int) -> Text:
    """The line of one step, at most `width` wide: success of its episodes, position, ETA, and more where it fits.

    Example: success  62.5 %  step 12/40  ETA 0:00:59    2.10 s/step  return   0.612
    """
    success = metrics.get("env/success_once", metrics.get("eval/success_once"))
    rate = f"{100 * success:5.1f} %" if success is not None else "      -"  # no episode ended in this step
    position = f"step {step:>{len(str(total))}}/{total}"
    line = Text.assemble("success ", (rate, "bold green"), "  ", (position, "bold"), f"  ETA {clock_text(eta)}")
    for label, name, form in EXTRAS:
        if name in metrics:
            part = "  " + " ".join(filter(None, (label, form.format(metrics[name]))))
            if len(line) + len(part) > width:
                break
            line.append(part, "dim")
    return line


def metric_table(
    step: int, total: int, metrics: Mapping[str, float], *, elapsed: float, eta: float, step_seconds: float, width: int
) -> RenderableType:
    """The table of one step: position, then Time, Bytes, Environment, Rollout, Evaluation, Training."""
    bar = bar_width(width)
    filled = bar * step // total if total else bar
    head = Text.assemble(
        ("Global Step:  ", "bold"),
        (f"{step}/{total}", "bold cyan"),
        f"  [{'#' * filled}{'-' * (bar - filled)}]" if width >= 100 else "",
        f"  elapsed {clock_text(elapsed)}  ETA {clock_text(eta)}  step {step_seconds:.2f} s",
    )
    parts: list[RenderableType] = [head]
    columns = max(1, (width - 4) // CELL)
    if (line := bottleneck(metrics)) is not None:
        parts.append(Text(line, style="dim"))
    for title, prefix in SECTIONS.items():
        own = {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}
        parts += _section(title, {n: v for n, v in own.items() if _is_shown(title, n)}, columns)
        if title == "Time":
            moved = {n.removesuffix("/bytes"): v for n, v in metrics.items() if "/bytes" in n and v}
            parts += _section("Bytes", moved, columns)
        if title == "Evaluation":
            parts += _section("Evaluation: success_once by task", _by_task(own), columns)
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


def bar_width(width: int) -> int:
    """Characters of a bar in a terminal of `width`."""
    return BAR if width >= 100 else SHORT_BAR


def clock_text(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))


def _is_shown(title: str, name: str) -> bool:
    """Single tasks and single phases of workers go to the loggers only."""
    if title == "Time":
        return "/" not in name or name.endswith("/busy")
    return not name.startswith("task/")


def _by_task(own: Mapping[str, float]) -> dict[str, float]:
    ends = ("task/", "/success_once")
    return {n[len(ends[0]) : -len(ends[1])]: v for n, v in own.items() if n.startswith(ends[0]) and n.endswith(ends[1])}


def _section(title: str, metrics: Mapping[str, float], columns: int) -> list[RenderableType]:
    if not metrics:
        return []
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        grid.add_column(ratio=1, overflow="fold")
    cells = [Text.assemble(name, "=", (_value_text(value), "bold")) for name, value in metrics.items()]
    for i in range(0, len(cells), columns):
        grid.add_row(*cells[i : i + columns])
    return [Text(title, style="bold green"), grid]


def _value_text(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
