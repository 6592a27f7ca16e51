"""result.json: what an evaluation found, how it was played and by whom (docs/results_file.md). Torch-free.

<run folder>/eval/step_<N>/result.json, or step_<N>_2 and so on where another run has written one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, get_origin

from rlinf.errors import UserError, writing
from rlinf.results.identity import PolicyIdentity
from rlinf.results.protocol import Protocol, protocol_hash
from rlinf.storage.atomic_folder import flush, make_folder, write_file
from rlinf.typed import check_value, hints

SCHEMA, VERSION, FILE = "rlinf-result", 1, "result.json"
_STEP = re.compile(r"step_(\d+)(?:_(\d+))?$")
_MEASURED: dict[str, Any] = {"episode_return": Real, "extra": dict[str, Real], "metrics": dict[str, Real]}  # may be NaN


@dataclass(frozen=True)
class Episode:
    """One trial as it was played; `return` is `episode_return` in Python."""

    index: int  # of the trial, from 0
    suite: str
    task: str
    reset_id: int  # which start; the same scene in every evaluation of the suite
    seed: int
    env_id: int  # the env that played it
    steps: int  # actions executed
    episode_return: float
    success_once: bool
    success_at_end: bool
    extra: dict[str, float] = field(default_factory=dict)  # quantities that the simulator measures
    video: str | None = None  # relative to the run folder, or absolute
    first_call: int = 0  # policy calls of its batch before its own
    calls: int = 0  # policy calls that it took
    instructions: tuple[tuple[int, str], ...] = ()  # (call of the episode, what the policy was told from then on)

    def to_json(self) -> dict[str, Any]:
        return {"return" if name == "episode_return" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], where: str) -> Episode:
        """Read what `to_json` wrote; fields of later versions are ignored. UserError names a field of another type."""
        given = {"episode_return" if name == "return" else name: value for name, value in saved.items()}
        return cls(**_checked(cls, given, where))


@dataclass(frozen=True)
class Result:
    """A result.json. Rates are objects of successes, trials, rate, low and high: a 95 % Wilson interval."""

    step: int  # training step of the policy; 0 where none is known
    run: str  # id of the run that evaluated
    recipe: str
    policy: PolicyIdentity
    protocol: Protocol
    success: dict[str, float]
    groups: dict[str, dict[str, float]]  # rates of groups of tasks, e.g. difficulty classes
    tasks: dict[str, dict[str, float]]  # rates of tasks, where there are several
    rates: dict[str, dict[str, float]]  # rates that the simulator itself measures, e.g. success_len_1
    table: dict[str, Any]  # the benchmark's own: title, columns, rows
    metrics: dict[str, float]  # docs/metrics.md, without eval/
    episodes: tuple[Episode, ...]  # in the order of the trials
    provenance: dict[str, Any]  # command, time, machine, git commit, versions
    config: dict[str, Any]  # resolved, secrets redacted: enough to play an episode again
    device: dict[str, Any] = field(default_factory=dict)  # kind, name and threads of what computed the actions
    batches: tuple[tuple[int, ...], ...] = ()  # env ids of each batch that policy calls were made for
    selection: dict[str, Any] = field(default_factory=dict)  # how the policy was chosen, where it was (`--best`)
    path: Path | None = None  # the file it was read from or written to

    @property
    def protocol_hash(self) -> str:
        """One digest of everything that changes a number."""
        return protocol_hash(self.protocol)

    def to_json(self) -> dict[str, Any]:
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "path"}
        content["policy"], content["episodes"] = asdict(self.policy), [e.to_json() for e in self.episodes]
        first = ("step", "run", "recipe", "policy", "protocol")
        head = {"schema": SCHEMA, "version": VERSION, **{name: content.pop(name) for name in first}}
        return {**head, "protocol_hash": self.protocol_hash, **content}

    @property
    def run_folder(self) -> Path:
        """The folder of the run that wrote it."""
        assert self.path is not None
        return self.path.parents[2]


def write_result(result: Result, run_folder: Path) -> Result:
    """Write to the first free folder eval/step_N, step_N_2, ...; one that the same run wrote is replaced.

    Making the folder is what takes it, so that evaluations which end at the same time get one each.
    """
    names = itertools.chain([f"step_{result.step}"], (f"step_{result.step}_{n}" for n in itertools.count(2)))
    with writing(str(run_folder / "eval")):
        make_folder(run_folder / "eval")
        path = next(p for name in names if _take(p := run_folder / "eval" / name / FILE, result.run))
    try:
        return _write(replace(result, path=path))
    except BaseException:
        with suppress(OSError):  # it holds an earlier result
            path.parent.rmdir()
        raise


def rewrite(result: Result) -> Result:
    """Write a result that has changed to its own file."""
    return _write(result)


def _write(result: Result) -> Result:
    assert result.path is not None
    with writing(str(result.path)):
        make_folder(result.path.parent)
        write_file(result.path, json.dumps(result.to_json(), indent=1) + "\n")
    return result


def read_result(path: str | Path) -> Result:
    """The result of a file, of its folder, or the newest of a run folder; UserError where there is none."""
    given = Path(path).expanduser()
    file = find_result(given) if given.is_dir() else given
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; evaluations write <run folder>/eval/step_N/{FILE}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged, it is no whole JSON file: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        older = isinstance(content, dict) and "episodes" in content
        hint = "it is of an earlier version of rlinf: evaluate again" if older else f"schema must be {SCHEMA!r}"
        raise UserError(f"{file} is no result of an evaluation; {hint}")
    if content.get("version") != VERSION:
        raise UserError(f"{file} has version {content.get('version')}, this rlinf reads version {VERSION}")
    try:
        return _parsed(content, file.absolute())
    except UserError as error:
        raise UserError(f"{file} is damaged: {error}") from None


def _parsed(content: dict[str, Any], path: Path) -> Result:
    """The result that a file holds; UserError names what is missing or of another type."""
    content = {name: value for name, value in content.items() if name != "path"}
    check_value(dict[str, Any], content.get("policy"), "policy")
    check_value(list[dict[str, Any]], content.get("episodes"), "episodes")
    content["policy"] = PolicyIdentity(**_checked(PolicyIdentity, content["policy"], "policy"))
    episodes = [Episode.from_json(saved, f"episodes[{i}]") for i, saved in enumerate(content["episodes"])]
    if len({e.index for e in episodes}) < len(episodes):
        raise UserError("two of its episodes have the same index")
    return Result(**_checked(Result, content | {"episodes": tuple(episodes)}, ""), path=path)


def _checked(cls: type, saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of the fields that a dataclass has, checked against their annotations; lists become tuples."""
    values: dict[str, Any] = {}
    for f in fields(cls):
        path = ".".join(filter(None, (where, "return" if f.name == "episode_return" else f.name)))
        if f.name in saved:
            hint, value = hints(cls)[f.name], saved[f.name]
            check_value(_MEASURED.get(f.name, hint), value, path)
            values[f.name] = _frozen(value) if get_origin(hint) is tuple else value
        elif f.default is MISSING and f.default_factory is MISSING:
            raise UserError(f"{path} is missing")
    return values


