"""Which folder a run writes to: one of its own, or that of the run it continues; refused where another one's lies."""

from __future__ import annotations

import glob
import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlinf.config.derived import total_steps
from rlinf.config.schema import TIME, Config
from rlinf.errors import UserError
from rlinf.storage.redaction import FromEnvironment, redacted
from rlinf.storage.run_folder import (
    LOG_PATH,
    RECORD,
    FolderInUseError,
    RunRecord,
    holds_results,
    locked,
    new_run_id,
    read_record,
    remove_if_empty,
)
from rlinf.storage.step_checkpoint import config_hash, newest_of_run, settings

logger = logging.getLogger(__name__)
Tree = TypeVar("Tree")
ANOTHER = "choose another runner.logger.log_path; without one, each run gets a folder of its own"


@contextmanager
def training_folder(cfg: Config) -> Iterator[Config]:
    """The config with the folder and the id of the run filled in; for the block nobody else writes there.

    Nothing of an earlier run is touched here: it is continued (runner.resume_dir), or the command is refused.
    """
    with ExitStack() as stack:
        cfg = _named_checkpoint(cfg)
        path, wanted = cfg.runner.logger.log_path, cfg.runner.resume_dir
        if TIME not in path:
            stack.enter_context(locked(Path(path), logger.warning))
            record = _owner(cfg, Path(path))
        elif wanted == "auto":
            folder, record = _continue_newest(cfg, stack) or (stack.enter_context(new_folder(path)), None)
            if record is None:
                logger.warning("runner.resume_dir=auto finds no unfinished run of these settings; %s is new", folder)
            cfg = in_folder(cfg, folder)
        else:
            cfg, record = in_folder(cfg, stack.enter_context(new_folder(path))), None
        yield with_id(cfg, record.id if record is not None else None)


@contextmanager
def evaluation_folder(cfg: Config) -> Iterator[Config]:
    """The same for an evaluation, which may also add to the folder of a run, or of evaluations, of the same recipe."""
    with ExitStack() as stack:
        if TIME in cfg.runner.logger.log_path:
            yield with_id(in_folder(cfg, stack.enter_context(new_folder(cfg.runner.logger.log_path))), None)
            return
        folder = Path(cfg.runner.logger.log_path)
        record = run_of_recipe(cfg, folder)
        if record is None:  # else the run may be writing; an evaluation only adds files and lines of its own
            stack.enter_context(locked(folder, logger.warning))
        yield with_id(cfg, None)


def run_of_recipe(cfg: Config, folder: Path) -> RunRecord | None:
    """The run in a folder, None for a folder without results; refuses one of another recipe."""
    record, name = read_record(folder), cfg.runner.logger.experiment_name
    if record is None and holds_results(folder):
        raise UserError(f"runner.logger.log_path={folder} holds results without {RECORD}; {ANOTHER}")
    if record is not None and record.name != name:
        raise UserError(f"runner.logger.log_path={folder} holds {record}, not of {name}; {ANOTHER}")
    return record


def in_folder(cfg: Config, folder: Path | str) -> Config:
    """The config with every path below runner.logger.log_path moved below `folder`."""
    old, new = cfg.runner.logger.log_path, str(folder)

    def moved(value: Any) -> Any:
        if isinstance(value, str):
            if value != old and not value.startswith(f"{old}/"):
                return value
            path = new + value[len(old) :]
            return FromEnvironment(path, value.written) if isinstance(value, FromEnvironment) else path
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: (getattr(value, f.name), moved(getattr(value, f.name))) for f in fields(value)}
            return replace(value, **{name: now for name, (was, now) in parts.items() if now is not was})
        if isinstance(value, Mapping):
            return {key: moved(inner) for key, inner in value.items()}
        return value

    return moved(cfg)


