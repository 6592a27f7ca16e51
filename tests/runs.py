"""Small real runs for tests: the pixel toy and a compact π0, through the same Runner as everything else."""

from __future__ import annotations

from pathlib import Path

from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.metrics.watch import Watch
from rlinf.runner import Runner
from rlinf.runtime.placement import make_plan


def toy_config(folder: Path, *overrides: str, name: str = "toy_ppo_compact") -> Config:
    """A toy recipe that writes below `folder`."""
    own = [f"runner.logger.log_path={folder}", "runner.logger.logger_backends=[]"]
    return load_config(name, [*own, *overrides])


def make_runner(cfg: Config) -> Runner:
    return Runner(cfg, make_plan(cfg, [0]), watch=Watch(cfg))
