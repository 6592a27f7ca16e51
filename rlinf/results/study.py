"""results/studies/NAME.json: trainings that differ in one setting each, with what they reached. Torch-free.

`benchmarks/study.py` makes the file, `python -m rlinf.commands.results_page` shows it on docs/results.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlinf.errors import UserError, writing
from rlinf.storage.atomic_folder import make_folder, write_file
from rlinf.typed import convert

SCHEMA, VERSION = "rlinf-study", 1
FOLDER = "studies"  # in the folder of the rows


@dataclass(frozen=True)
class Trial:
    """One training of a study."""

    axis: str  # what is varied: lines of one axis stand together
    settings: list[str]  # overrides beside the recipe; none of them: the recipe itself
    before: list[int]  # successes and trials of the policy it began with
    after: list[int]  # of the policy it made, on the same held-out trials
    last: float  # share of the training episodes of the last ten steps that succeeded, exploration noise included
    steps: int
    seconds: float  # of its training steps


@dataclass(frozen=True)
class Study:
    """Trainings of one recipe that began with the same policy, unless their settings change imitation itself."""

    name: str
    recipe: str
    note: str
    command: str
    device: str
    commit: str
    trials: tuple[Trial, ...] = field(default=())


def read_studies(results: Path) -> list[Study]:
    """All studies kept with the rows, by name."""
    return [_read(file) for file in sorted((results / FOLDER).glob("*.json"))]


def write_study(study: Study, results: Path) -> Path:
    """Write the study to its file."""
    path = results / FOLDER / f"{study.name}.json"
    with writing(str(path)):
        make_folder(path.parent)
        content = {"schema": SCHEMA, "version": VERSION, **asdict(study)}
        lines = ",\n".join(f"  {json.dumps(trial, ensure_ascii=False)}" for trial in content.pop("trials"))
        head = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
        write_file(path, f'{head},\n "trials": [\n{lines}\n ]\n}}\n')
    return path


def _read(file: Path) -> Study:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if (content.pop("schema"), content.pop("version")) != (SCHEMA, VERSION):
            raise UserError(f"schema must be {SCHEMA!r}, version {VERSION}")
        trials = [convert(Trial, row, f"trials[{index}]") for index, row in enumerate(content.pop("trials"))]
        study = replace(convert(Study, content, ""), trials=tuple(trials))
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no study: {error}") from None
    if study.name != file.stem:
        raise UserError(f"{file} is no study of that name: it says {study.name}")
    return study
