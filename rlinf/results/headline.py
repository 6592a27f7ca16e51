"""results/NAME.json: a row of docs/results.md, success before and after training, seed by seed. Torch-free.

`rlinf record` makes it from what runs have written, `python -m rlinf.commands.results_page` makes the page of all rows.
results/checkpoints/NAME holds a trained policy of the row, by which anybody can repeat its evaluation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf.errors import UserError, writing
from rlinf.results.protocol import POLICY, Difference, Protocol, differences, protocol_hash
from rlinf.storage.atomic_folder import make_folder, write_file
from rlinf.typed import convert

SCHEMA, VERSION = "rlinf-headline", 1
CHECKPOINTS = "checkpoints"  # in the folder of the rows
MAX_POINTS = 60  # of a curve
MAX_CHECKPOINT_BYTES = 60_000_000  # of all policies that are kept with the rows
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
OF_A_SEED = (f"{POLICY}seed",)  # keys of a protocol in which seeds of one row differ
SEED = "runner.seed"
_NUMBERS = re.compile(r'\[\n[^\[\]{}"]*\]')  # a list of numbers, which is written to one line


@dataclass(frozen=True)
class Measured:
    """One evaluation: what a policy scored under the row's protocol."""

    step: int  # training step of the policy
    seed: int  # of the noise of its actions
    policy: str | None  # SHA-256 of its files; None where they were not saved
    number: str  # what the benchmark is ranked by: success, or a mean such as avg_num_subtasks
    value: float
    low: float  # end of the 95 % interval
    high: float
    success: dict[str, float]  # successes, trials, rate, low, high
    table: dict[str, Any]  # the benchmark's own: title, columns, rows
    tasks: dict[str, list[int]]  # successes and trials of every task, where there are several
    device: dict[str, Any]  # kind, name and threads of what computed the actions
    torch: str  # its version
    commit: str
    date: str
    command: str

    @property
    def machine(self) -> tuple[Any, ...]:
        """On equal ones, under an equal protocol, the same policy gives the same counts."""
        return (*(self.device.get(key) for key in ("kind", "name", "threads")), self.torch)


@dataclass(frozen=True)
class TrainedSeed:
    """One training run of the row."""

    seed: int
    run: str  # its id
    steps: int
    minutes: float  # of all training steps, evaluations among them included
    device: str
    commit: str
    commands: list[str]  # what made the policy it began with, then every start; a run that was continued has several
    settings: dict[str, Any]  # what is learnt and how, dotted; paths and lengths are no part of it
    curve: list[list[float]]  # training step and the mean of `curve_number` over its episodes, at most MAX_POINTS
    before: Measured | None = None  # none only where the row is a failure
    after: Measured | None = None
    curve_number: str | None = None  # success where training logs no other; None: the number of the evaluations


@dataclass(frozen=True)
class Shipped:
    """The policy that is kept with the row."""

    checkpoint: str  # its folder, relative to that of the rows
    measured: Measured


@dataclass(frozen=True)
class Headline:
    """A row with its seeds."""

    name: str
    recipe: str
    note: str  # a sentence: what is learnt, or why it failed
    failed: bool  # tried, and did not work
    simulator: str
    suite: str
    protocol: Protocol  # of every evaluation of the row, but for OF_A_SEED; empty where there is none
    seeds: tuple[TrainedSeed, ...] = field(default=())
    shipped: Shipped | None = None

    @property
    def protocol_hash(self) -> str:
        """The digest of the protocol that all seeds share."""
        return protocol_hash(self.protocol)

    def to_json(self) -> dict[str, Any]:
        head = {"schema": SCHEMA, "version": VERSION, "name": self.name}
        return head | {"protocol_hash": self.protocol_hash} | asdict(self)

    def measured(self) -> Iterator[tuple[TrainedSeed, Measured, Measured]]:
        """The seeds that were evaluated before and after."""
        for run in self.seeds:
            if run.before is not None and run.after is not None:
                yield run, run.before, run.after


def shared_protocol(protocol: Mapping[str, Any]) -> Protocol:
    """The part of an evaluation's protocol that the seeds of a row share."""
    return {key: value for key, value in protocol.items() if key not in OF_A_SEED}


