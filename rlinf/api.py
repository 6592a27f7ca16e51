"""The Python API: what the commands do, as functions (docs/api.md). `import rlinf` offers every name of this file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from rlinf.commands import jobs
from rlinf.commands.compare import run_compare
from rlinf.compat.envs import env_class
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.envs.vec import VecEnv
from rlinf.metrics.stats import Rate
from rlinf.results.comparison import Comparison
from rlinf.results.sequential import ALPHA
from rlinf.serving.policy import Episode, LoadedPolicy, load_policy

if TYPE_CHECKING:
    from rlinf.envs.gymnasium_env import GymnasiumVectorEnv

__all__ = [
    "Comparison",
    "Episode",
    "Evaluation",
    "LoadedPolicy",
    "TrainResult",
    "compare",
    "evaluate",
    "load_config",
    "load_policy",
    "make_env",
    "train",
]


@dataclass(frozen=True)
class TrainResult:
    """What a training run left behind."""

    folder: Path  # of its files: metrics.jsonl, report.html, eval/
    steps: int  # training steps done, those of a resumed run included
    metrics: dict[str, float]  # of the last step; docs/metrics.md names them
    checkpoint: Path | None  # the last one saved, for runner.ckpt_path, resume_dir or load_policy


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    success: Rate  # episodes that were solved, with their 95 % interval
    metrics: dict[str, float]  # docs/metrics.md names them
    episodes: tuple[EpisodeRecord, ...]  # one per held-out trial


def train(cfg: Config) -> TrainResult:
    """Train a policy; everything is written below runner.logger.log_path."""
    runner, log = jobs.train(cfg)
    jobs.leave_if_stopped(runner)
    return TrainResult(log.folder, runner.global_step, log.last_metrics, runner.last_checkpoint)


def evaluate(cfg: Config) -> Evaluation:
    """Play the held-out trials once. Load `cfg` with `purpose="eval"`; runner.ckpt_path names the policy."""
    metrics, episodes = jobs.evaluate(cfg)
    return Evaluation(Rate.of(e.success_once for e in episodes), metrics, tuple(episodes))


def compare(
    *policies: str | Path,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    max_pairs: int | None = None,
    seed: int = 0,
    alpha: float = ALPHA,
    output: str | Path | None = None,
) -> Comparison:
    """Which policy is better, as `rlinf compare`: paths of policies, checkpoints and results, "expert" or "random".

    Example: rlinf.compare("checkpoints/sft", "logs/try").pairs[0].overall.verdict == "better"
    """
    return run_compare(
        [str(policy) for policy in policies],
        recipe=recipe,
        overrides=overrides,
        max_pairs=max_pairs,
        seed=seed,
        alpha=alpha,
        output=Path(output) if output is not None else None,
    )


@overload
def make_env(
    config: Config | str,
    *,
    mode: Literal["train", "eval"] = "train",
    num_envs: int | None = None,
    chunk_size: int = 1,
    overrides: Sequence[str] = (),
    gymnasium: Literal[False] = False,
) -> VecEnv: ...


@overload
def make_env(
    config: Config | str,
    *,
    mode: Literal["train", "eval"] = "train",
    num_envs: int | None = None,
    chunk_size: int = 1,
    overrides: Sequence[str] = (),
    gymnasium: Literal[True],
) -> GymnasiumVectorEnv: ...


def make_env(
    config: Config | str,
    *,
    mode: Literal["train", "eval"] = "train",
    num_envs: int | None = None,
    chunk_size: int = 1,
    overrides: Sequence[str] = (),
    gymnasium: bool = False,
) -> VecEnv | GymnasiumVectorEnv:
    """The environments of a config or recipe, each simulator in processes of its own; close them after use.

    VecEnv takes chunks of `chunk_size` actions; with `gymnasium=True` one action per step, as a
    gymnasium.vector.VectorEnv whose episodes restart by themselves.
    """
    cfg = load_config(config, overrides, purpose="collect") if isinstance(config, str) else config
    env = cfg.env.train if mode == "train" else cfg.env.eval
    env = replace(env, total_num_envs=num_envs or env.total_num_envs, auto_reset=env.auto_reset or gymnasium)
    spec = env_spec(env, f"env.{mode}")
    envs = env_class(cfg.compat)(
        env,
        spec,
        env_ids=range(env.total_num_envs),
        mode=mode,
        chunk_size=1 if gymnasium else chunk_size,
        seed=cfg.runner.seed + env.seed,
        trials=eval_trials(env, spec) if mode == "eval" else None,
    )
    if not gymnasium:
        return envs
    from rlinf.envs.gymnasium_env import GymnasiumVectorEnv

    return GymnasiumVectorEnv(envs)
