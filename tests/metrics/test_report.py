"""The report says the numbers that the runs' files hold, draws them where they belong, and runs nothing of theirs."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.schema import LoggerConfig
from rlinf.errors import UserError
from rlinf.metrics.loggers import MetricLogger
from rlinf.metrics.report import write_report
from rlinf.metrics.report.charts import HEAT_COLUMNS, MOST_POINTS, make_charts
from rlinf.metrics.report.page import page_code
from rlinf.metrics.report.run_files import read_runs


def log(folder: Path, rows: dict[int, dict[str, float]], config: dict[str, Any] | None = None) -> None:
    logger = MetricLogger(LoggerConfig(log_path=str(folder), logger_backends=[]), config or {}, resume_step=None)
    for step, metrics in rows.items():
        logger.log(step, metrics)
    logger.close()


def episodes(successes: int, video: str | None = None) -> list[dict[str, Any]]:
    """Eight episodes of two tasks; those of even index are of the first."""
    return [
        {
            "index": i,
            "suite": "two",
            "seed": 0,
            "env_id": 0,
            "return": 0.0,
            "task": ("<door>", "reach")[i % 2],
            "reset_id": i,
            "steps": 10 + i,
            "success_once": i < successes,
            "success_at_end": False,
            "video": video,
        }
        for i in range(8)
    ]


def write_result(folder: Path, step: int, played: list[dict[str, Any]], **changes: Any) -> None:
    """The result.json of an evaluation at a step."""
    content = {"schema": "rlinf-result", "version": 1, "step": step, "run": "0a", "recipe": "toy", "episodes": played}
    content |= {"policy": {"kind": "random", "path": None}}
    blocks = ("protocol", "success", "groups", "tasks", "rates", "table", "metrics", "provenance", "config")
    content |= {name: {} for name in blocks} | changes
    path = folder / "eval" / f"step_{step}" / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def make_run(folder: Path) -> None:
    metrics = {"train/actor/policy_loss": -0.1, "time/step": 30.0, "time/generate_rollouts": 20.0}
    metrics |= {"train/actor/grad_norm": float("nan")}
    log(folder, {step: {"env/success_once": step / 4, **metrics} for step in (1, 2, 3, 4)}, {"seed": 7})
    (folder / "video" / "eval").mkdir(parents=True)
    (folder / "video" / "eval" / "seed 0.mp4").write_bytes(b"film")
    table = {"title": "Own & <proud>", "columns": ["split", "length"], "rows": [["<hard>", 1 / 3]]}
    write_result(folder, 10, episodes(6, "video/eval/seed 0.mp4"), table=table)
    (folder / "eval" / "step_2.json").write_text(json.dumps({"step": 2, "episodes": episodes(3)}))  # as it once was
    summary = {"before": {"successes": 33, "trials": 128}, "after": {"successes": 109, "trials": 128}, "seconds": 181.5}
    (folder / "summary.json").write_text(json.dumps(summary))


class Page(HTMLParser):
    """What a browser would find in a page: its tags, its scripts and styles, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.code: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag in self.code:
            self.code[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.code:
            self.code[self._inside][-1] += data
        else:
            self.text += data

    @property
    def values(self) -> dict[str, Any]:
        return json.loads(self.code["script"][0])


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_report_holds_the_numbers(tmp_path: Path) -> None:
    make_run(tmp_path)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    for shown in (
        "4 training steps · 2.0 min of training",
        "33 of 128, 95 % interval 19.0 to 34.0 %",
        "109 of 128, 95 % interval 78.0 to 90.3 %",
        "seconds: 181.5",
        "3/8 = 37.5 % [13.7, 69.4]",
        "6/8 = 75.0 % [40.9, 92.9]",
        "3/4 = 75.0 % [30.1, 95.4]",  # one task of the last evaluation
        "20.00 s",
        "67 %",
        "evaluation, step 10, success 6/8",  # of the video that the result names
        "Own & <proud>",
        "<hard>0.3333",
        "<door>",
        "seed: 7",
        "train/actor/policy_loss -0.1",  # it never changed: no chart
    ):
        assert shown in page.text, shown
    assert page.text.index("step_2.json") < page.text.index("step_10/result.json")
    assert "train/actor/grad_norm" not in page.text  # no finite value
    assert 'href="eval/step_10/result.json"' in text
    success = page.values["charts"]["Success-0"]
    assert success["series"][0] == {"run": 0, "x": [1, 2, 3, 4], "y": [0.25, 0.5, 0.75, 1.0]}
    assert (success["series"][1]["x"], success["series"][1]["y"]) == ([2, 10], [0.375, 0.75])
    assert (success["series"][1]["low"][0], success["series"][1]["high"][0]) == pytest.approx((0.13684, 0.69426))


def test_only_the_pages_own_scripts_may_run_and_nothing_is_loaded(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = read(write_report(tmp_path))
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    assert rules["base-uri"] == rules["form-action"] == "'none'"

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    scripts = page.code["script"][1:]
    assert [a for t, a in page.tags if t == "script"] == [{"type": "application/json", "id": "data"}, {}, {}]
    assert rules["script-src"] == " ".join(map(hashed, scripts))
    assert rules["style-src"] == hashed(page.code["style"][0])
    assert not any("style" in attrs or any(name.startswith("on") for name in attrs) for _, attrs in page.tags)
    assert not {"img", "iframe", "link", "object", "base", "form"} & {tag for tag, _ in page.tags}
    loaded = [attrs.get("src") or "" for _, attrs in page.tags if "src" in attrs]
    assert all(source.startswith("data:video/mp4;base64,") for source in loaded)
    assert "http" not in scripts[1]
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|sendBeacon|import|eval)\s*\(", scripts[0])
    assert "MIT Licensed" in scripts[0]


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)<!--"
    attribute = '"><img src=x onerror=alert(1)>'
    run = tmp_path / evil
    make_run(run)
    plain = read(write_report(run, out=tmp_path / "plain.html"))
    log(run, {1: {f"env/task/{evil}/success_once": 0.5}}, {"runner": {"note": f"</pre>{evil}{attribute}"}})
    record = {"id": attribute, "name": evil, "starts": [{"command": f"rlinf train {evil} x={attribute}", "host": evil}]}
    (run / "run.json").write_text(json.dumps(record))
    (run / "summary.json").write_text(json.dumps({f"{evil}{attribute}": {"successes": 1, "trials": 2}, "a": attribute}))
    result = json.loads((run / "eval/step_10/result.json").read_text())
    result |= {
        "policy": {"kind": "checkpoint", "path": attribute},
        "run": attribute,
        "groups": {evil: {"successes": 1, "trials": 1}},
    }
    result["table"] = {"title": evil, "columns": [attribute], "rows": [[evil]]}
    result["episodes"][0]["task"] = f"</script>{attribute}"
    (run / "eval/step_10/result.json").write_text(json.dumps(result))
    (run / "video" / attribute.replace("/", "")).with_suffix(".mp4").write_bytes(b"x" * 700_000)
    page = read(write_report(run, out=tmp_path / "evil.html"))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | {"ul", "li"}  # of other recordings
    assert len(page.code["script"]) == 3
    assert page.values["runs"] == [evil]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert page.text.count(evil) > 5
    assert page.text.count(attribute) > 5


def test_links_follow_the_page_and_small_videos_are_inside(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    film = tmp_path / "run/video/eval/seed 0.mp4"
    page = read(write_report(tmp_path / "run", out=tmp_path / "pages/a.html"))
    links = {attrs.get("href") for tag, attrs in page.tags if tag == "a"}
    assert {"../run/video/eval/seed%200.mp4", "../run/eval/step_2.json"} <= links
    (video,) = (attrs for tag, attrs in page.tags if tag == "video")
    assert video["src"] == "data:video/mp4;base64," + base64.b64encode(b"film").decode()
    film.write_bytes(b"film" * 200_000)
    page = read(write_report(tmp_path / "run", out=tmp_path / "pages/a.html"))
    (video,) = (attrs for tag, attrs in page.tags if tag == "video")
    assert video["src"] == "../run/video/eval/seed%200.mp4"


def test_videos_say_what_they_show(tmp_path: Path) -> None:
    make_run(tmp_path)
    for step, successes in ((0, 1), (20, 8)):
        write_result(tmp_path, step, episodes(successes, f"video/eval/{step}.mp4"))
        (tmp_path / f"video/eval/{step}.mp4").write_bytes(b"film")
    (tmp_path / "video/train").mkdir()
    (tmp_path / "demos/videos/observation.images.top").mkdir(parents=True)
    (tmp_path / "demos/videos/observation.images.top/0.mp4").write_bytes(b"film")
    for number in (2, 10, 9):
        (tmp_path / f"video/train/{number}.mp4").write_bytes(b"film")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    labels = re.findall(r"<figcaption><b>(.*?)</b> <a[^>]*>(.*?)</a>", text)
    assert labels == [
        ("before: evaluation, step 0, success 1/8 = 12.5 % [2.2, 47.1]", "video/eval/0.mp4"),
        ("after: evaluation, step 20, success 8/8 = 100.0 % [67.6, 100.0]", "video/eval/20.mp4"),
        ("before: training, first recording", "video/train/2.mp4"),
        ("after: training, last recording", "video/train/10.mp4"),
    ]
    assert "2 other recordings" in text  # seed 0.mp4 of step 10, and 9.mp4


def test_replays_are_no_recordings_of_the_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    for folder in ("eval/step_10/replay", "eval/step_2_2/replay/eval", "data/videos/observation.image", "replay"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "0.mp4").write_bytes(b"film")
    (run,) = read_runs([tmp_path])
    assert [video.path.relative_to(tmp_path).as_posix() for video in run.videos] == [
        "replay/0.mp4",
        "video/eval/seed 0.mp4",
    ]


def test_an_empty_or_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds nothing to report"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="none is not a folder"):
        write_report(tmp_path / "none")


def test_several_runs_share_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a/run", 0.25), ("b/run", 0.75)):
        config = {"runner": {"logger": {"log_path": name}}, "lr": rate, "video": f"{name}/video", "same": 1}
        log(Path(name), {1: {"env/success_once": rate, "time/step": 2.0}, 2: {"env/success_once": 1.0}}, config)
    out = write_report(Path("a/run"), Path("b/run"))
    assert out == Path("report.html")
    page = read(out)
    assert page.values["runs"] == ["a/run", "b/run"]
    assert [(line["run"], line["y"]) for line in page.values["charts"]["Success-0"]["series"]] == [
        (0, [0.25, 1.0]),
        (1, [0.75, 1.0]),
    ]
    text = out.read_text(encoding="utf-8")
    table = text[text.index("different between the runs") :]
    assert re.findall(r"<td><code>(.*?)</code></td>", table[: table.index("</table>")]) == ["lr"]
    with pytest.raises(UserError, match=r"a/\.\./b/run is given twice"):
        write_report(Path("b/run"), Path("a/../b/run"))


def test_no_file_of_others_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        log(Path(name), {1: {"env/success_once": 0.5}})
    a, b, c = map(Path, "abc")
    Path("report.html").write_text("mine")
    assert write_report(a, b) == Path("report-2.html")
    assert write_report(a, b) == Path("report-2.html")  # the report of the same runs
    assert write_report(a, c) == Path("report-3.html")
    assert Path("report.html").read_text() == "mine"
    before = Path("report-2.html").read_text()
    for taken in ("report.html", "report-2.html"):
        with pytest.raises(UserError, match=f"{taken} exists and is not a report of these runs"):
            write_report(b, c, out=Path(taken))
    assert Path("report-2.html").read_text() == before
    assert write_report(a) == write_report(a) == a / "report.html"
    (b / "report.html").write_text("my own notes")
    with pytest.raises(UserError, match="is not a report of this run"):
        write_report(b)
    assert (b / "report.html").read_text() == "my own notes"


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("mine.html/r.html", "Not a directory"),
        ("/proc/x/r.html", "No such file or directory"),
        (f"{'x' * 300}.html", "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(out: str, reason: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(UserError, match=rf"^{re.escape(str(tmp_path / out))} cannot be written: {reason}$"):
        write_report(tmp_path / "run", out=tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "run"]
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_ten_thousand_steps_make_a_page_below_5_mb(tmp_path: Path) -> None:
    """Curves of a long run are thinned to means, with the smallest and largest value; counts stay exact."""
    names = [f"task-{i:02}" for i in range(50)]
    draw = random.Random(0)
    curves = ["train/actor/policy_loss", "train/critic/value_loss", "time/step", "time/actor_training", "env/return"]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            row: dict[str, float] = {"step": step, "env/success_once": step / 10_000}
            row |= {name: draw.random() for name in curves}
            task = names[step % 50]
            row |= {f"env/task/{task}/success_once": 0.25, f"env/task/{task}/num_trajectories": 4.0}
            file.write(json.dumps(row) + "\n")
    out = write_report(tmp_path)
    assert out.stat().st_size < 5_000_000
    page = read(out)
    (line,) = page.values["charts"]["Success-0"]["series"]
    assert len(line["x"]) == len(line["y"]) == MOST_POINTS
    assert (line["x"][-1], line["steps"]) == (10_000, 10)
    assert (line["y"][0], line["low"][0], line["high"][0]) == pytest.approx((0.00055, 0.0001, 0.001))
    heat = page.values["charts"]["Success by task-0"]
    assert len(heat["rows"]) == 50
    assert len(heat["edges"]) <= HEAT_COLUMNS
    counts = [tuple(map(int, said.split("/"))) for row in heat["said"] for said in row if said]
    assert (sum(won for won, _ in counts), sum(played for _, played in counts)) == (10_000, 40_000)


def test_many_curves_share_the_room_of_a_page(tmp_path: Path) -> None:
    folders = [tmp_path / f"run{i}" for i in range(30)]
    for folder in folders:
        folder.mkdir()
        lines = [{"step": s, "time/step": 1.0, "env/return": s / 7, "env/reward": s / 3} for s in range(1, 301)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts = make_charts(read_runs(folders))
    assert {len(line["x"]) for chart in charts["Environment"] for line in chart["series"]} == {300}
    assert write_report(*folders, out=tmp_path / "all.html").stat().st_size < 5_000_000


def test_heat_maps_count_episodes(tmp_path: Path) -> None:
    rows = {
        1: {"env/task/a/success_once": 0.5, "env/task/a/num_trajectories": 4.0},
        2: {"env/task/b/success_once": 1.0, "env/task/b/num_trajectories": 2.0},
    }
    log(tmp_path, rows)
    (heat,) = make_charts(read_runs([tmp_path]))["Success by task"]
    assert heat["rows"] == ["b", "a"]  # by the success they end with
    assert heat["cells"] == [[None, 1.0], [0.5, None]]
    assert heat["said"] == [["", "2/2"], ["2/4", ""]]
    for step in (1, 2):
        write_result(tmp_path, step, episodes(4))
    _, heat = make_charts(read_runs([tmp_path]))["Success by task"]
    assert (heat["edges"], heat["rows"]) == ([1, 2], ["<door>", "reach"])
    assert heat["said"] == [["2/4", "2/4"], ["2/4", "2/4"]]


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    times = {"time/step": 10.0, "time/generate_rollouts": 6.0, "time/actor_training": 3.0}
    log(tmp_path, {1: {"env/steps": 1.0, **times}, 2: {"env/steps": 1.0, "time/step": 4.0, "time/save": 1.0}})
    (chart,) = make_charts(read_runs([tmp_path]))["Time"]
    layers = {layer["label"]: layer["y"] for layer in chart["series"]}
    assert layers == {
        "generate_rollouts": [6.0, 0.0],
        "actor_training": [3.0, 0.0],
        "save": [0.0, 1.0],
        "everything else": [1.0, 3.0],
    }


def test_evaluations_alone_do_not_become_training_steps(tmp_path: Path) -> None:
    log(tmp_path, {1: {"env/success_once": 0.5, "time/step": 2.0}, 7: {"eval/success_once": 1.0, "time/eval": 99.0}})
    (run,) = read_runs([tmp_path])
    assert (run.steps, run.points("time/eval")) == (1, [])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"kind": "eval", "finished_steps": 0}, "evaluation"),
        ({"kind": "train", "finished_steps": 0}, "stopped · no training steps · 0.0 min of training"),
        ({"kind": "train", "finished_steps": 4}, "finished · no training steps · 0.0 min of training"),
    ],
)
def test_the_state_of_a_run(record: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"id": "0a", **record}))
    write_result(tmp_path, 0, episodes(3))
    assert f'<p class="sub">{said}</p>' in write_report(tmp_path).read_text(encoding="utf-8")


