"""RunLog: everything that shows a run while it happens: metric loggers, console, evaluation files, report."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.spec import env_spec
from rlinf.errors import UserError
from rlinf.metrics.console import RunConsole
from rlinf.metrics.episode_summary import (
    benchmark_table,
    evaluation_metrics,
    group_rates,
    own_metrics,
    task_rates,
)
from rlinf.metrics.loggers import MetricLogger, check_backends
from rlinf.metrics.machine import Machine
from rlinf.metrics.names import expand, guide_name
from rlinf.metrics.report import write_report
from rlinf.metrics.stats import Rate
from rlinf.results.identity import PolicyIdentity, checkpoint_identity
from rlinf.results.protocol import evaluation_protocol
from rlinf.results.result import Episode, Result, rewrite, write_result
from rlinf.storage.atomic_folder import make_folder
from rlinf.storage.provenance import describe_start
from rlinf.storage.redaction import redacted
from rlinf.storage.run_folder import RECORD, new_run_id, read_record, record_start, write_record
from rlinf.storage.step_checkpoint import config_hash, settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Player:
    """Who played an evaluation, and in which batches: what an episode needs to be played again, bit for bit."""

    policy: PolicyIdentity
    batches: Sequence[Sequence[int]] = ()  # env ids of every batch that the policy was called for
    device: Mapping[str, Any] = field(default_factory=dict)  # RolloutWorker.describe_device


class RunListener(Protocol):
    """Whoever a runner tells what happens."""

    def start(self, first_step: int, total_steps: int) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, records: Sequence[EpisodeRecord], player: Player) -> None: ...

    def saved(self, step: int, checkpoint: Path) -> None: ...

    def note(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Writes metrics and episode records of one run below runner.logger.log_path, and shows them on the console.

    The folder is touched once the run starts, when all that may refuse it has been asked. `stream` is where the console
    writes, by default stdout.
    """

    def __init__(self, cfg: Config, *, stream: TextIO | None = None) -> None:
        self.cfg = cfg
        self.folder = Path(cfg.runner.logger.log_path)
        self.run_id = cfg.runner.run_id or new_run_id()
        check_backends(cfg.runner.logger)
        self.console = RunConsole(self.folder, table_interval=cfg.runner.logger.table_interval, stream=stream)
        self.logger: MetricLogger | None = None
        self.evaluations: list[Path] = []
        self._last_result: Result | None = None
        self.selection: dict[str, Any] = {}  # how the evaluated policy was chosen, for result.json
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

    def evaluated(self, step: int, records: Sequence[EpisodeRecord], player: Player) -> None:
        """Writes eval/step_N/result.json, and shows the rates with their intervals.

        `records` are in the order of the trials. Rates of single tasks are shown where the evaluation is all there is
        to see.
        """
        self.last_records, self.last_evaluation = records, step
        spec = env_spec(self.cfg.env.eval, "env.eval")
        groups, rate = spec.task_groups, Rate.of(r.success_once for r in records)
        rates, own, tasks = group_rates(records, groups), own_metrics(records), task_rates(records, groups)
        metrics = evaluation_metrics(records, groups)
        result = Result(
            step=step,
            run=self.run_id,
            recipe=self.cfg.runner.logger.experiment_name,
            policy=replace(player.policy, path=redacted(player.policy.path)),
            protocol=evaluation_protocol(self.cfg),
            success=asdict(rate),
            groups={name: asdict(group) for name, group in rates.items()},
            tasks={name: asdict(task) for name, task in tasks.items()},
            rates={name: asdict(value) for name, value in own.items() if isinstance(value, Rate)},
            table=benchmark_table(records, groups, spec.suite),
            metrics={name.removeprefix("eval/"): value for name, value in expand(metrics).items()},
            episodes=self._episodes(records),
            provenance=describe_start(_gpus()),
            config=json.loads(json.dumps(redacted(asdict(self.cfg)), default=str)),
            device=dict(player.device),
            batches=tuple(map(tuple, player.batches)),
            selection=self.selection,
        )
        self._last_result = write_result(result, self.folder)
        assert self._last_result.path is not None
        self.evaluations.append(self._last_result.path)
        self.console.say(f"evaluation at step {step}: success {rate}")
        for name, group in rates.items():
            self.console.say(f"  {name:<10} {group}")
        for name, task in tasks.items() if self.cfg.runner.only_eval else ():
            self.console.say(f"  {name:<30} {task}")
        for name, value in own.items():
            self.console.say(f"  {guide_name(name):<44} {value if isinstance(value, Rate) else f'{value:.3f}'}")

    def note(self, message: str) -> None:
        self.console.say(message)

    def saved(self, step: int, checkpoint: Path) -> None:
        """Note in the evaluation of the same step where its policy lies now, so that its episodes can be replayed."""
        result = self._last_result
        if result is not None and result.step == step and result.policy.kind == "checkpoint":
            self._last_result = rewrite(replace(result, policy=checkpoint_identity(checkpoint)))

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

    def _episodes(self, records: Sequence[EpisodeRecord]) -> tuple[Episode, ...]:
        """The records as result.json holds them; videos that could not be written are left out."""

        def video(record: EpisodeRecord) -> str | None:
            if record.video is None or not Path(record.video).is_file():
                return None
            path, folder = Path(record.video).absolute(), self.folder.absolute()
            return str(path.relative_to(folder) if path.is_relative_to(folder) else path)

        return tuple(Episode(index=i, **vars(record) | {"video": video(record)}) for i, record in enumerate(records))


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
        gpus=_gpus(),
    )


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
