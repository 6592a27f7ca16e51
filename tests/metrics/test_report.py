"""The report says the numbers that the run's files hold; the charts draw them where they belong."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rlinf.config.schema import LoggerConfig
from rlinf.errors import UserError
from rlinf.metrics.curves import Series, curve_svg, nice_ticks
from rlinf.metrics.loggers import MetricLogger
from rlinf.metrics.report import write_report


def make_run(folder: Path) -> None:
    logger = MetricLogger(LoggerConfig(log_path=str(folder), logger_backends=[]), {"seed": 7}, resume_step=None)
    for step in (1, 2, 3, 4):
        metrics = {"env/success_once": step / 4, "train/actor/policy_loss": -0.1, "time/step": 30.0}
        logger.log(step, metrics | {"time/generate_rollouts": 20.0, "train/actor/grad_norm": float("nan")})
    logger.close()
    (folder / "eval").mkdir()
    for step, successes in ((2, 3), (10, 6)):
        episodes = [
            {
                "task": ("<door>", "reach")[i % 2],
                "reset_id": i,
                "steps": 10 + i,
                "success_once": i < successes,
                "success_at_end": False,
            }
            for i in range(8)
        ]
        (folder / "eval" / f"step_{step}.json").write_text(json.dumps({"step": step, "episodes": episodes}))
    summary = {"before": {"successes": 33, "trials": 128}, "after": {"successes": 109, "trials": 128}, "seconds": 181.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "video").mkdir()
    (folder / "video" / "seed 0.mp4").write_bytes(b"")


def test_report_holds_the_numbers(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    for shown in (
        "4 training steps, 2.0 min of training",
        "33/128 = 25.8 % [19.0, 34.0]",
        "109/128 = 85.2 % [78.0, 90.3]",
        "seconds: 181.5",
        "3/8 = 37.5 % [13.7, 69.4]",
        "6/8 = 75.0 % [40.9, 92.9]",
        "3/4 = 75.0 % [30.1, 95.4]",  # one task of the last evaluation
        "30.00 s per training step",
        "20.00 s</td><td class=num>67 %",
        'src="video/seed%200.mp4"',
        'href="eval/step_10.json"',
        "seed: 7",
        "&lt;door&gt;",
    ):
        assert shown in page, shown
    assert page.index("step_2.json") < page.index("step_10.json")
    assert "train/actor/policy_loss" in page
    assert "train/actor/grad_norm" not in page  # no finite value, no chart
    assert "<door>" not in page


def test_report_needs_no_network_and_no_script(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_links_follow_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    page = write_report(tmp_path / "run", out=tmp_path / "pages" / "a.html")
    assert 'src="../run/video/seed%200.mp4"' in page.read_text(encoding="utf-8")
    assert 'href="../run/eval/step_2.json"' in page.read_text(encoding="utf-8")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds nothing to report"):
        write_report(tmp_path)


def test_points_are_drawn_to_scale() -> None:
    svg = curve_svg([Series("a", [(0, 0.0), (5, 0.5), (10, 1.0)])], title="<t>", percent=True, width=640, height=300)
    root = ElementTree.fromstring(svg)
    line = root.find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    assert line.attrib["points"] == "56.0,262.0 339.0,154.0 622.0,46.0"
    assert "&lt;t&gt;" in svg


def test_intervals_are_drawn_as_bars_and_one_point_is_enough() -> None:
    svg = curve_svg([Series("e", [(3, 0.5)], [(0.25, 0.75)])], title="t", percent=True)
    assert 'y1="208.0" y2="100.0"' in svg
    assert "50.0 %" in svg


def test_long_curves_are_thinned_and_keep_their_last_point() -> None:
    svg = curve_svg([Series("a", [(i, float(i)) for i in range(4001)])], title="t")
    points = re.findall(r'points="([^"]+)"', svg)[0].split()
    assert len(points) <= 1001
    assert points[-1].startswith("622.0,")


def test_a_chart_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="'t' has no points"):
        curve_svg([Series("a", [])], title="t")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3.0, 7.0, [-2.0, 0.0, 2.0, 4.0, 6.0]), (0.0, 1e-5, 6)],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float] | int) -> None:
    found = nice_ticks(low, high)
    assert len(found) == ticks if isinstance(ticks, int) else found == pytest.approx(ticks)


def test_every_task_has_a_chart_of_its_success(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert "<h2>Success by task</h2>" in (page := write_report(tmp_path).read_text(encoding="utf-8"))
    assert 'aria-label="&lt;door&gt;"' in page
    only_trained = tmp_path / "trained"
    logger = MetricLogger(LoggerConfig(log_path=str(only_trained), logger_backends=[]), {}, resume_step=None)
    for step in (1, 2):
        logger.log(step, {"env/success_once": 0.5, "env/task/reach-v3/success_once": 0.25 * step})
    logger.close()
    page = write_report(only_trained).read_text(encoding="utf-8")
    (chart,) = re.findall(r'<svg[^>]*aria-label="reach-v3".*?</svg>', page)
    drawn = ElementTree.fromstring(chart)
    titles = [node.text for node in drawn.iter() if node.tag.endswith("title")]
    assert titles == ["training episodes, 1: 25.0 %", "training episodes, 2: 50.0 %"]