def check_protocol(headline: Headline, protocol: Mapping[str, Any], what: str) -> None:
    """Refuse an evaluation that was not played under the row's protocol; `what` names it in the error."""
    if found := differences(headline.protocol, shared_protocol(protocol)):
        raise UserError(f"{what} was played under another protocol than {headline.name}: {listed(found)}")


def with_seed(headline: Headline, run: TrainedSeed, *, replaces: bool = False) -> Headline:
    """The row with one more seed, or with this run in the place of that seed's."""
    others = [other for other in headline.seeds if other.seed != run.seed]
    if len(others) < len(headline.seeds) and not replaces:
        raise UserError(
            f"{headline.name} has a run of seed {run.seed} already; --replace puts this one in its place, and another "
            "way of training is a row of its own under another name"
        )
    for other in others[:1]:
        both = [{k: v for k, v in one.settings.items() if k != SEED} for one in (other, run)]
        if found := differences(*both):
            raise UserError(
                f"the seeds of a row are trained alike, seed {other.seed} of {headline.name} and this run are not: "
                f"{listed(found)}; give this run's row another name"
            )
    kept = headline.shipped if len(others) == len(headline.seeds) else None  # perhaps the policy of what is replaced
    return replace(headline, seeds=tuple(sorted([*others, run], key=lambda one: one.seed)), shipped=kept)


def read_headlines(folder: Path) -> list[Headline]:
    """Every row of a folder, by name."""
    return [read_headline(file) for file in sorted(folder.glob("*.json"))]


def read_headline(file: Path) -> Headline:
    """The row of a file; UserError says what of it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged, it is no whole JSON file: {error}") from error
    if not isinstance(content, dict) or (content.get("schema"), content.get("version")) != (SCHEMA, VERSION):
        raise UserError(f"{file} is no row of results: schema must be {SCHEMA!r}, version {VERSION}")
    fields = {key: value for key, value in content.items() if key not in ("schema", "version", "protocol_hash")}
    try:
        headline = _parsed(fields)
    except (UserError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: {error}") from None
    if headline.name != file.stem or headline.protocol_hash != content.get("protocol_hash"):
        raise UserError(f"{file} is damaged: its name or its protocol is not the one it was written with")
    return headline


def _parsed(content: dict[str, Any]) -> Headline:
    seeds, shipped = content.pop("seeds", ()), content.pop("shipped", None)
    runs = []
    for index, run in enumerate(seeds):
        path = f"seeds[{index}]"
        given = {end: run.pop(end, None) for end in ("before", "after")}
        ends = {end: convert(Measured, one, f"{path}.{end}") for end, one in given.items() if one is not None}
        runs.append(replace(convert(TrainedSeed, run, path), **ends))
    policy = None
    if shipped is not None:
        measured = convert(Measured, shipped["measured"], "shipped.measured")
        policy = Shipped(str(shipped["checkpoint"]), measured)
    return replace(convert(Headline, content, ""), seeds=tuple(runs), shipped=policy)


def write_headline(headline: Headline, folder: Path) -> Path:
    """Write the row to its file."""
    path = folder / f"{headline.name}.json"
    with writing(str(path)):
        make_folder(folder)
        text = json.dumps(headline.to_json(), indent=1, ensure_ascii=False)
        write_file(path, _NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")
    return path


def check_sizes(folder: Path) -> int:
    """The bytes of all policies that are kept with the rows; UserError where they are too many."""
    files = [file for file in (folder / CHECKPOINTS).rglob("*") if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    if total > MAX_CHECKPOINT_BYTES:
        largest = max(files, key=lambda file: file.stat().st_size)
        raise UserError(
            f"{folder / CHECKPOINTS} holds {total / 1e6:.1f} MB, at most {MAX_CHECKPOINT_BYTES / 1e6:.0f} MB may be "
            f"kept with the rows; the largest file is {largest}. `rlinf export --precision bf16` halves a policy"
        )
    return total


def listed(found: Sequence[Difference], most: int = 4) -> str:
    """The first differences, and how many more there are."""
    more = f"; and {len(found) - most} more keys" if len(found) > most else ""
    return "; ".join(map(str, found[:most])) + more
