"""`rlinf record`: what runs have written becomes a row of the page of results (rlinf/results/headline.py)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.recipes import default_config_dir, recipe_sentences
from rlinf.config.schema import Config
from rlinf.errors import UserError
from rlinf.metrics.loggers import read_jsonl
from rlinf.metrics.names import episode_metric, guide_name
from rlinf.metrics.report.charts import thinned
from rlinf.metrics.report.run_files import TRAINING
from rlinf.metrics.stats import mean_interval
from rlinf.models.config import find_config
from rlinf.results.headline import (
    CHECKPOINTS,
    MAX_POINTS,
    NAME,
    SEED,
    Headline,
    Measured,
    Shipped,
    TrainedSeed,
    check_protocol,
    check_sizes,
    listed,
    read_headline,
    shared_protocol,
    with_seed,
    write_headline,
)
from rlinf.results.identity import files_hash
from rlinf.results.protocol import differences, leaves
from rlinf.results.result import Result, read_result, results_of_run
from rlinf.storage.run_folder import RunRecord, read_record
from rlinf.typed import defaults_of

MODEL = "actor.model."
SUCCESS, ONCE = "success", "success_once"  # in a row, and as training logs it
_ABSOLUTE = re.compile(r"(?<![\w./~-])/[^\s'\",\]]+")  # a path from the root, within a command


@dataclass(frozen=True)
class _Run:
    """A training run: its folders, those in which it was continued included, and what they say of it."""

    folders: tuple[Path, ...]
    records: tuple[RunRecord, ...]

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [start for record in self.records for start in record.starts]

    @property
    def settings(self) -> dict[str, Any]:
        """What is learnt and how; a setting that a continuation changed tells both values, and from which step."""
        told = dict(self.records[0].settings)
        for earlier, folder, record in zip(self.records, self.folders[1:], self.records[1:], strict=False):
            for change in differences(earlier.settings, record.settings):
                first = min(_steps(folder), default=0)
                told[change.key] = f"{told.get(change.key)}, from step {first} {change.second}"
        return told

    def own_result(self, *, trained: bool) -> Result | None:
        """The evaluation that the run itself made before its first step, or after its last; None without one."""
        results = [read_result(file) for folder in self.folders for file in results_of_run(folder)]
        ids = [record.id for record in self.records]
        own = [result for result in results if result.run in ids and (result.step > 0) == trained]
        return max(own, key=lambda result: result.step, default=None)


def add_record(
    name: str,
    runs: Sequence[Path],
    *,
    before: Path | None = None,
    after: Path | None = None,
    shipped: Path | None = None,
    failed: str | None = None,
    note: str | None = None,
    commands: Sequence[str] = (),
    replaces: bool = False,
    folder: Path,
) -> Path:
    """Add a seed, the policy that is kept with it, or both, to the row `name` of `folder`; returns the row's file.

    `runs` are the folders of one training run: its first, and those in which it was continued. Where `before` and
    `after` are None they are the run's own first and last evaluation. `failed` tells why what was tried did not work.
    `commands` are those that made what the run started from.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"NAME={name} must be small letters, digits, - and _: it becomes the file {folder}/NAME.json")
    if not runs and shipped is None:
        raise UserError("nothing to record: name the folder of a training run, or an evaluation with --shipped")
    if failed is not None and note is not None:
        raise UserError("--failed WHY is the row's sentence: leave --note out")
    if not runs and (before or after or failed or commands):
        raise UserError("--before, --after, --failed and --command belong to a training run: name its folder")
    file = folder / f"{name}.json"
    headline = read_headline(file) if file.exists() else None
    if runs:
        run = _read_run(runs)
        first = read_result(before) if before is not None else run.own_result(trained=False)
        last = read_result(after) if after is not None else run.own_result(trained=True)
        _check_ends(run, first, last, may_lack=failed is not None)
        if headline is not None and replaces and [s.seed for s in headline.seeds] == [_seed(run)]:
            headline = replace(headline, seeds=(), protocol={}, shipped=None)  # nothing of it stays
        headline = _fitting(headline, name, run, last or first, failed=failed is not None, note=failed or note)
        trained = _trained(run, first, last, commands)
        headline = with_seed(_with_newer_keys(headline, trained.settings), trained, replaces=replaces)
    elif headline is None:
        raise UserError(f"{file} does not exist: record the row's training runs first")
    if note is not None:
        headline = replace(headline, note=note)
    if shipped is not None:
        headline = replace(headline, shipped=_shipped(headline, read_result(shipped), folder))
    return write_headline(headline, folder)


