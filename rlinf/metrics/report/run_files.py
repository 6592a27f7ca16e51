"""What a run's folder holds for its report: logged steps, evaluations with their episodes, summary, config, videos.

A file that cannot be read is left out with a warning; nothing here writes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.metrics.loggers import read_jsonl
from rlinf.metrics.report.config_changes import Changes, read_changes
from rlinf.metrics.stats import Rate
from rlinf.results.result import FILE, Result, read_result
from rlinf.storage.run_folder import LOCK, RECORD, is_locked

logger = logging.getLogger(__name__)
_NO_RECORDING = re.compile(r"(^|/)(observation\.|eval/step_[^/]*/replay/)")  # of the run, though it is a film
TRAINING = ("train/", "env/", "rollout/")  # a logged line with one of these belongs to a training step


@dataclass(frozen=True)
class Evaluation:
    """One evaluation file: every episode played, and what the benchmark makes of them."""

    path: Path
    step: int | None
    episodes: list[dict[str, Any]]
    success: Rate
    rates: dict[str, Rate]  # shares the simulator itself measures: subtasks of a chain
    groups: dict[str, Rate]  # success by group of tasks
    table: dict[str, Any] | None  # title, columns, rows: as the benchmark publishes it
    policy: str  # what acted: a path, `random` or `expert`; empty where an earlier file does not say
    protocol: str  # hash of all that changes a number; empty in files of versions before result.json

    @property
    def is_of_curve(self) -> bool:
        """Whether it measures the run's policy at a step; a scripted expert has its row in the table alone."""
        return self.step is not None and bool(self.episodes) and self.policy != "expert"

    def by_task(self) -> dict[str, list[dict[str, Any]]]:
        """The episodes of each task, by name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for episode in self.episodes:
            found.setdefault(str(episode["task"]), []).append(episode)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class Video:
    """One recording, and the evaluation it shows if a result names it."""

    path: Path
    evaluation: Evaluation | None
    training: bool  # of a training rollout


@dataclass(frozen=True)
class RunFiles:
    """One run as its folder tells it."""

    folder: Path
    name: str  # as the page calls it: the folder's name, with parents where two runs share it
    rows: list[dict[str, Any]]  # of metrics.jsonl, by step; without those of evaluations that were no part of training
    evaluations: list[Evaluation]  # by step, those without one last
    summary: dict[str, Any]
    record: dict[str, Any]  # run.json
    config: str | None  # config.yaml as it is written
    changes: Changes | None  # to the recipe; None where it is not known
    videos: list[Video]
    state: str  # running, finished, stopped, evaluation, or empty where run.json does not say

    @property
    def steps(self) -> int:
        """The last training step; 0 before the first."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def identity(self) -> str:
        """The id of the run, or where it lies."""
        return str(self.record.get("id") or self.folder.resolve())

    def points(self, name: str) -> list[tuple[int, float]]:
        """Step and value of a metric where it was logged as a finite number; the last of equal steps counts."""
        return self.curves.get(name, [])

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """The points of every metric, by name."""
        found: dict[str, dict[int, float]] = {}
        for row in self.rows:
            step = row["step"]
            for name, value in row.items():
                if type(value) in (int, float) and isfinite(value):
                    found.setdefault(name, {})[step] = value
        return {name: list(values.items()) for name, values in found.items() if name != "step"}


def read_runs(folders: Sequence[Path], *, may_be_empty: bool = False) -> list[RunFiles]:
    """Read run folders; refuses one that is missing, given twice or, unless told otherwise, holds nothing."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; a report is made of run folders, which hold metrics.jsonl")
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"{folders[index]} is given twice")
    runs = [_read_run(folder, name) for folder, name in zip(folders, _names(places), strict=True)]
    for run in runs:
        if not may_be_empty and not run.rows and not run.evaluations and not run.summary:
            raise UserError(
                f"{run.folder} holds nothing to report: no metrics.jsonl with a step, no evaluation, no summary.json"
            )
    return runs


def signature(folders: Sequence[Path]) -> str:
    """A text that changes when a file that the report reads does."""
    seen = []
    for folder in folders:
        names = [folder / name for name in ("metrics.jsonl", "summary.json", "config.yaml", RECORD, LOCK)]
        for path in [*names, *_evaluation_files(folder), *_video_files(folder)]:
            try:
                state = path.stat()
            except OSError:
                continue
            seen.append(f"{path}:{state.st_mtime_ns}:{state.st_size}")
    return "\n".join(seen)


def _read_run(folder: Path, name: str) -> RunFiles:
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    record = _read_object(folder / RECORD) or {}
    evaluations = _read_evaluations(folder)
    logged = sorted(read_jsonl(metrics), key=lambda row: row["step"]) if metrics.exists() else []
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else None
    return RunFiles(
        folder=folder,
        name=name,
        rows=[row for row in logged if any(name.startswith(TRAINING) for name in row)],
        evaluations=evaluations,
        summary=_read_object(folder / "summary.json") or {},
        record=record,
        config=text,
        changes=None if text is None else read_changes(text, record),
        videos=_read_videos(folder, evaluations),
        state=_state(folder, record),
    )


def _names(places: Sequence[Path]) -> list[str]:
    """The folders' own names; where two are equal, with as many parents as tell all apart."""
    names: list[str] = []
    for place in places:
        count = 1
        while count < len(place.parts) and any(
            other != place and other.parts[-count:] == place.parts[-count:] for other in places
        ):
            count += 1
        names.append("/".join(place.parts[-count:]) or "/")
    return names


