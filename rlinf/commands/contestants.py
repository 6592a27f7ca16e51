"""What the arguments of `rlinf compare` name: policies that will be played, and results of earlier evaluations.

Torch is imported where there is a policy to play, after everything that the command line can get wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.commands.run_folders import run_settings
from rlinf.config.load import load_config, stored_config
from rlinf.config.schema import Config
from rlinf.errors import UserError
from rlinf.results.comparison import Trial
from rlinf.results.identity import PolicyIdentity
from rlinf.results.result import FILE, Result, read_result, results_of_run, saved_config
from rlinf.storage.run_folder import RECORD, read_record
from rlinf.storage.step_checkpoint import checkpoints_of_run, newest_of_run, policy_folder, verify_ckpt_path

if TYPE_CHECKING:
    from rlinf.commands.played import Played

EXPERT, RANDOM = "expert", "random"  # words in place of a path
NOTHING = [
    "runner.ckpt_path=null",
    "runner.resume_dir=null",
    "actor.model.model_path=null",
    "actor.model.lora_path=null",
]
COMPARISON = "comparison.json"
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")  # endings of files that policies are stored in
_REMOVED_KEY = re.compile(r"~[a-z_]+(\.\w+)*")


@dataclass
class Recorded:
    """A policy of which a result.json tells how it did."""

    name: str
    argument: str
    result: Result
    outcomes: dict[Trial, bool] = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = {(e.suite, e.task, e.reset_id): e.success_once for e in self.result.episodes}

    @property
    def protocol(self) -> dict[str, Any]:
        """Of the evaluation."""
        return self.result.protocol

    @property
    def identity(self) -> PolicyIdentity:
        """Which policy played."""
        return self.result.policy

    @property
    def file(self) -> Path | None:
        """Its result.json."""
        return self.result.path


def find_contestants(arguments: Sequence[str], recipe: str | None, overrides: Sequence[str]) -> list[Recorded | Played]:
    """What each argument names.

    Policies play under `recipe`, else under the settings of the run that they lie in, else under those of the first
    argument that has any (a result has those of its evaluation).
    """
    paths = [None if text in (EXPERT, RANDOM) else _found(text) for text in arguments]
    results = [read_result(path) if path is not None and _holds_result(path) else None for path in paths]
    _refuse_the_same(arguments, [r.path if r is not None else p for p, r in zip(paths, results, strict=True)])
    settings = [recipe or r or (p and run_settings(p)) for p, r in zip(paths, results, strict=True)]
    default = next((found for found in settings if found is not None), None)
    if default is None:
        raise UserError(_without_settings(arguments))
    made: list[Recorded | Played] = []
    for text, name, path, result, own in zip(arguments, labels(arguments), paths, results, settings, strict=True):
        if result is not None:
            made.append(Recorded(name, text, result))
            continue
        cfg = _load(own or default, [*overrides, *_policy_settings(text, path)])
        from rlinf.commands.played import Played

        made.append(Played(name, text, cfg))
    return made


def _refuse_the_same(arguments: Sequence[str], places: Sequence[Path | None]) -> None:
    """Refuse a policy or a result that is named twice, however it is written."""
    named: dict[str | Path, str] = {}
    for text, place in zip(arguments, places, strict=True):
        meant = text if place is None else place.resolve()
        if (first := named.get(meant)) is not None:
            same = f"{text} is named twice" if first == text else f"{first} and {text} both mean {place}"
            raise UserError(f"{same}; each policy or result is compared once")
        named[meant] = text


def _without_settings(arguments: Sequence[str]) -> str:
    """What is missing where no argument has settings to play under."""
    paths = [text for text in arguments if text not in (EXPERT, RANDOM)]
    if not paths:
        return f"{' and '.join(arguments)} need --recipe NAME: the recipe whose trials they play"
    lie = "lies" if len(paths) == 1 else "lie"
    return (
        f"{' and '.join(paths)} {lie} in no run whose settings could be used; name the recipe to play under: "
        "--recipe NAME, and settings as KEY=VALUE"
    )


def _load(settings: str | Path | Result, overrides: Sequence[str]) -> Config:
    """The config of a recipe, of the file that a run wrote, or of an evaluation."""
    if isinstance(settings, Result):
        return stored_config(saved_config(settings), str(settings.path), overrides)
    return load_config(str(settings), overrides, purpose="eval")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Policies and results, and the settings among them: KEY=VALUE, or ~KEY, that is no path."""

    def is_setting(text: str) -> bool:
        return ("=" in text or bool(_REMOVED_KEY.fullmatch(text))) and not os.path.exists(os.path.expanduser(text))

    return [t for t in arguments if not is_setting(t)], [t for t in arguments if is_setting(t)]


