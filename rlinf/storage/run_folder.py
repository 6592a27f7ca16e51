"""The folder of a run: run.json says which run owns it, run.lock who is writing to it now."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.storage.atomic_folder import make_folder, try_lock, write_file
from rlinf.storage.provenance import describe_process, describe_start, now
from rlinf.storage.redaction import redacted

RECORD, LOCK = "run.json", "run.lock"
LOOKING_SECONDS = 0.5  # far more than a look at whether a folder is locked takes
LOG_PATH = "runner.logger.log_path"  # the setting that names the folder


class FolderInUseError(UserError):
    """Another process writes to the folder."""


@dataclass(frozen=True)
class RunRecord:
    """What run.json holds."""

    id: str  # also in every other file of the run
    kind: str  # train, eval, sft
    name: str  # runner.logger.experiment_name
    config_hash: str
    settings: dict[str, Any]  # the keys that the hash is made of, secrets redacted
    created: str  # local time
    starts: tuple[dict[str, Any], ...] = ()  # command, commit, packages and machine of each, resumed ones too
    finished_steps: int = 0  # of training, once the run has reached its end; more may be asked for later

    def __str__(self) -> str:
        return f"run {self.id} of {self.name}, begun {self.created}"


def new_run_id() -> str:
    """A random name for a run: eight hexadecimal digits."""
    return secrets.token_hex(4)


def read_record(folder: Path) -> RunRecord | None:
    """The run that owns a folder; None where no run.json says so."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = RunRecord(**json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(record.settings, dict) or not isinstance(record.finished_steps, int):
            raise TypeError("settings or finished_steps is of another type")
        return replace(record, starts=tuple(record.starts))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); choose another runner.logger.log_path") from error


def record_start(
    folder: Path,
    *,
    run_id: str,
    kind: str,
    name: str,
    config_hash: str,
    settings: Mapping[str, Any],
    gpus: Sequence[str],
) -> None:
    """Note in run.json that a run starts now: a new one, or the one that owns the folder once more."""
    record = read_record(folder)
    if record is None or record.id != run_id:
        record = RunRecord(run_id, kind, name, config_hash, redacted(settings), now())
    record = replace(record, starts=(*record.starts, describe_start(gpus)), finished_steps=0)
    write_record(folder, record)


def write_record(folder: Path, record: RunRecord) -> None:
    """Write run.json."""
    write_file(folder / RECORD, json.dumps(asdict(record), indent=1, default=str) + "\n")


def holds_results(folder: Path) -> bool:
    """Whether a run has left anything that is worth keeping: logged steps, evaluations, checkpoints."""
    metrics = folder / "metrics.jsonl"
    patterns = ("eval/*.json", "eval/*/result.json", "checkpoints/global_step_*", "*/checkpoints/global_step_*")
    return (metrics.is_file() and metrics.stat().st_size > 0) or any(any(folder.glob(p)) for p in patterns)


@contextmanager
def locked(folder: Path, warn: Callable[[str], None], *, key: str = LOG_PATH) -> Iterator[None]:
    """Be the only one who writes to a folder for the block, or raise FolderInUseError naming who does.

    The kernel gives the lock back when its holder dies, however that happens; what a dead process of this machine left
    is taken over. A folder that is made here and left empty is removed. `key` is the setting or option that named it.
    """
    path, new = folder / LOCK, not folder.exists()
    try:
        make_folder(folder)
        descriptor = _acquire(path, warn, key)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(describe_process()).encode(), 0)
    except OSError as error:
        raise UserError(f"{key}={folder} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        if new:
            remove_if_empty(folder)


def is_locked(folder: Path) -> bool:
    """Whether a process writes to a folder now; does not keep others who ask, or who begin to write, from it."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing."""
    with suppress(OSError):
        folder.rmdir()


def _acquire(path: Path, warn: Callable[[str], None], key: str) -> int:
    """An open descriptor of the lock file that this process holds."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            holder = _holder(descriptor)
            free = _lock_soon(descriptor)
            if free is None:  # no locks here: whether the process that is named is gone
                free = holder is None or holder["pid"] == os.getpid() or not Path(f"/proc/{holder['pid']}").exists()
            if not free or (holder and holder["host"] != socket.gethostname()):
                who = _describe(holder) if holder else "another process"
                hint = f"; if that run is over, delete {path}" if free else ""
                where = f"{key}={path.parent}"
                raise FolderInUseError(f"{where} is in use by {who}: wait for it, or choose another folder{hint}")
            if _is_same_file(path, descriptor):
                if holder:
                    warn(f"{path} was left by {_describe(holder)}, which is gone; taken over")
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder deleted it meanwhile


def _lock_soon(descriptor: int) -> bool | None:
    """As try_lock; waits for `is_locked` of another process, which has its shared lock for a moment."""
    deadline = time.monotonic() + LOOKING_SECONDS
    while (free := try_lock(descriptor)) is False and time.monotonic() < deadline:
        time.sleep(0.01)
    return free


def _holder(descriptor: int) -> dict[str, Any] | None:
    """What the lock file says of its holder; None where it says nothing."""
    with suppress(ValueError):
        found = json.loads(os.pread(descriptor, 1 << 16, 0))
        if isinstance(found, dict) and {"command", "at", "host", "pid"} <= found.keys():
            return found
    return None


def _describe(holder: Mapping[str, Any]) -> str:
    return f"pid {holder['pid']} on {holder['host']} since {holder['at']} ({holder['command']})"


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
