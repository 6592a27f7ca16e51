"""Where metrics go: always metrics.jsonl, and any of TensorBoard, Weights & Biases, SwanLab."""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import yaml

from rlinf.config.schema import LoggerConfig
from rlinf.errors import UserError, install_line, writing
from rlinf.metrics.logger_modes import choose_mode, offline_note
from rlinf.metrics.names import expand
from rlinf.storage.atomic_folder import make_folder, write_file
from rlinf.storage.redaction import redacted

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A place that shows curves."""

    note: str  # what the user should know about where the curves go; may be empty

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Opened(NamedTuple):
    """What a backend is opened with."""

    cfg: LoggerConfig
    config_dict: Mapping[str, Any]  # of the whole run
    resume_step: int | None
    appends: bool = False
    run_id: str = ""


class MetricLogger:
    """Writes each step's metrics, under canonical names and aliases, to metrics.jsonl and the chosen backends.

    A step is logged once, before its checkpoint is saved: a run resumed at `resume_step` then finds every earlier line.
    `resume_step` None or 0 starts a new metrics.jsonl and keeps an old one under another name; with `appends`, as in an
    evaluation of an earlier run's checkpoint, what the folder holds stays as it is and lines are added. Lines and
    config.yaml carry `run_id`; secrets of the config are written nowhere.
    """

    def __init__(
        self,
        cfg: LoggerConfig,
        config_dict: Mapping[str, Any],
        *,
        resume_step: int | None,
        appends: bool = False,
        run_id: str = "",
    ) -> None:
        check_backends(cfg)
        folder = Path(cfg.log_path)
        make_folder(folder)
        opened = Opened(cfg, redacted(config_dict), resume_step, appends, run_id)
        with writing(str(folder / "config.yaml")):
            _write_config(folder / "config.yaml", opened)
        self._jsonl = JsonlLog(folder / "metrics.jsonl", resume_step=resume_step, appends=appends, run_id=run_id)
        self._warned: set[str] = set()
        self._backends: dict[str, Backend] = {}
        for name in cfg.logger_backends:
            self._guard(name, lambda name=name: self._backends.update({name: BACKENDS[name](opened)}))

    @property
    def notes(self) -> list[str]:
        """One line for each backend that chose its mode by itself."""
        return [backend.note for backend in self._backends.values() if backend.note]

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl; -1 before the first."""
        return self._jsonl.last_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; an undocumented name is an error, a backend that fails is a warning."""
        expanded = expand(metrics)
        self._jsonl.write(step, expanded)
        for name, backend in self._backends.items():
            self._guard(name, backend.log, step, expanded)

    def close(self) -> None:
        """Flush and close everything."""
        self._jsonl.close()
        for name, backend in self._backends.items():
            self._guard(name, backend.close)

    def _guard(self, name: str, action: Callable[..., None], *args: Any) -> None:
        """Run `action`; a dashboard that is down must not stop training, whatever it raises.

        A UserError is the service's refusal of a mode that the user named.
        """
        try:
            action(*args)
        except UserError:
            raise
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                text = "logger backend %s failed (%s); the run goes on, metrics.jsonl is complete"
                logger.warning(text, name, error)


class JsonlLog:
    """metrics.jsonl: one JSON object per step, in rising order within a run; not finite values are null.

    A line is on the disk when `write` returns: a checkpoint saved after it never lacks it, whatever happens.
    """

    def __init__(self, path: Path, *, resume_step: int | None, appends: bool = False, run_id: str = "") -> None:
        self.last_step, self._run = -1, {"run": run_id} if run_id else {}
        self._appends = appends  # then nothing is rewritten: a training run may have the file open
        if path.exists() and not appends:
            if not resume_step:
                path.rename(_unused_name(path))
            else:
                self.last_step = _drop_after(path, resume_step)
        self._path, self._file = path, path.open("a+b", buffering=0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self.last_step:
            raise ValueError(
                f"step {step} was logged already (last step {self.last_step}); log each step once, in order"
            )
        values = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        line = (json.dumps({"step": step, **self._run, **values}, allow_nan=False) + "\n").encode()
        with writing(str(self._path)):
            whole = os.fstat(self._file.fileno()).st_size
            if whole and os.pread(self._file.fileno(), 1, whole - 1) != b"\n":
                line = b"\n" + line  # the last line was cut short: readers leave it out, and it alone
            try:
                while line:  # a disk that is almost full takes a part
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:
                if not self._appends:
                    self._file.truncate(whole)
                raise
        self.last_step = step

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last one cut short by a kill is dropped, and so is, with a warning, any other
    that is not an object with a step."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError("it is not an object with a step")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            logger.warning("%s: line %d is left out (%s)", path, number, error)
    return rows


class TensorBoardBackend:
    """`<log_path>/tensorboard`, with the resolved config beside the events."""

    note = ""

    def __init__(self, opened: Opened) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder, resume_step = Path(opened.cfg.log_path) / "tensorboard", opened.resume_step
        purge = resume_step + 1 if resume_step and not opened.appends else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        _write_config(folder / "config.yaml", opened)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbBackend:
    """`<log_path>/wandb`; offline where there is no login (`wandb sync` sends it later). A resumed run keeps its id.

    A run that appends has an id of its own, for Weights & Biases takes steps in rising order only.
    """

    def __init__(self, opened: Opened) -> None:
        import wandb

        cfg, run_id = opened.cfg, uuid.uuid4().hex[:8]
        id_file = Path(cfg.log_path) / "wandb" / "run_id"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        if opened.resume_step and id_file.exists() and not opened.appends:
            run_id = id_file.read_text()
        elif not opened.appends:
            id_file.write_text(run_id)
        proxy: dict[str, Any] = (
            {"http_proxy": cfg.wandb_proxy, "https_proxy": cfg.wandb_proxy} if cfg.wandb_proxy else {}
        )
        self._run, self.note = _start(
            "wandb",
            cfg.wandb_mode,
            lambda mode: wandb.init(
                project=cfg.project_name,
                name=cfg.experiment_name,
                entity=cfg.wandb_entity,
                dir=cfg.log_path,
                mode=mode,  # type: ignore[arg-type]
                config=dict(opened.config_dict),
                id=run_id,
                resume="allow",
                settings=wandb.Settings(**proxy),
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabBackend:
    """`<log_path>/swanlab`; each start, resumed ones too, is a run of its own there."""

    def __init__(self, opened: Opened) -> None:
        import swanlab

        cfg = opened.cfg
        folder = Path(cfg.log_path) / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run, self.note = _start(
            "swanlab",
            cfg.swanlab_mode,
            lambda mode: swanlab.init(
                project=cfg.project_name,
                experiment_name=cfg.experiment_name,
                logdir=str(folder),
                mode=mode,  # type: ignore[arg-type]
                config=dict(opened.config_dict),
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


BACKENDS: dict[str, Callable[[Opened], Backend]] = {
    "tensorboard": TensorBoardBackend,
    "wandb": WandbBackend,
    "swanlab": SwanlabBackend,
}


def check_backends(cfg: LoggerConfig) -> None:
    """Refuse a backend that is not installed; cheap, so that it can come before hours of work."""
    for name in cfg.logger_backends:
        if find_spec(name) is None:
            raise UserError(
                f"runner.logger.logger_backends asks for {name}, which is not installed: "
                f"{install_line(name)}, or take {name} out of the list"
            )
        if name == "swanlab" and cfg.swanlab_mode == "local" and find_spec("swanboard") is None:
            raise UserError(
                "runner.logger.swanlab_mode=local needs SwanLab's dashboard: "
                'pip install "swanlab[dashboard]", or set runner.logger.swanlab_mode=offline'
            )


def _start(name: str, asked: str, init: Callable[[str], Any]) -> tuple[Any, str]:
    """A run in the asked or chosen mode, and the line about that choice; a server that is away makes `auto` offline.

    What a service refuses in a mode the user named (no login, no network) is theirs to fix, before hours of training.
    """
    mode, note = choose_mode(name, asked)
    try:
        return init(mode), note
    except Exception as error:
        if asked != "auto" or mode == "offline":
            raise UserError(f"logger backend {name} could not start: {error}") from error
        failure = " ".join(str(error).split())
    try:
        return init("offline"), offline_note(name, f"{mode} failed ({failure})")
    except Exception as error:
        raise UserError(f"logger backend {name} could not start: {failure}; nor offline: {error}") from error


def _write_config(path: Path, opened: Opened) -> None:
    """Write the config of a run, whose id stands above it; an evaluation leaves the one that is there."""
    if opened.appends and path.exists():
        return
    plain = json.loads(json.dumps(opened.config_dict, default=str))  # tuples become lists, paths become text
    if isinstance(plain.get("runner"), dict):
        plain["runner"].pop("run_id", None)  # the file may be loaded again, for another run
    head = f"# run {opened.run_id}\n" if opened.run_id else ""
    write_file(path, head + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _unused_name(path: Path) -> Path:
    """`metrics.1.jsonl`, `metrics.2.jsonl`, ...: a new run in an old folder keeps the old curves."""
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return other


def _drop_after(path: Path, resume_step: int) -> int:
    """Drop the lines of steps that the resumed run will play again; returns the last step kept."""
    kept = [row for row in read_jsonl(path) if row["step"] <= resume_step]
    write_file(path, "".join(json.dumps(row) + "\n" for row in kept))
    return max((row["step"] for row in kept), default=-1)
