"""docs/results.md with its curves, made of the rows in results/ (rlinf/results/headline.py).

`python -m rlinf.commands.results_page results docs` writes them (`make docs`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlinf.commands.results_curve import draw_curve
from rlinf.errors import UserError
from rlinf.metrics.episode_summary import AVERAGE_OF_GROUPS
from rlinf.metrics.stats import Rate
from rlinf.results.headline import Headline, Measured, TrainedSeed, read_headlines
from rlinf.results.study import FOLDER, Study, read_studies

PAGE, CURVES = "results.md", "assets/results"  # below docs/
BENCHMARKS = {"metaworld": "MetaWorld", "calvin": "CALVIN", "maniskill": "ManiSkill", "robotwin": "RoboTwin"}
PUBLISHED = "Published results"  # heading of a benchmark's guide, whose text is shown beside the rows
WIDE = 8  # rows of a benchmark's table up to which they become columns
HEAD = """# Results

What reinforcement learning added to policies that imitation had made, in this package alone: scripted experts,
imitation, PPO or GRPO, then the benchmark's own table. `before` and `after` are the same held-out trials in the same
mode, with counts and 95 % intervals (Wilson's for shares, normal for means); every seed has its line. Curves show
training episodes, which are played with exploration noise; where training knows only success, as single tasks do of
which an evaluation makes chains, the curve is of that, with its scale at the right (some older rows have none).

`make docs` writes this page from the files in [results/](../results), which `rlinf record` makes of what runs have
written. Recipes change; a row's file keeps every setting of its runs.
"""
HOW = """## Add a row

```bash
rlinf record toy logs/toy-0                           # before and after: the run's own first and last evaluation
rlinf record toy logs/toy-1 --before logs/imitated --after logs/judged --command "rlinf sft ..."   # by `rlinf eval`
rlinf export logs/toy-0 results/checkpoints/toy --precision bf16         # a policy to keep with the row
rlinf eval toy_ppo_compact runner.ckpt_path=results/checkpoints/toy runner.logger.log_path=logs/kept
rlinf record toy --shipped logs/kept
rlinf record toy_bf16 logs/other --failed "PPO in bf16: the ratios are noise"    # under what did not work
make docs
```

A row holds seeds that differ in nothing else: runs of other settings and evaluations of other protocols are refused,
by key. Several folders of one run that was continued (`rlinf record toy logs/a logs/b`) give one curve; a run whose
`runner.resume_dir` names a checkpoint of the folder before it may change a setting, and the row keeps both values. The
policies in `results/checkpoints` may have 60 MB in all.
"""


def make_page(results: Path, docs: Path) -> dict[Path, str]:
    """Every file of the page below `docs`, by path, with its text."""
    if not results.is_dir():
        raise UserError(f"{results} is no folder of results")
    rows = read_headlines(results)
    files = {docs / CURVES / f"{row.name}.svg": draw_curve(row) for row in rows}
    return {docs / PAGE: "\n".join(_sections(rows, read_studies(results), docs)), **files}


def write_page(results: Path, docs: Path) -> None:
    """Write the page and its curves; curves of rows that are gone are removed."""
    files = make_page(results, docs)
    (docs / CURVES).mkdir(parents=True, exist_ok=True)
    for stale in set((docs / CURVES).glob("*.svg")) - files.keys():
        stale.unlink()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


def _sections(rows: Sequence[Headline], studies: Sequence[Study], docs: Path) -> Iterator[str]:
    good, failed = [row for row in rows if not row.failed], [row for row in rows if row.failed]
    yield HEAD
    if good:
        yield _overview(good)
    others = sorted({row.simulator for row in good} - BENCHMARKS.keys())
    for simulator in [*BENCHMARKS, *others]:
        own = [row for row in good if row.simulator == simulator]
        guide = docs / f"{simulator}.md"
        yield f"## {BENCHMARKS.get(simulator, simulator)}\n"
        if not own:
            yield f"No row yet; [the guide]({guide.name}) tells what has been measured so far.\n"
        for row in own:
            yield from _row(row, results="../results")
        if guide.is_file() and (published := _section(guide.read_text(encoding="utf-8"), PUBLISHED)):
            yield f"### Published for {BENCHMARKS.get(simulator, simulator)}, other policies\n\n{published}\n"
    if studies:
        yield "## What makes a policy learn\n"
        for study in studies:
            yield _study(study, results="../results")
    if failed:
        yield "## What was tried and did not work\n"
        for row in failed:
            yield from _row(row, results="../results")
    yield HOW.rstrip("\n") + "\n"


def _overview(rows: Sequence[Headline]) -> str:
    """One line for every row, means over its seeds."""
    lines = []
    for row in rows:
        name, before, after = _mean_ends(row)
        trials = int(next(row.measured())[1].success["trials"])
        minutes = ", ".join(f"{run.minutes:g}" for run in row.seeds)
        lines.append(
            f"| [{row.name}](#{_anchor(row.name)}) | {BENCHMARKS.get(row.simulator, row.simulator)}, `{row.suite}` | "
            f"{_policy(row)} | {name} | {_plain(name, before)} | {_plain(name, after)} | "
            f"{_gain(name, after - before)} | {trials} | {len(row.seeds)} | {minutes} |"
        )
    return _table("row|benchmark|policy|number|before|after|gain|trials|seeds|minutes", lines) + "\n"


def _row(row: Headline, *, results: str) -> Iterator[str]:
    """The section of a row."""
    yield f"### {row.name}\n"
    recipe = f"Recipe `{row.recipe}`, {_policy(row)}; " if row.protocol else f"Recipe `{row.recipe}`; "
    protocol = f"protocol `{row.protocol_hash}`, " if row.protocol else ""
    yield f"{row.note}\n\n{recipe}{protocol}[{row.name}.json]({results}/{row.name}.json).\n"
    yield _seeds(row) + "\n"
    yield f"![{row.name} over training steps]({CURVES}/{row.name}.svg)\n"
    if any(len(m.table["rows"]) > 1 for _, m in _ends(row)):
        yield _own_table(row) + "\n"
    if any(m.tasks for _, m in _ends(row)):
        yield _tasks(row) + "\n"
    commands = list(dict.fromkeys(command for run in row.seeds for command in run.commands))
    yield "Trained by\n\n```\n" + "\n".join(commands) + "\n```\n"
    if row.shipped is not None:
        made = row.shipped.measured
        yield f"The trained policy is in [{row.shipped.checkpoint}]({results}/{row.shipped.checkpoint}):\n"
        yield f"```bash\n{made.command}\n```\n"
        yield (
            f"gave {_shown(made)} on {_device(made)}, torch {made.torch}, {made.date}. The same kind of machine "
            "gives the same counts; on others single episodes may end otherwise.\n"
        )


def _study(study: Study, *, results: str) -> str:
    """The section of a study: a line for each training, those of one axis together."""
    lines = []
    for trial in study.trials:
        before, last = Rate(*trial.before), 100 * trial.last
        told = "<br>".join(f"`{part}`" for part in trial.settings) or "as it is"
        lines.append(
            f"| {trial.axis} | {told} | {100 * before.rate:.1f} % | {Rate(*trial.after)} | {last:.1f} % | "
            f"{trial.steps} | {trial.seconds:.0f} |"
        )
    heads = "varied|settings|before|after|last ten steps, with noise|steps|seconds"
    file = f"{FOLDER}/{study.name}.json"
    return (
        f"### {study.name}, setting by setting\n\n{study.note} Recipe `{study.recipe}`, on {study.device}; "
        f"[{file}]({results}/{file}), made by\n\n```bash\n{study.command}\n```\n\n{_table(heads, lines)}\n"
    )


def _seeds(row: Headline) -> str:
    """The headline table."""
    lines = []
    for run in row.seeds:
        before, after = (_shown(m) if m is not None else "not evaluated" for m in (run.before, run.after))
        lines.append(
            f"| {run.seed} | {before} | {after} | {_gained(run)} | {run.steps} | {run.minutes:g} | {run.device} |"
        )
    if len(list(row.measured())) > 1:
        name, first, last = _mean_ends(row)
        lines.append(f"| mean | {_plain(name, first)} | {_plain(name, last)} | {_gain(name, last - first)} | | | |")
    return _table("seed|before|after|gain|steps|minutes|trained on", lines)


def _gained(run: TrainedSeed) -> str:
    if run.before is None or run.after is None:
        return ""
    apart = run.after.low > run.before.high or run.after.high < run.before.low
    told = "intervals are apart" if apart else "intervals overlap"
    return f"{_gain(run.before.number, run.after.value - run.before.value)}, {told}"


def _ends(row: Headline) -> list[tuple[str, Measured]]:
    """The evaluations of every seed, with what tables call them."""
    named = ((run.seed, when, m) for run in row.seeds for when, m in (("before", run.before), ("after", run.after)))
    return [(f"seed {seed}, {when}", m) for seed, when, m in named if m is not None]


def _own_table(row: Headline) -> str:
    """The benchmark's own table, before and after, as the guides write it: per cent where it counts successes."""
    ends = _ends(row)
    names = list(dict.fromkeys(line[0] for _, m in ends for line in m.table["rows"]))
    cells = {(who, line[0]): _cell(line) for who, m in ends for line in m.table["rows"]}
    counts = {line[0]: line[5] for _, m in ends for line in m.table["rows"] if line[5]}
    heads = [f"{name}, {counts[name]} trials" if name in counts else name for name in names]
    if len(names) <= WIDE:
        lines = [f"| {who} | " + " | ".join(cells.get((who, name), "") for name in names) + " |" for who, _ in ends]
        return _table("|".join(["", *heads]), lines)
    lines = [
        f"| {head} | " + " | ".join(cells.get((who, name), "") for who, _ in ends) + " |"
        for name, head in zip(names, heads, strict=True)
    ]
    return _table("|".join(["", *(who for who, _ in ends)]), lines)


def _cell(line: Sequence[Any]) -> str:
    name, value, low, high, *_ = line
    if low is not None:
        return f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{100 * value:.1f}" if name == AVERAGE_OF_GROUPS else f"{value:.3f}"


def _tasks(row: Headline) -> str:
    """Successes of every task, folded."""
    ends = _ends(row)
    names = list(dict.fromkeys(task for _, m in ends for task in m.tasks))
    lines = [
        f"| {task} | " + " | ".join("/".join(map(str, m.tasks.get(task, []))) for _, m in ends) + " |" for task in names
    ]
    table = _table("|".join(["task", *(who for who, _ in ends)]), lines)
    return f"<details><summary>{len(names)} tasks</summary>\n\n{table}\n\n</details>"


def _section(page: str, heading: str) -> str:
    """The text below a heading of the second level, up to the next one; empty where there is none."""
    found = re.search(rf"^## {re.escape(heading)}\n+(.*?)(?=^## |\Z)", page, re.M | re.S)
    return found[1].strip() if found else ""


def _table(heads: str, lines: Sequence[str]) -> str:
    columns = heads.split("|")
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *lines])