def _evaluation_files(folder: Path) -> list[Path]:
    patterns = (f"eval/step_*/{FILE}", "eval/step_*.json", "eval_*.json")
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _video_files(folder: Path) -> list[Path]:
    """Complete recordings below the folder, 2.mp4 before 10.mp4; films of a dataset's cameras and replays are none."""
    found = (path for path in folder.rglob("*.mp4") if not path.name.endswith(".part.mp4"))
    return sorted(
        (path for path in found if not _NO_RECORDING.search(path.relative_to(folder).as_posix())),
        key=lambda path: [int(text) if text.isdigit() else text for text in re.split(r"(\d+)", str(path))],
    )


def _read_evaluations(folder: Path) -> list[Evaluation]:
    found = []
    for path in _evaluation_files(folder):
        try:
            if path.name == FILE:
                found.append(_evaluation(path, read_result(path)))
            elif (data := _read_object(path)) is not None:
                found.append(_earlier_evaluation(path, data))
        except UserError as error:
            logger.warning("left out of the report: %s", error)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is left out of the report: it is no evaluation (%r)", path, error)
    return sorted(found, key=lambda e: (e.step is None, e.step or 0, str(e.path)))


def _evaluation(path: Path, result: Result) -> Evaluation:
    """What the page needs of an evaluation; its success is counted from its episodes."""
    return Evaluation(
        path=path,
        step=result.step,
        episodes=[episode.to_json() for episode in result.episodes],
        success=Rate.of(episode.success_once for episode in result.episodes),
        rates=_rates(result.rates),
        groups=_rates(result.groups),
        table=_table(result.table),
        policy=result.policy.path or result.policy.kind,
        protocol=result.protocol_hash,
    )


def _earlier_evaluation(path: Path, data: dict[str, Any]) -> Evaluation:
    """The same of a file that a version before result.json wrote."""
    step = data.get("step")
    for episode in data["episodes"]:
        if not isinstance(episode["steps"], int | float):
            raise TypeError("an episode's steps are not a number")
        episode["task"], episode["reset_id"], episode["success_at_end"]
    return Evaluation(
        path=path,
        step=None if step is None else int(step),
        episodes=list(data["episodes"]),
        success=Rate.of(episode["success_once"] for episode in data["episodes"]),
        rates=_rates(data.get("rates") or {}),
        groups=_rates(data.get("groups") or {}),
        table=None,
        policy=str(data.get("checkpoint") or ""),
        protocol="",
    )


def _rates(found: Mapping[str, Mapping[str, float]]) -> dict[str, Rate]:
    return {name: Rate(int(rate["successes"]), int(rate["trials"])) for name, rate in found.items()}


def _table(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """A benchmark's own table if it is one: as many cells in each row as columns."""
    if not found:
        return None
    columns = [str(name) for name in found["columns"]]
    rows = [
        [f"{cell:.4g}" if type(cell) is float else str("" if cell is None else cell) for cell in row]
        for row in found["rows"]
    ]
    if any(len(row) != len(columns) for row in rows):
        raise ValueError("its table has rows of another length than its columns")
    return {"title": str(found.get("title") or ""), "columns": columns, "rows": rows}


def _read_videos(folder: Path, evaluations: Sequence[Evaluation]) -> list[Video]:
    shown: dict[Path, Evaluation] = {}
    for one in evaluations:
        for name in {episode.get("video") for episode in one.episodes} - {None, ""}:
            for base in (one.path.parent, folder):
                shown.setdefault((base / str(name)).resolve(), one)
    return [
        Video(path, shown.get(path.resolve()), "train" in path.relative_to(folder).parts)
        for path in _video_files(folder)
    ]


def _state(folder: Path, record: dict[str, Any]) -> str:
    """Whether the run is over, from its record and its lock; an evaluation is just that, for it has no steps."""
    if not record:
        return ""
    if record.get("kind") == "eval":
        return "evaluation"
    if record.get("finished_steps"):
        return "finished"
    return "running" if is_locked(folder) else "stopped"


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or, with a warning, where it holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict):
            return data
        problem: Any = "it is not an object"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = error
    logger.warning("%s is left out of the report: %s", path, problem)
    return None