def test_an_expert_is_no_point_of_the_curve(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_result(tmp_path, 0, episodes(8), policy={"kind": "expert", "path": None})
    page = read(write_report(tmp_path))
    assert page.values["charts"]["Success-0"]["series"][1]["x"] == [2, 10]
    assert "8/8 = 100.0 % [67.6, 100.0]" in page.text


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    page_code.cache_clear()
    monkeypatch.setattr(importlib.metadata, "distribution", _none)
    with pytest.raises(UserError, match="pip install uplot-python"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def _none(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_changes_to_the_recipe_are_shown(tmp_path: Path) -> None:
    from rlinf.config.load import load_config
    from rlinf.metrics.run_log import RunLog

    settings = ["runner.seed=3", "algorithm.gamma=0.5", f"runner.logger.log_path={tmp_path}"]
    log = RunLog(load_config("toy_ppo_compact", [*settings, "runner.logger.logger_backends=[]"]))
    log.start(0, 1)
    log.log(1, {"env/success_once": 0.5})
    log.close()
    record = json.loads((tmp_path / "run.json").read_text())
    record["starts"][-1]["command"] = "rlinf train -v toy_ppo_compact runner.seed=3"
    (tmp_path / "run.json").write_text(json.dumps(record))
    (run,) = read_runs([tmp_path])
    assert run.changes is not None
    changed = {key: pair for key, pair in run.changes.keys.items() if key != "runner.logger.logger_backends"}
    assert (run.changes.recipe, changed) == ("toy_ppo_compact", {"runner.seed": (0, 3), "algorithm.gamma": (0.99, 0.5)})
    record["starts"][-1]["command"] = "rlinf train no_such_recipe"
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert read_runs([tmp_path])[0].changes is None


@pytest.mark.slow
def test_a_browser_draws_the_page_without_a_complaint(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    make_run(tmp_path)
    page = write_report(tmp_path).resolve().as_uri()
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --enable-logging=stderr"
    )
    done = subprocess.run(
        [browser, *options.split(), "--virtual-time-budget=3000", "--dump-dom", page], capture_output=True, text=True
    )
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<canvas") >= 1  # what is near the screen