def _read_run(folders: Sequence[Path]) -> _Run:
    """The run of these folders; refuses what is no training run, or not one."""
    records: list[RunRecord] = []
    for folder in folders:
        record = read_record(folder)
        if record is None or record.kind != "train":
            raise UserError(f"{folder} is no folder of a training run: it has no run.json of one")
        earlier = folders[len(records) - 1]
        found = differences(records[-1].settings, record.settings) if records else []
        if found and not (_resumes(record, earlier) and all(change.key != SEED for change in found)):
            raise UserError(
                f"{earlier} and {folder} are not of one training run: {listed(found)}; settings other than {SEED} may "
                "change where runner.resume_dir named a checkpoint of the folder before"
            )
        if records and 1 in _steps(folder):
            raise UserError(f"{folder} begins at step 1, so it does not continue {folders[0]}: it is a row of its own")
        records.append(record)
    return _Run(tuple(folders), tuple(records))


def _resumes(record: RunRecord, folder: Path) -> bool:
    """Whether a run was started from a checkpoint in this folder."""
    key = "runner.resume_dir="
    places = [
        Path(start.get("folder", "."), argument.removeprefix(key))
        for start in record.starts
        for argument in shlex.split(start.get("command", ""))
        if argument.startswith(key)
    ]
    return any(place.resolve().is_relative_to(folder.resolve()) for place in places)


def _seed(run: _Run) -> int:
    """The seed it was trained with."""
    seed = run.records[-1].settings.get(SEED)
    if seed is None:
        raise UserError(f"{run.folders[-1]}/run.json does not tell {SEED}")
    return int(seed)


