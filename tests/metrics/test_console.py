"""What is shown, and that log parsers find what they look for."""

import io
import re
from pathlib import Path

import pytest

from rlinf.metrics.console import (
    PLAIN_INTERVAL_S,
    Bars,
    RunConsole,
    bottleneck,
    metric_table,
    showing_progress,
    step_line,
)
from rlinf.progress import listening, report

METRICS = {
    "time/step": 4.0,
    "time/generate_rollouts": 2.5,
    "time/actor_training": 1.0,
    "time/env/busy": 2.25,
    "time/env/env_interact_step": 2.125,
    "time/env/slowest_rank": 3.0,
    "time/env/slowest_over_median": 2.0625,
    "messages/bytes": 0.0,
    "sync/bytes": 4096.0,
    "env/success_once": 0.609375,
    "env/num_trajectories": 128.0,
    "env/return": 0.5,
    "env/task/reach-v3/success_once": 0.125,
    "rollout/rewards": 0.015,
    "eval/success_once": 0.5,
    "eval/task/pick-place-wall-v3/success_once": 0.25,
    "train/actor/approx_kl": 0.00125,
    "train/actor/policy_loss": -0.0123456,
    "train/critic/explained_variance": float("nan"),
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_two_steps(folder: Path, table_interval: int = 1) -> str:
    ticks = iter([0.0, 0.0, 0.0, 100.0, 110.0, 120.0])
    stream = io.StringIO()
    console = RunConsole(folder, table_interval=table_interval, stream=stream, clock=lambda: next(ticks))
    console.open()
    console.say("a policy [of 3 layers]")
    console.start(2, 10)
    console.step(3, METRICS)
    console.step(4, METRICS)
    console.stop()
    return stream.getvalue()


def test_parsers_find_step_and_success(tmp_path: Path) -> None:
    pattern = re.compile(r"Global Step:\s+(\d+)/(\d+).*?success_once=([0-9.]+)", flags=re.DOTALL)
    both = [("3", "10", "0.6094"), ("4", "10", "0.6094")]
    assert pattern.findall(run_two_steps(tmp_path / "all")) == both
    assert pattern.findall(run_two_steps(tmp_path / "even", table_interval=2)) == both[1:]
    assert pattern.findall(run_two_steps(tmp_path / "none", table_interval=-1)) == []
    for name in ("all", "even", "none"):
        assert pattern.findall((tmp_path / name / "metrics.log").read_text(encoding="utf-8")) == both


def test_sections_values_and_times(tmp_path: Path) -> None:
    text = run_two_steps(tmp_path)
    titles = ["Metric Table", "Time", "Bytes", "Environment", "Rollout", "Evaluation", "by task", "Training"]
    assert [text.index(title) for title in titles] == sorted(text.index(title) for title in titles)
    for shown in (
        "num_trajectories=128",
        "pick-place-wall-v3=0.25",
        "actor/policy_loss=-0.01235",
        "critic/explained_variance=nan",
        "elapsed 0:00:10  ETA 0:01:10  step 10.00 s",  # one step of 10 s done, seven to go
        "elapsed 0:00:20  ETA 0:01:00  step 10.00 s",
        "Bottleneck: generate_rollouts 2.5 s of 4.0 s (62 %); straggler env[3] (2.1x the median)",
        "env/busy=2.25",
        "sync=4096",
    ):
        assert shown in text
    for logged_only in ("reach-v3", "env_interact_step", "messages"):  # single training tasks, phases; no bytes
        assert logged_only not in text
    assert max(map(len, text.splitlines())) == 120


def test_plain_output_has_no_control_codes_and_the_log_keeps_every_table(tmp_path: Path) -> None:
    text = run_two_steps(tmp_path)
    assert "\x1b" not in text
    assert text.startswith("a policy [of 3 layers]\nsuccess  60.9 %  step  3/10  ETA 0:01:10   4.00 s/step")
    tables = "".join(line + "\n" for line in text.splitlines() if not line.startswith("success"))
    assert (tmp_path / "metrics.log").read_text(encoding="utf-8") == tables
    run_two_steps(tmp_path)
    assert (tmp_path / "metrics.log").read_text(encoding="utf-8") == tables * 2


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (40, "success  60.9 %  step  3/10  ETA 0:01:10"),
        (80, "success  60.9 %  step  3/10  ETA 0:01:10   4.00 s/step  return   0.500"),
        (160, "success  60.9 %  step  3/10  ETA 0:01:10   4.00 s/step  return   0.500  kl   0.0013  explained    nan"),
    ],
)
def test_the_line_of_a_step_begins_with_success_and_fits(width: int, line: str) -> None:
    assert step_line(3, 10, METRICS, eta=70, width=width).plain == line
    assert len(line) <= width