def _frozen(value: Any) -> Any:
    """Nested lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def saved_config(result: Result) -> dict[str, Any]:
    """The config of the evaluation; UserError where blocks of it are missing, without which nobody could play it."""
    for key in (
        "runner",
        "runner.logger",
        "runner.logger.experiment_name",
        "actor",
        "actor.model",
        "rollout",
        "cluster",
    ):
        value: Any = result.config
        for name in key.split("."):
            value = value.get(name)
        if not isinstance(value, str if key.endswith("_name") else dict):
            raise UserError(f"{result.path} is damaged: its config has no {key}")
    return result.config


def find_result(folder: Path) -> Path:
    """The result.json of a folder eval/step_N, or the newest below a run folder."""
    if (folder / FILE).is_file():
        return folder / FILE
    found = results_of_run(folder)
    if not found:
        raise UserError(f"{folder} holds no eval/step_N/{FILE}: it is no run folder, or nothing was evaluated there")
    return max(found, key=lambda file: file.stat().st_mtime)


def results_of_run(folder: Path) -> list[Path]:
    """Every result.json of a run folder, by training step."""
    found = [(m, file) for file in folder.glob(f"eval/step_*/{FILE}") if (m := _STEP.fullmatch(file.parent.name))]
    return [file for _, file in sorted(found, key=lambda row: (int(row[0][1]), int(row[0][2] or 1)))]


def _take(path: Path, run_id: str) -> bool:
    """Make the folder of a result; False where it is there, unless it holds one of the same run."""
    try:
        path.parent.mkdir()
    except FileExistsError:
        return _is_own(path, run_id)
    flush(path.parent.parent)
    return True


def _is_own(path: Path, run_id: str) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["run"] == run_id
    except (OSError, ValueError, KeyError, TypeError):
        return False
