"""Every documented metric is logged by some run: a table of name -> recipe, and the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from rlinf.commands import jobs
from rlinf.config.load import load_config
from rlinf.metrics.loggers import read_jsonl
from rlinf.metrics.names import CANONICAL, METRICS, find_metric

SMALL = "{image_size: 32, wrist_image_size: 32, render: fast, renderer: tiny, protocol: official, eval_sequences: 1}"


@dataclass(frozen=True)
class Logged:
    """A short run of a recipe and the documented names that it must log; `*` is any rest of a name."""

    recipe: str
    overrides: tuple[str, ...]
    names: tuple[str, ...]
    fixtures: tuple[str, ...] = ()  # what must be there for it


def shortened(*envs: str, steps: int, episode: int) -> tuple[str, ...]:
    """One training step of two envs that play one rollout, and an evaluation."""
    counts = {"total_num_envs": 2, "rollout_epoch": 1, "num_processes": 1, "max_steps_per_rollout_epoch": steps}
    counts |= {"max_episode_steps": episode}
    keys = [f"env.{env}.{key}={value}" for env in ("train", "eval") for key, value in counts.items()]
    keys += [f"env.{env}.video_cfg.save_video=false" for env in ("train", "eval")]
    keys += [
        "env.eval.num_trials=2",
        "actor.model.size=compact",
        "actor.model.precision=fp32",
        "algorithm.update_epoch=1",
        *envs,
    ]
    return (*keys, "runner.max_epochs=1", "runner.val_check_interval=1", "runner.save_interval=-1")


RUNS = {
    "critic, evaluation, offload and checkpoints": Logged(
        "toy_ppo_compact",
        (
            "runner.max_epochs=2",
            "runner.val_check_interval=1",
            "runner.save_interval=1",
            "env.train.enable_offload=true",
            "rollout.enable_offload=true",
            "actor.enable_offload=true",
            "actor.model.openpi.train_expert_only=true",
        ),
        (
            *(name for name in METRICS if name.startswith("train/actor/") and "proximal" not in name),
            "train/critic/*",
            "rollout/*",
            "env/*",
            "eval/*",
            "time/*",
            "messages/bytes",
            "sync/bytes",
            "offload/bytes",
            "system/*",
        ),
    ),
    "groups that are filtered": Logged(
        "toy_grpo_compact", ("runner.max_epochs=1", "algorithm.filter_rewards=true"), ("rollout/groups_kept",)
    ),
    "rollouts beside updates on two ranks each": Logged(
        "toy_ppo_compact",
        (
            "runner.max_epochs=2",
            "runner.max_staleness=1",
            "algorithm.loss_type=decoupled_actor_critic",
            "cluster.virtual_devices=4",
            "cluster.component_placement={actor: 0-1, 'env,rollout': 2-3}",
            "actor.micro_batch_size=16",
        ),
        (
            "train/actor/*proximal*",
            "train/actor/behav_*",
            "train/actor/dual_clip_fraction",
            "rollout/staleness",
            "time/*/slowest_*",
            "time/rollout/sync_model_from_actor",
        ),
        fixtures=("ray_address",),
    ),
    "imitation": Logged("toy_ppo_compact", (), ("train/sft/*",)),
    "chains of tasks that can fail": Logged(
        "calvin_d_d_ppo_openpi",
        (
            *shortened(f"env.train.init_params={SMALL}", f"env.eval.init_params={SMALL}", steps=360, episode=1800),
            "env.eval.num_trials=1",
            "env.eval.ignore_terminations=false",
            "actor.micro_batch_size=16",
            "actor.global_batch_size=144",
        ),
        ("env/fail_*", "eval/fail_*", "env/avg_len", "eval/avg_len", "env/success_len_*", "eval/success_len_*"),
        fixtures=("calvin_path",),
    ),
    "groups of tasks": Logged(
        "metaworld_50_ppo_openpi",
        (
            *shortened("env.train.init_params={image_size: 64, render: fast}", steps=10, episode=10),
            "env.eval.init_params={image_size: 64, render: fast}",
            "actor.micro_batch_size=4",
            "actor.global_batch_size=4",
        ),
        ("env/group*", "eval/group*"),
    ),
    "a simulator's own quantities": Logged(
        "maniskill_ppo_compact",
        (
            *shortened(steps=10, episode=10),
            "actor.micro_batch_size=4",
            "actor.global_batch_size=4",
        ),
        ("env/extra/<name>", "eval/extra/<name>"),
        fixtures=("maniskill_path",),
    ),
}


def table() -> dict[str, str]:
    """Documented name -> the run that must log it; a later row of RUNS says more precisely than an earlier one."""
    return {name: run for run, row in RUNS.items() for name in METRICS if any(fnmatchcase(name, p) for p in row.names)}


def emitted(folder: Path) -> set[str]:
    """The rows of the table, and the aliases, that a metrics.jsonl holds."""
    names = {name for line in read_jsonl(folder / "metrics.jsonl") for name in line} - {"step", "run"}
    return {name if name in CANONICAL else find_metric(name).name for name in names}


def imitate(folder: Path) -> Path:
    """Two demonstrations of each task and two steps on them; returns the folder of the curve."""
    own = [f"collect.output={folder}/demos", f"sft.dataset={folder}/demos", f"sft.output={folder}/policy"]
    own += ["collect.episodes_per_task=2", "sft.steps=2", "sft.batch_size=4", "sft.eval_interval=0"]
    own += [f"runner.logger.log_path={folder}", "runner.logger.logger_backends=[]"]
    jobs.collect(load_config("toy_ppo_compact", own, purpose="collect"))
    jobs.sft(load_config("toy_ppo_compact", own, purpose="sft"))
    return folder / "sft_log"


def train(folder: Path, row: Logged, values: Mapping[str, Any]) -> Path:
    """The run itself; returns its folder."""
    ray = [f"cluster.ray_address={values['ray_address']}"] if "ray_address" in values else []
    own = [f"runner.logger.log_path={folder}", "runner.logger.logger_backends=[]"]
    jobs.train(load_config(row.recipe, [*own, *row.overrides, *ray]))
    return folder


def test_every_documented_name_is_in_the_table() -> None:
    assert set(table()) == set(METRICS)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_logs_its_names(tmp_path: Path, request: pytest.FixtureRequest, run: str) -> None:
    row = RUNS[run]
    values = {name: request.getfixturevalue(name) for name in row.fixtures}
    play: Callable[[], Path] = (
        (lambda: imitate(tmp_path)) if run == "imitation" else lambda: train(tmp_path, row, values)
    )
    found = emitted(play())
    expected = {name for name, by in table().items() if by == run}
    expected |= {alias for alias, name in CANONICAL.items() if name in expected}
    assert expected <= found, sorted(expected - found)
