"""What is shown, and that log parsers find what they look for."""

import io
import re
from pathlib import Path

from rlinf.metrics.console import RunConsole, bottleneck

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
    "env/task/reach-v3/success_once": 0.125,
    "rollout/rewards": 0.015,
    "eval/success_once": 0.5,
    "eval/task/pick-place-wall-v3/success_once": 0.25,
    "train/actor/policy_loss": -0.0123456,
    "train/critic/explained_variance": float("nan"),
}


def run_two_steps(folder: Path) -> str:
    ticks = iter([0.0, 100.0, 110.0, 120.0])
    stream = io.StringIO()
    console = RunConsole(folder, stream=stream, clock=lambda: next(ticks))
    console.say("a policy [of 3 layers]")
    console.start(2, 10)
    console.step(3, METRICS)
    console.step(4, METRICS)
    console.stop()
    return stream.getvalue()


def test_parsers_find_step_and_success(tmp_path: Path) -> None:
    text = run_two_steps(tmp_path)
    found = re.findall(r"Global Step:\s+(\d+)/(\d+).*?success_once=([0-9.]+)", text, flags=re.DOTALL)
    assert found == [("3", "10", "0.6094"), ("4", "10", "0.6094")]


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


def test_plain_output_has_no_control_codes_and_is_kept(tmp_path: Path) -> None:
    text = run_two_steps(tmp_path)
    assert "\x1b" not in text
    assert text.startswith("a policy [of 3 layers]\n")
    assert (tmp_path / "metrics.log").read_text(encoding="utf-8") == text
    run_two_steps(tmp_path)
    assert (tmp_path / "metrics.log").read_text(encoding="utf-8") == text * 2


def test_an_evaluation_alone_has_no_total(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = RunConsole(tmp_path, stream=stream, clock=lambda: 0.0)
    console.step(5, {"eval/success_once": 0.5})
    console.stop()
    assert "Global Step:  5/5" in stream.getvalue()
    assert "ETA 0:00:00" in stream.getvalue()


def test_bottleneck_needs_timers() -> None:
    assert bottleneck({"env/return": 1.0}) is None
    assert bottleneck({"time/step": 4.0, "time/eval": 1.0}) == "Bottleneck: eval 1.0 s of 4.0 s (25 %)"
