"""What each command does once its config is known to be right."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rlinf.config.schema import Config
from rlinf.metrics.watch import Watch
from rlinf.runner import Runner
from rlinf.runtime.placement import make_plan
from rlinf.training.checkpoint import step_of

STOPPED_BY_SIGNAL = 143  # exit status of a run that saved and left because of SIGTERM


def train(cfg: Config) -> None:
    """Train, with everything written below runner.logger.log_path."""
    runner = Runner(cfg, make_plan(cfg), watch=Watch(cfg))
    try:
        runner.train()
        if runner.stop_requested:
            sys.exit(STOPPED_BY_SIGNAL)
    finally:
        runner.close()


def evaluate(cfg: Config) -> dict[str, float]:
    """Play the held-out trials once; prints the rate and writes eval/step_N.json, N being the checkpoint's step."""
    runner = Runner(cfg, make_plan(cfg), watch=Watch(cfg))
    try:
        runner.global_step = step_of(cfg.runner.ckpt_path)
        return runner.evaluate()
    finally:
        runner.close()


def collect(cfg: Config) -> Path:
    """Demonstrations by scripted experts."""
    from rlinf.demos.collect import collect_demos

    folder = collect_demos(cfg)
    print(f"dataset: {folder}")
    return folder


def sft(cfg: Config) -> Path:
    """Imitation; evaluated on training layouts while it runs when sft.eval_interval says so."""
    from rlinf.training.sft import train_sft

    folder = train_sft(cfg)
    print(f"policy: {folder}")
    return folder


def with_model(cfg: Config, path: Path) -> Config:
    """The same config, starting from the policy in `path`."""
    return replace(cfg, actor=replace(cfg.actor, model=replace(cfg.actor.model, model_path=str(path))))
