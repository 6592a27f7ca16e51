"""What each command does once its config is known to be right."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rlinf.config.derived import make_plan
from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.spec import env_spec
from rlinf.metrics.episode_summary import evaluation_metrics
from rlinf.metrics.loggers import MetricLogger
from rlinf.metrics.run_log import RunListener, RunLog
from rlinf.placement.plan import Plan
from rlinf.runner import Runner
from rlinf.runner_async import AsyncRunner
from rlinf.storage.step_checkpoint import step_of

STOPPED_BY_SIGNAL = 143  # exit status of a run that saved and left because of SIGTERM


def train(cfg: Config) -> tuple[Runner, RunLog]:
    """Train, with everything written below runner.logger.log_path; runner and log, both closed, tell where it ended."""
    log = RunLog(cfg)
    runner = make_runner(cfg, make_plan(cfg), log)
    try:
        train_to_the_end(runner)
    finally:
        runner.close()
    return runner, log


def make_runner(cfg: Config, plan: Plan, log: RunListener) -> Runner:
    """Rollouts and updates in turn, or side by side where runner.max_staleness allows it."""
    return (AsyncRunner if cfg.runner.max_staleness > 0 else Runner)(cfg, plan, watch=log)


def train_to_the_end(runner: Runner) -> None:
    """Every remaining step, or SystemExit: what SIGTERM stopped and saved must not be taken for a finished run."""
    runner.train()
    if runner.stop_requested:
        sys.exit(STOPPED_BY_SIGNAL)


def evaluate(cfg: Config) -> tuple[dict[str, float], Sequence[EpisodeRecord]]:
    """Play the held-out trials once: prints the rate, logs it, writes eval/step_N.json; N is the checkpoint's step."""
    if cfg.runner.eval_expert:
        return evaluate_expert(cfg)
    log = RunLog(cfg)
    runner = Runner(cfg, make_plan(cfg), watch=log)
    try:
        runner.global_step = step_of(cfg.runner.ckpt_path)
        log.start_evaluation(runner.global_step)
        metrics = runner.evaluate_only()
        log.log_evaluation(runner.global_step, metrics)
        return metrics, log.last_records
    finally:
        runner.close()


def evaluate_expert(cfg: Config) -> tuple[dict[str, float], Sequence[EpisodeRecord]]:
    """The same trials, played by the simulator's scripted expert; writes eval/step_0.json."""
    from rlinf.demos.player import play_trials

    log, env = RunLog(cfg), cfg.env.eval
    try:
        log.start_evaluation(0)
        records, groups = play_trials(env, seed=cfg.runner.seed + env.seed), env_spec(env).task_groups
        metrics = evaluation_metrics(records, groups)
        log.evaluated(0, records, groups)
        log.log_evaluation(0, metrics)
        return metrics, records
    finally:
        log.close()


def collect(cfg: Config, *, overwrite: bool = False) -> Path:
    """Demonstrations by scripted experts."""
    from rlinf.demos.collect import collect_demos

    folder = collect_demos(cfg, overwrite=overwrite)
    print(f"dataset: {folder}")
    return folder


def sft(cfg: Config, *, overwrite: bool = False) -> Path:
    """Imitation; its curve goes to <log_path>/sft, and it is evaluated where sft.eval_interval says so."""
    from rlinf.training.sft import train_sft

    logger: MetricLogger | None = None

    def log(step: int, metrics: dict[str, float]) -> None:
        """Opened at the first step: a refused command leaves the curve of an earlier one as it is."""
        nonlocal logger
        if logger is None:
            where = replace(cfg.runner.logger, log_path=str(Path(cfg.runner.logger.log_path) / "sft"))
            logger = MetricLogger(where, asdict(cfg), resume_step=None)
            for note in logger.notes:
                print(note)
        logger.log(step, metrics)

    try:
        folder = train_sft(cfg, on_step=log, overwrite=overwrite)
    finally:
        if logger is not None:
            logger.close()
    print(f"policy: {folder}")
    return folder


def with_model(cfg: Config, path: Path) -> Config:
    """The same config, starting from the policy in `path`."""
    return replace(cfg, actor=replace(cfg.actor, model=replace(cfg.actor.model, model_path=str(path))))
