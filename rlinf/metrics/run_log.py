"""RunLog: everything that shows a run while it happens: metric loggers, console, evaluation files, report."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import torch

from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.errors import UserError, writing
from rlinf.metrics.console import RunConsole
from rlinf.metrics.episode_summary import evaluation_metrics, group_rates, own_metrics, task_rates
from rlinf.metrics.loggers import MetricLogger, check_backends
from rlinf.metrics.machine import Machine
from rlinf.metrics.names import expand, guide_name
from rlinf.metrics.report import write_report
from rlinf.metrics.stats import Rate
from rlinf.storage.atomic_folder import make_folder, write_file
from rlinf.storage.redaction import redacted
from rlinf.storage.run_folder import RECORD, new_run_id, read_record, record_start, write_record
from rlinf.storage.step_checkpoint import config_hash, settings

logger = logging.getLogger(__name__)


class RunListener(Protocol):
    """Whoever a runner tells what happens."""

    def start(self, first_step: int, total_steps: int) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluated(
        self, step: int, records: Sequence[EpisodeRecord], groups: Mapping[str, Sequence[str]] | None = None
    ) -> None: ...

    def note(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Writes metrics and episode records of one run below runner.logger.log_path, and shows them on the console.

    The folder is touched once the run starts, when all that may refuse it has been asked.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.folder = Path(cfg.runner.logger.log_path)
        self.run_id = cfg.runner.run_id or new_run_id()
        check_backends(cfg.runner.logger)
        self.console = RunConsole(self.folder, table_interval=cfg.runner.logger.table_interval)
        self.logger: MetricLogger | None = None
        self.evaluations: list[Path] = []
        self.last_metrics: dict[str, float] = {}  # of the last training step, or of the evaluation that was the run
        self.last_records: Sequence[EpisodeRecord] = ()  # of the last evaluation
        self.last_evaluation = 0  # its step
        self.training_rates: list[tuple[int, Rate]] = []  # success of the first and of the last step with episodes
        self.report: Path | None = None  # once it is written
        self._machine = Machine(self.folder)

    def start(self, first_step: int, total_steps: int) -> None:
        """Called once the run knows where it begins; a resumed run drops what later steps had logged."""
        if self.cfg.runner.run_id is None and first_step and (record := read_record(self.folder)) is not None:
            self.run_id = record.id
        record_run(self.cfg, "train", self.run_id)
        self._open_console()
        self.console.start(first_step, total_steps)
        self._open(first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.last_metrics = metrics
        self._open(step).log(step, metrics | self._machine.sample())
        self.console.step(step, metrics)
        if (episodes := round(metrics.get("env/num_trajectories", 0))) > 0:
            rate = Rate(round(metrics["env/success_once"] * episodes), episodes)
            self.training_rates = [*self.training_rates[:1], (step, rate)]

    def start_evaluation(self, step: int) -> None:
        """Open the loggers for an evaluation that is no part of a training run: nothing in the folder is changed."""
        if not (self.folder / RECORD).exists():
            record_run(self.cfg, "eval", self.run_id)
        self._open_console()
        self._open(step, appends=True)

    def finish(self, steps: int) -> None:
        """Note that training has reached its end: there is nothing left to continue."""
        if (record := read_record(self.folder)) is not None:
            write_record(self.folder, replace(record, finished_steps=steps))

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log such an evaluation."""
        self.last_metrics = metrics
        self._open(step, appends=True).log(step, metrics)

    def evaluated(
        self, step: int, records: Sequence[EpisodeRecord], groups: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Writes eval/step_N.json with every episode and its counts, and shows the rates with their intervals.

        Those of single tasks are shown where the evaluation is all there is to see.
        """
        self.last_records, self.last_evaluation = records, step
        folder = self.folder / "eval"
        rate = Rate.of(r.success_once for r in records)
        rates, own = group_rates(records, groups or {}), own_metrics(records)
        tasks = task_rates(records, groups or {})
        metrics = evaluation_metrics(records, groups)
        path = self._evaluation_file(folder, step)
        text = json.dumps(
            {
                "step": step,
                "run": self.run_id,
                "checkpoint": redacted(self.cfg.runner.ckpt_path),
                "success_once": asdict(rate),
                "groups": {name: asdict(group) for name, group in rates.items()},
                "tasks": {name: asdict(task) for name, task in tasks.items()},
                "rates": {name: asdict(value) for name, value in own.items() if isinstance(value, Rate)},
                "metrics": {name.removeprefix("eval/"): value for name, value in expand(metrics).items()},
                "episodes": [r.to_json() for r in records],
            },
            indent=1,
        )
        with writing(str(path)):
            make_folder(folder)
            write_file(path, text)
        self.evaluations.append(path)
        self.console.say(f"evaluation at step {step}: success {rate}")
        for name, group in rates.items():
            self.console.say(f"  {name:<10} {group}")
        for name, task in tasks.items() if self.cfg.runner.only_eval else ():
            self.console.say(f"  {name:<30} {task}")
        for name, value in own.items():
            self.console.say(f"  {guide_name(name):<44} {value if isinstance(value, Rate) else f'{value:.3f}'}")

    def note(self, message: str) -> None:
        self.console.say(message)

    def warn(self, message: str) -> None:
        self.console.say(f"warning: {message}")

    def close(self) -> None:
        """Closes the loggers and writes report.html, unless the run ended before there was anything to show."""
        if self.logger is not None:
            self.logger.close()
        if self.evaluations or (self.logger is not None and self.logger.last_step > 0):
            try:
                self.report = write_report(self.folder)
            except Exception as error:  # whatever lies in the folder, the run itself is complete
                self.warn(f"report.html cannot be written ({error}); `rlinf report {self.folder}` tries again")
        self.console.stop()

    def _open_console(self) -> None:
        try:
            self.console.open()
        except OSError as error:
            raise UserError(f"runner.logger.log_path={self.folder} cannot be written: {error.strerror}") from error
        self.console.say(f"run {self.run_id} in {self.folder}")

    def _open(self, step: int, *, appends: bool = False) -> MetricLogger:
        if self.logger is None:
            logging_to, run_id = self.cfg.runner.logger, self.run_id
            config = asdict(self.cfg)
            self.logger = MetricLogger(logging_to, config, resume_step=step, appends=appends, run_id=run_id)
            for note in self.logger.notes:
                self.console.say(note)
        return self.logger

    def _evaluation_file(self, folder: Path, step: int) -> Path:
        """eval/step_N.json, or step_N_2.json and so on where another run has written one."""
        names = itertools.chain([f"step_{step}"], (f"step_{step}_{n}" for n in itertools.count(2)))
        return next(p for name in names if _is_of_run(p := folder / f"{name}.json", self.run_id))


def record_run(cfg: Config, kind: str, run_id: str | None = None) -> None:
    """Note in run.json that a run starts, in its folder."""
    folder = Path(cfg.runner.logger.log_path)
    make_folder(folder)
    record_start(
        folder,
        run_id=run_id or cfg.runner.run_id or new_run_id(),
        kind=kind,
        name=cfg.runner.logger.experiment_name,
        config_hash=config_hash(cfg),
        settings=settings(cfg),
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    )


def _is_of_run(path: Path, run_id: str) -> bool:
    """Whether an evaluation file is free for a run: absent, or the run's own."""
    if not path.exists():
        return True
    try:
        return json.loads(path.read_text(encoding="utf-8"))["run"] == run_id
    except (OSError, ValueError, KeyError, TypeError):
        return False