@contextmanager
def new_folder(template: str, *, key: str = LOG_PATH) -> Iterator[Path]:
    """A folder that did not exist, with the time in place of `<time>`, locked for the block; removed if it stays empty.

    It is numbered where two runs begin in one second. `key` is the setting or option that names it.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path(template.replace(TIME, stamp if number == 1 else f"{stamp}-{number}"))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{key}={folder} cannot be written: {error.strerror}") from error
        break
    try:
        with locked(folder, logger.warning, key=key):
            yield folder
    finally:
        remove_if_empty(folder)


def with_id(cfg: Config, run_id: str | None) -> Config:
    """The config with the id of its run: that of the one it continues, the one the user chose, or a new one."""
    return replace(cfg, runner=replace(cfg.runner, run_id=run_id or cfg.runner.run_id or new_run_id()))


def run_settings(path: Path) -> Path | None:
    """config.yaml of the run whose folder a path is, or lies in; None where there is none."""
    folders = (path.absolute(), *path.absolute().parents[:6])
    return next(
        (f / "config.yaml" for f in folders if (f / "config.yaml").is_file() and (f / "metrics.jsonl").is_file()), None
    )


def _named_checkpoint(cfg: Config) -> Config:
    """Where runner.resume_dir names a folder: the checkpoint it means, and the folder of the run that saved it.

    A run folder stands for the checkpoint it saved last, whatever its step. Without a log_path of its own the run goes
    on where that run wrote, unless its settings are others.
    """
    wanted = cfg.runner.resume_dir
    if wanted in (None, "auto"):
        return cfg
    folder = Path(wanted).expanduser()
    record = read_record(folder)
    if record is not None:
        newest = newest_of_run(str(folder / record.name / "checkpoints"))
        if newest is None:
            raise UserError(f"runner.resume_dir={wanted} is {record}, which has saved no checkpoint")
        folder = newest
    cfg = replace(cfg, runner=replace(cfg.runner, resume_dir=str(folder)))
    owner = _run_of(folder)
    record = read_record(owner) if owner is not None else None
    if owner is None or record is None or TIME not in cfg.runner.logger.log_path:
        return cfg
    if other := _differences(record, cfg):
        logger.warning("this run continues from %s in a folder of its own: %s", folder, other)
        return cfg
    return in_folder(cfg, owner)


def _run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in."""
    return next((p for p in checkpoint.parents if (p / RECORD).is_file()), None)


def _owner(cfg: Config, folder: Path) -> RunRecord | None:
    """The run in a folder, if this command continues it; None for a folder without results; refuses any other."""
    record, wanted, key = read_record(folder), cfg.runner.resume_dir, f"runner.logger.log_path={folder}"
    if not holds_results(folder):
        return record if record is not None and not _differences(record, cfg) and wanted is not None else None
    if record is None:
        raise UserError(f"{key} holds results of a run without {RECORD}; {ANOTHER}")
    if wanted is None and record.kind != "train":
        raise UserError(f"{key} holds {record} with `rlinf {record.kind}`; {ANOTHER}")
    if wanted is None:
        raise UserError(f"{key} holds {record}: continue it with runner.resume_dir=auto, or {ANOTHER}")
    run = _run_of(Path(wanted).absolute()) if wanted != "auto" else folder
    if run is None or run.resolve() != folder.resolve():  # either may be named through a link
        raise UserError(f"{key} holds {record}, and runner.resume_dir={wanted} is of another run; {ANOTHER}")
    if other := _differences(record, cfg):
        raise UserError(f"runner.resume_dir={wanted}: {folder} holds {record}, with other settings: {other}; {ANOTHER}")
    return record


def _continue_newest(cfg: Config, stack: ExitStack) -> tuple[Path, RunRecord] | None:
    """The newest unfinished run of this recipe and config, its folder locked; None where there is none."""
    found = []
    for path in map(Path, glob.glob(glob.escape(cfg.runner.logger.log_path).replace(TIME, "*"))):
        try:
            record = read_record(path)
        except UserError as error:
            logger.warning("runner.resume_dir=auto skips %s: its %s cannot be read (%s)", path, RECORD, error.__cause__)
            continue
        if record is not None and record.kind == "train" and not _differences(record, cfg):
            found.append((record.created, path, record))
    for _, path, record in sorted(found, key=lambda run: run[:2], reverse=True):
        if record.finished_steps >= total_steps(cfg):
            continue
        try:
            stack.enter_context(locked(path, logger.warning))
        except FolderInUseError as error:
            logger.warning("%s; looking for an earlier one", error)
            continue
        return path, record
    return None


def _differences(record: RunRecord, cfg: Config) -> str:
    """The keys of what is learnt and how that a run and this config do not share, in words; empty for none."""
    if record.kind != "train":
        return f"it is of `rlinf {record.kind}`"
    if record.config_hash == config_hash(cfg):
        return ""
    here, there = redacted(settings(cfg)), record.settings
    keys = [k for k in sorted({*here, *there}) if str(here.get(k, "absent")) != str(there.get(k, "absent"))]
    shown = [f"{k} is {here.get(k, 'absent')}, there {there.get(k, 'absent')}" for k in keys[:3]]
    return "; ".join([*shown, *([f"{len(keys) - 3} more"] if len(keys) > 3 else [])]) or "of another version"