def test_a_step_in_which_no_episode_ended_has_no_success() -> None:
    assert step_line(3, 10, {}, eta=70, width=80).plain == "success       -  step  3/10  ETA 0:01:10"


@pytest.mark.parametrize(("width", "cells"), [(80, 2), (120, 3), (160, 4)])
def test_the_table_has_as_many_columns_as_fit(width: int, cells: int) -> None:
    from rich.console import Console

    stream = io.StringIO()
    table = metric_table(3, 10, METRICS, elapsed=30, eta=70, step_seconds=10, width=width)
    Console(file=stream, width=width).print(table)
    lines = stream.getvalue().splitlines()
    assert {len(line) for line in lines} == {width}
    assert "Global Step:  3/10" in lines[1]
    assert "step 10.00 s" in lines[1]  # not wrapped
    time = next(line for line in lines if "generate_rollouts=" in line)
    assert time.count("=") == min(cells, 4)


def test_an_evaluation_alone_has_no_total(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = RunConsole(tmp_path, table_interval=1, stream=stream, clock=lambda: 0.0)
    console.step(5, {"eval/success_once": 0.5})
    console.stop()
    assert "success  50.0 %  step 5/5  ETA 0:00:00" in stream.getvalue()
    assert "Global Step:  5/5" in stream.getvalue()


def test_a_metrics_log_that_cannot_be_written_is_said_once_and_left(tmp_path: Path) -> None:
    stream = io.StringIO()
    (tmp_path / "metrics.log").symlink_to("/dev/full")
    console = RunConsole(tmp_path, stream=stream)
    console.open()
    console.step(1, METRICS)
    console.step(2, METRICS)
    console.stop()
    text = stream.getvalue()
    said = (
        f"warning: {tmp_path / 'metrics.log'} cannot be written (No space left on device); the run goes on without it"
    )
    assert text.count(said) == 1
    assert text.count("success  60.9 %") == 2


def test_long_work_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with showing_progress(stream):
        report("building push-v3", 3, 4)
        report("building", 4, 4)
    assert "building push-v3" in stream.getvalue()
    assert "3/4" in stream.getvalue()
    assert "\x1b[2K" in stream.getvalue()  # it is taken away at the end


def test_elsewhere_it_is_a_plain_line_now_and_then() -> None:
    now, stream = [0.0], io.StringIO()
    bars = Bars(stream, clock=lambda: now[0])
    with listening(bars.show):
        report("collecting reach-v3", 0, 4)
        now[0] = PLAIN_INTERVAL_S / 2
        report("collecting reach-v3", 1, 4)  # too soon
        now[0] = PLAIN_INTERVAL_S
        report("collecting push-v3", 2, 4)
        report("collecting push-v3", 3, 4)
    report("nobody listens", 1, 4)
    bars.stop()
    assert stream.getvalue() == "collecting push-v3: 2/4  ETA 0:00:20\n"


def test_bottleneck_needs_timers() -> None:
    assert bottleneck({"env/return": 1.0}) is None
    assert bottleneck({"time/step": 4.0, "time/eval": 1.0}) == "Bottleneck: eval 1.0 s of 4.0 s (25 %)"
