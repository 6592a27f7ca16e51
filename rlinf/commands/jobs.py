"""What each command does once its config is known to be right."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from rlinf.commands.run_folders import evaluation_folder, in_folder, new_folder, run_of_recipe, training_folder, with_id
from rlinf.config.derived import make_plan
from rlinf.config.schema import TIME, Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.spec import env_spec
from rlinf.errors import DiskFullError
from rlinf.metrics.console import showing_progress
from rlinf.metrics.episode_summary import evaluation_metrics
from rlinf.metrics.loggers import MetricLogger
from rlinf.metrics.run_log import Player, RunListener, RunLog, record_run
from rlinf.placement.plan import Plan
from rlinf.results.identity import policy_identity
from rlinf.runner import Runner
from rlinf.runner_async import AsyncRunner
from rlinf.storage.run_folder import locked
from rlinf.storage.step_checkpoint import step_of
from rlinf.workers.env import check_simulators

logger = logging.getLogger(__name__)
SFT_LOG = "sft_log"  # below log_path


def train(cfg: Config) -> tuple[Runner, RunLog]:
    """Train, with everything written to the run's own folder; runner and log, both closed, tell where it ended.

    Where a signal ended it, `leave_if_stopped(runner)` is for the caller to call.
    """
    check_machine(cfg)
    with training_folder(cfg) as cfg:
        log = RunLog(cfg)
        runner = make_runner(cfg, make_plan(cfg), log)
        try:
            runner.train()
            if not runner.stop_requested:
                log.finish(runner.global_step)
        except DiskFullError as error:
            kept = runner.last_checkpoint or runner.resume_from
            go_on = (
                f"{kept} is complete: runner.resume_dir={kept} continues from it" if kept else "no step was saved yet"
            )
            raise DiskFullError(f"{error}; {go_on}") from error
        finally:
            runner.close()
    return runner, log


def check_machine(cfg: Config) -> None:
    """Refuse simulators whose files this machine lacks; machines of a cluster that is joined look for themselves."""
    if cfg.cluster.ray_address is None:
        check_simulators(cfg)


def make_runner(cfg: Config, plan: Plan, log: RunListener) -> Runner:
    """Rollouts and updates in turn, or side by side where runner.max_staleness allows it; evaluations need neither."""
    beside = cfg.runner.max_staleness > 0 and not cfg.runner.only_eval
    try:
        return (AsyncRunner if beside else Runner)(cfg, plan, watch=log)
    except BaseException:
        log.close()
        raise


def train_to_the_end(runner: Runner) -> None:
    """Every remaining step, or what `leave_if_stopped` raises."""
    runner.train()
    leave_if_stopped(runner)


def leave_if_stopped(runner: Runner) -> None:
    """Raise SystemExit where a signal ended training: what it stopped and saved must not be taken for a finished run.

    After Ctrl-C KeyboardInterrupt, as anywhere else.
    """
    if runner.stop_requested:
        if runner.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + runner.stop_signal)  # as a shell reports a process that the signal has ended


def evaluate(cfg: Config) -> tuple[dict[str, float], Sequence[EpisodeRecord]]:
    """Play the held-out trials once; returns their metrics and records."""
    log = run_evaluation(cfg)
    return log.last_metrics, log.last_records


def run_evaluation(cfg: Config, selection: dict[str, Any] | None = None) -> RunLog:
    """Play the held-out trials once: prints the rate, logs it, writes eval/step_N/result.json; N is the checkpoint's.

    `selection` tells how the policy was chosen. The log, which is closed, holds what was found.
    """
    if cfg.runner.eval_expert:
        return evaluate_expert(cfg)
    check_machine(cfg)
    with evaluation_folder(cfg) as cfg:
        log = RunLog(cfg)
        log.selection = selection or {}
        runner = make_runner(cfg, make_plan(cfg), log)
        try:
            runner.global_step = step_of(cfg.runner.ckpt_path)
            runner.start_simulators("eval")
            log.start_evaluation(runner.global_step)
            metrics = runner.evaluate_only()
            log.log_evaluation(runner.global_step, metrics)
            return log
        finally:
            runner.close()


def evaluate_expert(cfg: Config) -> RunLog:
    """The same trials, played by the simulator's scripted expert; writes eval/step_0/result.json."""
    from rlinf.demos.player import play_trials

    check_machine(cfg)
    with evaluation_folder(cfg) as cfg:
        log, env = RunLog(cfg), cfg.env.eval
        try:
            log.start_evaluation(0)
            records = play_trials(env, seed=cfg.runner.seed + env.seed)
            log.evaluated(0, records, Player(policy_identity(cfg)))
            log.log_evaluation(0, evaluation_metrics(records, env_spec(env).task_groups))
            return log
        finally:
            log.close()


def collect(cfg: Config, *, overwrite: bool = False) -> Path:
    """Demonstrations by scripted experts."""
    from rlinf.demos.collect import collect_demos

    with showing_progress():
        return collect_demos(cfg, overwrite=overwrite)


def sft(cfg: Config, *, overwrite: bool = False) -> Path:
    """Imitation; its curve goes to <log_path>/sft_log, and it is evaluated where sft.eval_interval says so."""
    from rlinf.training.sft import check_settings, train_sft

    check_settings(cfg, overwrite=overwrite, log=Path(cfg.runner.logger.log_path) / SFT_LOG)
    with sft_log(cfg) as on_step, showing_progress():
        return train_sft(cfg, on_step=on_step, overwrite=overwrite)


@contextmanager
def sft_log(cfg: Config) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """What logs steps to <log_path>/sft_log; nothing is written there before the first.

    The log of another recipe is refused; an earlier one of this recipe is replaced.
    """
    with ExitStack() as stack:
        if TIME in cfg.runner.logger.log_path:
            cfg = in_folder(cfg, stack.enter_context(new_folder(cfg.runner.logger.log_path)))
        folder = Path(cfg.runner.logger.log_path) / SFT_LOG
        cfg = in_folder(with_id(cfg, None), folder)
        stack.enter_context(locked(folder, logger.warning))
        run_of_recipe(cfg, folder)

        @cache
        def opened() -> MetricLogger:
            record_run(cfg, "sft")
            log = MetricLogger(cfg.runner.logger, asdict(cfg), resume_step=None, run_id=cfg.runner.run_id or "")
            stack.callback(log.close)
            for note in log.notes:
                print(note)
            return log

        yield lambda step, metrics: opened().log(step, metrics)


def with_model(cfg: Config, path: Path) -> Config:
    """The same config, starting from the policy in `path`."""
    return replace(cfg, actor=replace(cfg.actor, model=replace(cfg.actor.model, model_path=str(path))))