def labels(arguments: Sequence[str]) -> list[str]:
    """A short name for each argument: the end of its path as it was typed, without what all paths end with.

    A result is called by its run folder; by its step where several of one folder are named.
    """
    parts = [[p for p in _typed(text).parts if p != FILE] or [text] for text in arguments]
    runs = [p[:-2] if len(p) > 2 and p[-2] == "eval" and p[-1].startswith("step_") else p for p in parts]
    if len({tuple(p) for p in runs}) == len({tuple(p) for p in parts}):
        parts = runs
    while len({tuple(p) for p in parts}) > 1 and len({p[-1] for p in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [p[:-1] for p in parts]
    longest = max(map(len, parts))
    distinct = len({tuple(p) for p in parts})
    depth = next(n for n in range(1, longest + 1) if len({tuple(p[-n:]) for p in parts}) == distinct)
    names = ["/".join(p[-depth:]) for p in parts]
    return [
        f"{name} ({count + 1})" if (count := names[:place].count(name)) else name for place, name in enumerate(names)
    ]


def _typed(text: str) -> Path:
    """The path of an argument; one that ends with no name (`.`, `..`) in full."""
    path = Path(text)
    return path if path.name not in ("", "..") else path.resolve()


def _found(text: str) -> Path:
    """The path of an argument, of a run folder its newest checkpoint; refuses what is no policy, run or result."""
    path = Path(os.path.expanduser(text))
    if not path.exists():
        raise UserError(
            f"{text} does not exist; name a policy folder, a checkpoint (global_step_N), a run folder, a {FILE}, "
            f"or one of the words {EXPERT} and {RANDOM}"
        )
    if _holds_result(path):
        return path
    if (newest := newest_of_run(text, key="policy")) is not None:
        print(f"{text} is a run; its newest checkpoint is compared, {newest}")
        return newest
    if not _holds_policy(path):
        verify_ckpt_path(text, key="policy")  # of a damaged global_step_N, what it lacks
        compared = (
            "; it was written by `rlinf compare`: name the results in it" if (path / COMPARISON).is_file() else ""
        )
        raise UserError(
            f"{text} is no policy, run or result: it holds no config.json, no weights, no checkpoint and no "
            f"eval/step_N/{FILE}{compared}"
        )
    return path


def _holds_result(path: Path) -> bool:
    """Whether a path is a result, and no policy: result.json, eval/step_N, or a folder of evaluations alone."""
    if path.is_file():
        return path.suffix == ".json"
    if (path / FILE).is_file():
        return True
    try:
        record = read_record(path)
    except UserError as error:
        raise UserError(f"{path / RECORD} cannot be read ({error.__cause__})") from error
    if record is not None and record.kind == "eval":
        return True
    return bool(results_of_run(path)) and not checkpoints_of_run(path) and not _holds_policy(path)


def _holds_policy(path: Path) -> bool:
    """Whether a path is a file of weights, or a folder with such files or a config.json."""
    if (folder := policy_folder(str(path))) is None:
        return path.suffix in WEIGHTS
    places = (folder, folder / "model_state_dict", folder / "actor" / "model_state_dict")
    files = [file for place in places if place.is_dir() for file in place.iterdir()]
    return (folder / "config.json").is_file() or any(file.suffix in WEIGHTS for file in files)


def _policy_settings(text: str, path: Path | None) -> list[str]:
    """The settings under which an evaluation plays what an argument names."""
    if path is None:
        return [*NOTHING, f"runner.eval_expert={text == EXPERT}", f"runner.eval_random={text == RANDOM}"]
    verify_ckpt_path(str(path), key="policy")
    return [
        "runner.resume_dir=null",
        "runner.eval_expert=false",
        "runner.eval_random=false",
        f"runner.ckpt_path={path}",
    ]