def _policy(row: Headline) -> str:
    parts = (row.protocol.get(f"policy.{key}") for key in ("model_type", "size", "precision"))
    return " ".join(str(part) for part in parts if part)


def _shown(measured: Measured) -> str:
    if measured.number == "success":
        return str(Rate(int(measured.success["successes"]), int(measured.success["trials"])))
    trials = int(measured.success["trials"])
    return f"{measured.value:.3f} [{measured.low:.3f}, {measured.high:.3f}] of {trials}"


def _plain(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name == "success" else f"{value:.3f}"


def _gain(name: str, value: float) -> str:
    return f"{100 * value:+.1f} points" if name == "success" else f"{value:+.3f}"


def _device(measured: Measured) -> str:
    device = measured.device
    name, threads = str(device.get("name", "an unknown machine")), device.get("threads", 1)
    return name if device.get("kind") != "cpu" else f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def _mean_ends(row: Headline) -> tuple[str, float, float]:
    """What is measured, and its means over the seeds before and after."""
    _, before, after = zip(*row.measured(), strict=True)
    return before[0].number, _mean(before), _mean(after)


def _mean(measured: Sequence[Measured]) -> float:
    return sum(one.value for one in measured) / len(measured)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m rlinf.commands.results_page RESULTS DOCS")
    try:
        write_page(Path(sys.argv[1]), Path(sys.argv[2]))
    except UserError as error:
        sys.exit(f"error: {error}")
