"""`rlinf collect`: scripted experts play, and their successful episodes become a dataset."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from rlinf.config.schema import Config
from rlinf.data.noise import generator
from rlinf.demos.player import Demo, DemoJob, DemoPlayer
from rlinf.demos.writer import DatasetWriter, EncodedImages, encoded_images
from rlinf.envs.spec import env_options, env_spec, ids_of_task
from rlinf.errors import UserError
from rlinf.progress import report
from rlinf.storage.atomic_folder import atomic_folder, check_output

REPORT_EVERY = 50  # episodes of a task
Encoded = tuple[Demo, list[EncodedImages]]  # an episode, and its cameras


@dataclass
class _Quota:
    """The episodes of one task that were played, and how many are wanted."""

    task: str
    ids: Sequence[int]  # the task's demonstration ids
    number: int  # position in the suite; seeds the task's random numbers
    kept: int = 0  # successful episodes
    attempts: int = 0
    used: set[int] = field(default_factory=set)  # reset ids

    def next_job(self, cfg: Config) -> DemoJob:
        """The task's next attempt, which does not depend on other tasks."""
        rng = generator(cfg.runner.seed, "demo", self.number, self.attempts)
        self.attempts += 1
        reset_id = self.ids[int(rng.integers(len(self.ids)))]
        while reset_id in self.used:
            reset_id = self.ids[int(rng.integers(len(self.ids)))]
        self.used.add(reset_id)
        std, noise_seed = float(rng.uniform(0.0, cfg.collect.action_noise)), int(rng.integers(1 << 62))
        return DemoJob(reset_id=reset_id, max_steps=_horizon(cfg), noise_std=std, noise_seed=noise_seed)


def collect_demos(cfg: Config, *, on_progress: Callable[[str], None] = print, overwrite: bool = False) -> Path:
    """Play until every task has its successful episodes, or no attempts left; returns the dataset folder."""
    wanted, spec, folder = cfg.collect, env_spec(cfg.env.train), Path(cfg.collect.output)
    quotas = [_Quota(t, ids_of_task(spec, "demo", t), spec.tasks.index(t)) for t in wanted.tasks or spec.tasks]
    if spec.expert_drives and wanted.action_noise > 0:
        raise UserError(
            f"collect.action_noise={wanted.action_noise} must be 0 with env_type={cfg.env.train.env_type}: its expert "
            "moves the robot itself, along paths that it plans"
        )
    check_output(folder, "collect.output", "dataset", overwrite=overwrite)
    with atomic_folder(folder, what=f"collect.output={folder}") as work:
        with (
            DatasetWriter(work, spec) as writer,
            DemoPlayer(cfg.env.train, spec, num_processes=_processes(cfg, quotas), encodes=True) as player,
        ):
            _play(cfg, player, writer, quotas, on_progress)
            if not any(q.kept for q in quotas):
                hint = "raise collect.max_steps or lower collect.action_noise"
                raise UserError(f"no demonstration succeeded within {_horizon(cfg)} steps; {hint}")
        failed = [q.task for q in quotas if q.kept < wanted.episodes_per_task]
        kept = {q.task: {"episodes": q.kept, "attempts": q.attempts} for q in quotas}
        record = {"seed": cfg.runner.seed, "simulator": cfg.env.train.env_type}
        options, suite = asdict(env_options(cfg.env.train)), cfg.env.train.task_suite_name
        record |= {"options": options | ({"task_suite_name": suite} if suite else {}), "horizon": _horizon(cfg)}
        record |= {"collect": asdict(wanted), "tasks": kept, "failed_tasks": failed}
        (work / "meta/collect.json").write_text(json.dumps(record, indent=1))
    for task in failed:
        on_progress(f"{task}: only {kept[task]['episodes']} of {wanted.episodes_per_task} episodes succeeded")
    total, attempts = sum(q.kept for q in quotas), sum(q.attempts for q in quotas)
    on_progress(f"{total} successful episodes of {len(quotas)} tasks from {attempts} attempts")
    return folder


def _processes(cfg: Config, quotas: Sequence[_Quota]) -> int:
    """Simulator processes to play in: no more than episodes; 0 lets the player choose."""
    episodes = len(quotas) * cfg.collect.episodes_per_task
    return episodes if episodes < (cfg.env.train.num_processes or 2) else 0


def _horizon(cfg: Config) -> int:
    """Steps after which an attempt has failed."""
    return cfg.collect.max_steps or cfg.env.train.max_episode_steps


def _play(
    cfg: Config, player: DemoPlayer, writer: DatasetWriter, quotas: Sequence[_Quota], on_progress: Callable[[str], None]
) -> None:
    """Play as many attempts as episodes are wanted, and another for each that failed, after those already due.

    Which are played, and their order in the dataset, does not depend on the processes: an attempt is played as soon as
    another is known to have failed, but counts where it would stand if they were played one by one.
    """
    wanted = cfg.collect.episodes_per_task
    jobs: list[DemoJob] = []
    attempts: list[tuple[_Quota, int]] = []  # of each job: the quota, and which of its attempts it is

    def attempt(quota: _Quota) -> None:
        if quota.attempts < _most_attempts(cfg, quota):
            attempts.append((quota, quota.attempts))
            jobs.append(quota.next_job(cfg))

    def another(index: int, played: Encoded | None) -> None:
        if played is None:
            attempt(attempts[index][0])

    for quota in quotas:
        for _ in range(wanted):
            attempt(quota)
    order = deque((quota.number, number) for quota, number in attempts)  # in which they count
    played: dict[tuple[int, int], Encoded | None] = {}  # those whose turn has not come
    next_of = {quota.number: quota.attempts for quota in quotas}  # the attempt that the next failure calls for
    by_number = {quota.number: quota for quota in quotas}
    for index, encoded in enumerate(player.play_and(_encode, jobs, another)):
        played[attempts[index][0].number, attempts[index][1]] = encoded
        while order and order[0] in played:
            number, _ = key = order.popleft()
            quota, encoded = by_number[number], played.pop(key)
            kept = sum(q.kept for q in quotas) + (encoded is not None)
            report(f"collecting {quota.task}", kept, wanted * len(quotas))
            if encoded is None:
                if next_of[number] < _most_attempts(cfg, quota):
                    order.append((number, next_of[number]))
                    next_of[number] += 1
                continue
            quota.kept += 1
            _add(writer, *encoded)
            if quota.kept == wanted or quota.kept % REPORT_EVERY == 0:
                on_progress(f"{quota.task}: {quota.kept} episodes from {quota.attempts} attempts")


def _most_attempts(cfg: Config, quota: _Quota) -> int:
    """Attempts that a task may take; an id is played once."""
    return min(cfg.collect.max_attempts * cfg.collect.episodes_per_task, len(quota.ids))


def _encode(demo: Demo) -> Encoded | None:
    """A successful demonstration and its cameras as the dataset holds them, the main one first; None for a failure."""
    if not demo.success:
        return None
    return replace(demo, pictures=()), [encoded_images(p.pngs, np.stack(p.pixels)) for p in demo.pictures]


def _add(writer: DatasetWriter, demo: Demo, cameras: Sequence[EncodedImages]) -> None:
    writer.add(
        images=cameras[0],
        wrist_images=cameras[1:],
        states=demo.states,
        actions=demo.labels,
        critic_states=demo.critic_state,
        task=demo.description,
        extra={
            "task_name": demo.task,
            "reset_id": demo.job.reset_id,
            "noise_std": demo.job.noise_std,
            "noise_seed": demo.job.noise_seed,
        },
    )