def _steps(folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics of every training step that a folder holds."""
    metrics = folder / "metrics.jsonl"
    rows = read_jsonl(metrics) if metrics.exists() else []
    return {row["step"]: row for row in rows if any(name.startswith(TRAINING) for name in row)}


def _check_ends(run: _Run, before: Result | None, after: Result | None, *, may_lack: bool) -> None:
    """Refuse evaluations that are missing, were played under different protocols, or by a policy of another run."""
    for result, option, when in (
        (before, "--before", "before its first step"),
        (after, "--after", "of a trained step"),
    ):
        if result is None and not may_lack:
            raise UserError(f"{run.folders[-1]} holds no evaluation {when}; name its result.json with {option}")
    ids = [record.id for record in run.records]
    if before and before.step > 0 and (before.run in ids or before.policy.training_run in ids):
        raise UserError(f"{before.path} was played by the run's own policy of step {before.step}, not before it")
    if before and after and before.path == after.path:
        raise UserError(f"{before.path} cannot be the evaluation before and after the run")
    if before and after and (found := differences(before.protocol, after.protocol)):
        raise UserError(f"{before.path} and {after.path} were played under different protocols: {listed(found)}")
    if after and after.policy.training_run not in (None, *ids):
        raise UserError(f"{after.path} was played by a policy of run {after.policy.training_run}, not of {ids[-1]}")


def _fitting(
    headline: Headline | None, name: str, run: _Run, result: Result | None, *, failed: bool, note: str | None
) -> Headline:
    """The row that the run belongs to, made where there is none; refuses a run of another kind or protocol."""
    record = run.records[-1]
    if headline is None:
        told = recipe_sentences(default_config_dir()).get(record.name, "") if note is None else note
        suite = record.settings.get("env.train.task_suite_name", "") if result is None else result.protocol["suite"]
        simulator = str(record.settings.get("env.train.env_type", ""))
        headline = Headline(name, record.name, told, failed, simulator, str(suite), protocol={})
    elif headline.failed != failed:
        raise UserError(f"{name} is a row of {'failures' if headline.failed else 'results'}; choose another name")
    if result is None:
        return headline
    if headline.protocol:
        check_protocol(headline, result.protocol, str(result.path))
    return replace(headline, protocol=shared_protocol(result.protocol))


def _with_newer_keys(headline: Headline, settings: Mapping[str, Any]) -> Headline:
    """The row whose earlier runs also tell the keys that came after them, at their defaults: that is what they did."""
    defaults = dict(leaves(defaults_of(Config)))
    if (model := settings.get(f"{MODEL}model_type")) is not None:
        defaults |= dict(leaves(defaults_of(find_config(model)), MODEL))
    newer = {key: defaults[key] for key in settings if key in defaults}
    seeds = tuple(replace(seed, settings=newer | seed.settings) for seed in headline.seeds)
    return replace(headline, seeds=seeds)


def _trained(run: _Run, before: Result | None, after: Result | None, commands: Sequence[str]) -> TrainedSeed:
    """What the folders of a run tell of its training; `commands` came before its own."""
    parts = [_steps(folder) for folder in run.folders]
    rows = {step: row for part in parts for step, row in part.items()}
    seconds = sum(row.get("time/step") or 0.0 for part in parts for row in part.values())
    if not rows:
        raise UserError(f"{run.folders[-1]} holds no metrics.jsonl with a training step")
    result, record = after or before, run.records[-1]
    own = None if result is None else _own_mean(result)
    points = _points(rows, own or ONCE)
    falls_back = own is not None and not points  # single tasks know no avg_len
    return TrainedSeed(
        seed=_seed(run),
        run=record.id,
        steps=max(rows),
        minutes=round(seconds / 60, 1),
        device=_device_name(run.starts[-1], result),
        commit=_short_commit(run.starts[-1].get("commit")),
        commands=list(dict.fromkeys([*commands, *map(_command, run.starts)])),
        settings=run.settings,
        curve=[[step, value] for step, value in thinned(_points(rows, ONCE) if falls_back else points, MAX_POINTS)],
        before=None if before is None else measured_of(before),
        after=None if after is None else measured_of(after),
        curve_number=SUCCESS if falls_back else None,
    )


def _points(rows: Mapping[int, Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Training step and the mean of a metric over its episodes, where it was logged."""
    shown = f"env/{metric}"
    return [(step, row[shown]) for step, row in sorted(rows.items()) if row.get(shown) is not None]


def measured_of(result: Result) -> Measured:
    """What the row keeps of a result."""
    own = _own_mean(result)
    value, low, high = (
        (float(result.success[key]) for key in ("rate", "low", "high"))
        if own is None
        else mean_interval([episode.extra[own] for episode in result.episodes if own in episode.extra])
    )
    made = result.provenance
    return Measured(
        step=result.step,
        seed=int(result.protocol.get("policy.seed") or 0),
        policy=result.policy.sha256,
        number=SUCCESS if own is None else guide_name(own),
        value=value,
        low=low,
        high=high,
        success=result.success,
        table=result.table,
        tasks={task: [int(rate["successes"]), int(rate["trials"])] for task, rate in result.tasks.items()},
        device=result.device,
        torch=str(made.get("packages", {}).get("torch", "")),
        commit=_short_commit(made.get("commit")),
        date=str(made.get("at", ""))[:10],
        command=_command(made),
    )


def _own_mean(result: Result) -> str | None:
    """The mean that the simulator itself measures and is ranked by, such as CALVIN's avg_len; None for success."""
    for name in dict.fromkeys(name for episode in result.episodes for name in episode.extra):
        row = episode_metric(name)
        if row is not None and row.unit != "share":
            return name
    return None


def _shipped(headline: Headline, result: Result, folder: Path) -> Shipped:
    """The policy in results/checkpoints that a result was played by; refuses one that has changed since."""
    check_protocol(headline, result.protocol, str(result.path))
    places, given = folder / CHECKPOINTS, Path(result.policy.path or "")
    if not given.resolve().is_relative_to(places.resolve()) or given.resolve() == places.resolve():
        who = result.policy.path or "a policy that was not saved"
        raise UserError(
            f"{result.path} was played by {who}, which is not below {places}: export the policy there "
            f"(`rlinf export CHECKPOINT {places}/{headline.name} --precision bf16`), and evaluate it"
        )
    if files_hash((given,)) != result.policy.sha256:
        raise UserError(f"{given} has changed since {result.path} was played; evaluate it again")
    check_sizes(folder)
    return Shipped(given.resolve().relative_to(folder.resolve()).as_posix(), measured_of(result))


def _device_name(start: dict[str, Any], result: Result | None) -> str:
    """What the run computed on."""
    if gpus := start.get("gpus"):
        return ", ".join(
            f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus)
        )
    return "CPU" if result is None else str(result.device.get("name", "CPU"))


def _short_commit(commit: str | None) -> str:
    name, plus, changes = (commit or "").partition("+")
    return name[:12] + plus + changes


def _command(start: dict[str, Any]) -> str:
    """The command of a start; places of the machine it ran on are made relative, or cut to their last name."""
    here = Path(str(start.get("folder") or "/nowhere"))

    def shorter(found: re.Match[str]) -> str:
        path = Path(found[0])
        return str(path.relative_to(here)) if path.is_relative_to(here) else f"…/{path.name}"

    return _ABSOLUTE.sub(shorter, str(start.get("command", "")))
