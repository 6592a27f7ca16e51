"""`rlinf record` and the page of results: rows are what runs have written, alike in all but their seed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rlinf.commands import results_page
from rlinf.commands.record import add_record
from rlinf.commands.results_curve import draw_curve
from rlinf.errors import UserError
from rlinf.metrics.stats import Rate
from rlinf.results import headline
from rlinf.results.identity import PolicyIdentity, files_hash
from rlinf.results.result import Episode, Result, read_result, rewrite, write_result
from rlinf.results.study import Study, Trial, read_studies, write_study
from rlinf.storage.run_folder import RunRecord, write_record

PROTOCOL = {
    "simulator": "toy",
    "suite": "reach",
    "trials.count": 20,
    "policy.model_type": "openpi",
    "policy.size": "compact",
    "policy.seed": 0,
}
START = {
    "command": "rlinf train toy_ppo_compact runner.logger.log_path=/home/me/here/logs/a actor.model.model_path=/x/sft",
    "folder": "/home/me/here",
    "at": "2026-01-02T03:04:05+0000",
    "host": "secret-host",
    "commit": "0123456789abcdef+changes",
    "packages": {"torch": "2.9.0"},
    "gpus": [],
}


def result(folder: Path, run: str, step: int, successes: int, *, seed: int = 0, **changes: Any) -> Path:
    """Write an evaluation of 20 trials on two tasks, whose chains solve 3 subtasks where they succeed."""
    extra = changes.pop("extra", False)
    done = [
        Episode(
            i,
            "reach",
            f"task-{i % 2}",
            i,
            0,
            0,
            5,
            1.0,
            i < successes,
            i < successes,
            {"avg_len": 3.0 * (i < successes)} if extra else {},
        )
        for i in range(20)
    ]
    tasks = {name: asdict(Rate.of(e.success_once for e in done if e.task == name)) for name in ("task-0", "task-1")}
    rate = Rate.of(e.success_once for e in done)
    rows = [
        [name, *(one[key] for key in ("rate", "low", "high", "successes", "trials"))] for name, one in tasks.items()
    ]
    rows.append(["average of groups", rate.rate, None, None, None, None])
    written = Result(
        step=step,
        run=run,
        recipe="toy_ppo_compact",
        policy=PolicyIdentity("checkpoint"),
        protocol=PROTOCOL | {"policy.seed": seed},
        success=asdict(rate),
        groups={},
        tasks=tasks,
        rates={},
        table={"title": "reach", "columns": ["", "value", "low", "high", "successes", "trials"], "rows": rows},
        metrics={},
        episodes=tuple(done),
        provenance=START,
        config={},
        device={"kind": "cpu", "name": "a processor", "threads": 2},
    )
    path = write_result(replace(written, **changes), folder).path
    assert path is not None
    return path


def run(
    folder: Path, *, seed: int = 0, steps: range = range(1, 151), chains: bool = True, told: str = "", **settings: Any
) -> Path:
    """A finished training run with its metrics, and an evaluation before and after; `told` ends its command."""
    settings = {"runner.seed": seed, "env.train.env_type": "toy", "actor.optim.lr": 1e-4} | settings
    folder.mkdir(parents=True)
    name = f"run-{folder.name}"
    start = START | {"command": f"{START['command']}{told}"}
    write_record(folder, RunRecord(name, "train", "toy_ppo_compact", "hash", settings, "now", (start,)))
    rows = [{"step": s, "env/success_once": s / 150, "env/avg_len": s / 50, "time/step": 2.0} for s in steps]
    if not chains:
        rows = [{name: value for name, value in row.items() if name != "env/avg_len"} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if steps.start == 1:
        result(folder, name, 0, 5, seed=seed)
    result(folder, name, steps[-1], 15 + seed, seed=seed)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return tmp_path / "results"


def test_a_row_is_what_its_runs_have_written(tmp_path: Path, rows: Path) -> None:
    for seed in (1, 0):
        file = add_record("toy", [run(tmp_path / str(seed), seed=seed)], folder=rows, commands=["rlinf sft it"])
    row = headline.read_headline(file)
    assert (row.recipe, row.simulator, row.suite, row.failed) == ("toy_ppo_compact", "toy", "reach", False)
    assert row.note.startswith("A compact π0 + PPO on the pixel toy")  # the recipe's own sentence
    assert row.protocol == {k: v for k, v in PROTOCOL.items() if k != "policy.seed"}
    assert [(one.seed, one.steps, one.minutes) for one in row.seeds] == [(0, 150, 5.0), (1, 150, 5.0)]
    assert [(b.success["successes"], a.success["successes"]) for _, b, a in row.measured()] == [(5, 15), (5, 16)]
    assert row.seeds[0].before is not None
    assert row.seeds[0].before.tasks == {"task-0": [3, 10], "task-1": [2, 10]}
    assert len(row.seeds[0].curve) == 50  # means of three steps
    assert row.seeds[0].curve[0] == [3, pytest.approx(2 / 150, rel=1e-4)]
    text = file.read_text()
    assert "secret-host" not in text
    assert "/home/me" not in text
    assert row.seeds[0].commands == [
        "rlinf sft it",
        "rlinf train toy_ppo_compact runner.logger.log_path=logs/a actor.model.model_path=…/sft",
    ]


def test_a_run_that_was_continued_elsewhere_is_one_curve(tmp_path: Path, rows: Path) -> None:
    first = run(tmp_path / "first", steps=range(1, 41))
    second = run(tmp_path / "second", steps=range(31, 61))
    (seed,) = headline.read_headline(add_record("toy", [first, second], folder=rows)).seeds
    assert [step for step, _ in seed.curve] == list(range(1, 61))
    assert (seed.steps, seed.minutes) == (60, pytest.approx(70 * 2 / 60, abs=0.05))
    assert seed.after is not None
    assert seed.after.step == 60
    other = run(tmp_path / "other", steps=range(61, 90), **{"actor.optim.lr": 1e-3})
    with pytest.raises(UserError, match=r"are not of one training run: actor.optim.lr: 0.0001 and 0.001"):
        add_record("toy2", [first, other], folder=rows)


def test_a_setting_that_a_continuation_changed_is_told_with_both_values(tmp_path: Path, rows: Path) -> None:
    for seed in (0, 1):
        first = run(tmp_path / f"first{seed}", seed=seed, steps=range(1, 41))
        told = f" runner.resume_dir={first}/toy_ppo_compact/checkpoints/global_step_30 actor.optim.lr=1e-5"
        slower = run(tmp_path / f"slower{seed}", seed=seed, steps=range(31, 61), told=told, **{"actor.optim.lr": 1e-5})
        add_record("toy", [first, slower], folder=rows)
    row = headline.read_headline(rows / "toy.json")
    assert [one.settings["actor.optim.lr"] for one in row.seeds] == ["0.0001, from step 31 1e-05"] * 2
    assert [one.steps for one in row.seeds] == [60, 60]
    assert row.seeds[0].commands[1].endswith("actor.optim.lr=1e-5")
    told = f" runner.resume_dir={tmp_path / 'first0'}/toy_ppo_compact/checkpoints/global_step_30"
    reseeded = run(tmp_path / "reseeded", seed=5, steps=range(31, 61), told=told)
    with pytest.raises(UserError, match=r"not of one training run: runner.seed: 0 and 5"):
        add_record("toy2", [tmp_path / "first0", reseeded], folder=rows)


def test_a_key_that_came_after_an_earlier_seed_is_held_to_its_default(tmp_path: Path, rows: Path) -> None:
    openpi = {"actor.model.model_type": "openpi"}
    add_record("toy", [run(tmp_path / "old", **openpi)], folder=rows)
    newer = {"actor.model.openpi.noise_per": "action", "algorithm.group_size": 1}
    add_record("toy", [run(tmp_path / "new", seed=1, **openpi, **newer)], folder=rows)
    told = headline.read_headline(rows / "toy.json").seeds
    assert [one.settings["actor.model.openpi.noise_per"] for one in told] == ["action", "action"]
    other = run(tmp_path / "other", seed=2, **openpi, **newer | {"actor.model.openpi.noise_per": "chunk"})
    with pytest.raises(UserError, match=r"trained alike.*actor.model.openpi.noise_per: "):
        add_record("toy", [other], folder=rows)


def test_training_that_does_not_log_the_number_shows_its_success(tmp_path: Path, rows: Path) -> None:
    """As single tasks do, of which chains are made only in an evaluation."""
    folder = run(tmp_path / "a", chains=False)
    before, after = (result(tmp_path / name, name, 0, n, extra=True) for name, n in (("b", 5), ("c", 15)))
    row = headline.read_headline(add_record("toy", [folder], before=before, after=after, folder=rows))
    assert row.seeds[0].curve_number == "success"
    assert row.seeds[0].curve[-1] == [150, pytest.approx((148 + 149 + 150) / 3 / 150, rel=1e-4)]
    svg = ElementTree.fromstring(draw_curve(row))
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    assert line.attrib["points"].split()[-1].split(",")[1] == f"{262 - 216 * 149 / 150:.1f}"  # of the scale to 100 %
    assert {"100 %", "line: success of training episodes, right, dots: evaluations"} <= {
        text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")
    }


def test_what_a_benchmark_is_ranked_by_is_the_number(tmp_path: Path, rows: Path) -> None:
    folder = run(tmp_path / "a")
    before, after = (result(tmp_path / name, name, 0, n, extra=True) for name, n in (("b", 5), ("c", 15)))
    (seed,) = headline.read_headline(add_record("toy", [folder], before=before, after=after, folder=rows)).seeds
    assert seed.before is not None
    assert seed.after is not None
    assert (seed.before.number, seed.before.value, seed.after.value) == ("avg_num_subtasks", 0.75, 2.25)
    half = 1.96 * 3 * (5 * 15 / 20 / 19) ** 0.5 / 20**0.5
    assert (seed.before.low, seed.before.high) == pytest.approx((0.75 - half, 0.75 + half))
    assert seed.curve[-1] == [150, pytest.approx((148 + 149 + 150) / 3 / 50)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": {"actor.optim.lr": 1e-3}}, r"trained alike.*actor.optim.lr: 0.0001 and 0.001"),
        ({"seed": 0}, r"has a run of seed 0 already; --replace"),
        ({"after": {"protocol": PROTOCOL | {"horizon": 3}}}, r"different protocols: horizon: absent and 3"),
        ({"both": {"protocol": PROTOCOL | {"horizon": 3}}}, r"another protocol than toy: horizon: absent and 3"),
        ({"after": {"policy": PolicyIdentity("checkpoint", training_run="x")}}, r"by a policy of run x, not of run-b"),
        ({"failed": "why"}, r"toy is a row of results; choose another name"),
    ],
    ids=["settings", "seed", "protocol", "row", "policy", "failure"],
)
def test_what_does_not_belong_to_a_row_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path, rows: Path
) -> None:
    file = add_record("toy", [run(tmp_path / "a")], folder=rows)
    kept = file.read_text()
    folder = run(tmp_path / "b", seed=change.get("seed", 1), **change.get("settings", {}))
    ends = {"before": result(tmp_path / "x", "x", 0, 5, seed=0), "after": result(tmp_path / "x", "x", 9, 9, seed=0)}
    for end, path in ends.items():
        rewrite(replace(read_result(path), **change.get(end, change.get("both", {}))))
    with pytest.raises(UserError, match=says):
        add_record("toy", [folder], folder=rows, failed=change.get("failed"), **ends)
    assert file.read_text() == kept


def test_a_seed_may_be_replaced_and_the_page_explained(tmp_path: Path, rows: Path) -> None:
    add_record("toy", [run(tmp_path / "a")], folder=rows)
    file = add_record("toy", [run(tmp_path / "b")], folder=rows, replaces=True, note="Anew.")
    row = headline.read_headline(file)
    assert ([one.run for one in row.seeds], row.note) == (["run-b"], "Anew.")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"runs": []}, "nothing to record"),
        ({"name": "../toy"}, r"NAME=\.\./toy must be small letters"),
        ({"runs": ["results"]}, "is no folder of a training run"),
        ({"runs": ["bare"]}, "holds no evaluation before its first step; name its result.json with --before"),
        ({"runs": [], "failed": "why"}, "nothing to record"),
        ({"runs": ["bare"], "failed": "why", "note": "more"}, "--failed WHY is the row's sentence"),
        ({"runs": [], "shipped": Path("x"), "commands": ["sft"]}, "and --command belong to a training run"),
        ({"runs": [], "shipped": Path("x")}, r"toy\.json does not exist: record the row's training runs first"),
    ],
    ids=["nothing", "name", "folder", "before", "failed", "sentence", "command", "shipped"],
)
def test_mistakes_are_named(given: dict[str, Any], says: str, tmp_path: Path, rows: Path) -> None:
    run(tmp_path / "bare", steps=range(31, 61))
    given = {"name": "toy"} | given
    with pytest.raises(UserError, match=says):
        add_record(given.pop("name"), [tmp_path / name for name in given.pop("runs", ())], folder=rows, **given)
    assert not rows.exists()


def test_ends_and_folders_that_are_mixed_up_are_refused(tmp_path: Path, rows: Path) -> None:
    one, two = run(tmp_path / "a"), run(tmp_path / "b")
    with pytest.raises(UserError, match=r"was played by the run's own policy of step 150, not before it"):
        add_record("toy", [one], before=one, folder=rows)  # a folder stands for its last evaluation
    for folder in (two, one):
        with pytest.raises(UserError, match="begins at step 1, so it does not continue"):
            add_record("toy", [one, folder], folder=rows)
    assert not rows.exists()


def test_the_only_seed_may_be_replaced_under_another_protocol(tmp_path: Path, rows: Path) -> None:
    add_record("toy", [run(tmp_path / "a")], folder=rows)
    again = run(tmp_path / "b")
    other = {"protocol": PROTOCOL | {"policy.seed": 0, "suite": "push"}}
    ends = [result(tmp_path / f"{step}", "run-b", step, 5, **other) for step in (0, 150)]
    file = add_record("toy", [again], before=ends[0], after=ends[1], folder=rows, replaces=True)
    assert headline.read_headline(file).protocol["suite"] == "push"


def test_a_damaged_row_is_refused(tmp_path: Path, rows: Path) -> None:
    file = add_record("toy", [run(tmp_path / "a")], folder=rows)
    whole = json.loads(file.read_text())
    for change, says in (
        ({"protocol": {}}, "its name or its protocol"),
        ({"recipe": 3}, "recipe=3 must be"),
        ({"seeds": [{}]}, r"seeds\[0\].seed is required"),
        ({"version": 9}, "is no row of results"),
    ):
        file.write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match=says):
            headline.read_headline(file)


def test_a_policy_is_kept_with_a_row(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_record("toy", [run(tmp_path / "a")], folder=rows)
    folder = rows / "checkpoints" / "toy"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")

    def played(name: str, place: Path, **changes: Any) -> Path:
        identity = PolicyIdentity("checkpoint", str(place), files_hash((folder,)))
        return result(tmp_path / name, name, 0, 14, policy=identity, **changes)

    with pytest.raises(UserError, match=r"which is not below .*checkpoints: export the policy there"):
        add_record("toy", [], shipped=played("elsewhere", tmp_path / "policy"), folder=rows)
    with pytest.raises(UserError, match=r"another protocol than toy: horizon: absent and 1"):
        add_record("toy", [], shipped=played("other", folder, protocol=PROTOCOL | {"horizon": 1}), folder=rows)
    file = add_record("toy", [], shipped=played("kept", folder, seed=7), folder=rows)
    kept = headline.read_headline(file).shipped
    assert kept is not None
    assert (kept.checkpoint, kept.measured.success["successes"], kept.measured.seed) == ("checkpoints/toy", 14, 7)
    assert kept.measured.machine == ("cpu", "a processor", 2, "2.9.0")
    monkeypatch.setattr(headline, "MAX_CHECKPOINT_BYTES", 3)
    with pytest.raises(
        UserError, match=r"holds 0.0 MB, at most 0 MB may be kept .* largest file is .*model.safetensors"
    ):
        add_record("toy", [], shipped=tmp_path / "kept", folder=rows)
    (folder / "model.safetensors").write_text("others")
    with pytest.raises(UserError, match=r"has changed since .* was played; evaluate it again"):
        add_record("toy", [], shipped=tmp_path / "kept", folder=rows)


def test_the_page_shows_every_row_its_tables_curves_and_failures(tmp_path: Path, rows: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "calvin.md").write_text("# CALVIN\n\n## Published results\n\n| who |\n|---|\n| them |\n\n## More\n\nno\n")
    for seed in (0, 1):
        add_record("toy", [run(tmp_path / str(seed), seed=seed)], folder=rows)
    diverged = run(tmp_path / "c")
    for file in diverged.glob("eval/*/result.json"):
        file.unlink()
    add_record("toy_fast", [diverged], folder=rows, failed="A rate of 1 diverged.")
    (docs / "assets/results").mkdir(parents=True)
    (docs / "assets/results/gone.svg").write_text("")
    results_page.write_page(rows, docs)
    page = (docs / "results.md").read_text()
    assert "| [toy](#toy) | toy, `reach` | openpi compact | success | 25.0 % | 77.5 % | +52.5 points | 20 | 2 |" in page
    assert (
        "| 0 | 5/20 = 25.0 % [11.2, 46.9] | 15/20 = 75.0 % [53.1, 88.8] | +50.0 points, intervals are apart |" in page
    )
    assert "| seed 1, after | 80.0 [49.0, 94.3] | 80.0 [49.0, 94.3] | 80.0 |" in page
    assert "| task-0 | 3/10 | 8/10 | 3/10 | 8/10 |" in page
    assert re.search(
        r"## CALVIN\n+No row yet.*other policies\n+\| who \|\n\|---\|\n\| them \|\n+## ManiSkill", page, re.S
    )
    assert re.search(r"## What was tried and did not work\n+### toy_fast\n+A rate of 1 diverged\.", page)
    assert "| 0 | not evaluated | not evaluated |  | 150 | 5 | CPU |" in page
    curves = {file.name: ElementTree.fromstring(file.read_text()) for file in (docs / "assets/results").iterdir()}
    assert set(curves) == {"toy.svg", "toy_fast.svg"}
    svg = "{http://www.w3.org/2000/svg}"
    lines = [len(line.attrib["points"].split()) for line in curves["toy.svg"].iter(f"{svg}polyline")]
    assert (lines, len(list(curves["toy.svg"].iter(f"{svg}circle")))) == ([50, 50], 4)


def test_a_study_is_shown_line_by_line(tmp_path: Path) -> None:
    """What is written is read again, and the page tells the settings, the counts and the seconds of every training."""
    trials = (
        Trial("the recipe", [], [3, 20], [15, 20], 0.7, 40, 61.25),
        Trial("noise level", ["noise=0.1", "lr=1"], [3, 20], [4, 20], 0.25, 40, 60.0),
    )
    study = Study("toy", "toy_ppo_compact", "All alike.", "python study.py", "a CPU", "0123", trials)
    file = write_study(study, tmp_path)
    assert read_studies(tmp_path) == [study]
    page = results_page.make_page(tmp_path, tmp_path)[tmp_path / "results.md"]
    assert "### toy, setting by setting" in page
    assert "python study.py" in page
    assert f"| the recipe | as it is | 15.0 % | {Rate(15, 20)} | 70.0 % | 40 | 61 |" in page
    assert f"| noise level | `noise=0.1`<br>`lr=1` | 15.0 % | {Rate(4, 20)} | 25.0 % | 40 | 60 |" in page
    for damage in ("[]", "{", '{"schema": "rlinf-study", "version": 2}', file.read_text().replace("toy", "other", 1)):
        file.write_text(damage)
        with pytest.raises(UserError, match=r"toy.json is no study"):
            read_studies(tmp_path)
