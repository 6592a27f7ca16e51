"""Play scripted experts in simulator processes: the raw material of demonstrations, and how good the experts are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf.data.types import EpisodeRecord
from rlinf.envs.config import EnvConfig
from rlinf.envs.fleet import Fleet
from rlinf.envs.spec import env_options, env_spec, eval_trials, find_simulator
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.simulators.contract import EnvSpec

PIECE = 32  # expert steps per message: bounds the shared memory and shows progress


@dataclass(frozen=True)
class DemoJob:
    """One demonstration to play: which episode, for how long, and with which noise."""

    reset_id: int
    max_steps: int
    noise_std: float = 0.0  # of the Gaussian noise added to executed actions; labels stay clean
    noise_seed: int = 0


@dataclass(frozen=True)
class Demo:
    """One episode as played; row t is what the expert saw and did at step t, up to and including success."""

    job: DemoJob
    task: str
    description: str
    success: bool
    images: np.ndarray  # u8 [T, H, W, 3]
    states: np.ndarray  # f32 [T, S]
    labels: np.ndarray  # f32 [T, A] what the expert wanted, clipped to [-1, 1]
    actions: np.ndarray  # f32 [T, A] what was executed
    wrist_images: np.ndarray | None = None  # u8 [T, N, h, w, 3]
    critic_state: np.ndarray | None = None  # f32 [T, K] the simulator's privileged state, where it tells it


@dataclass
class _Running:
    """A demonstration under way, of which some pieces were played."""

    job: DemoJob
    task: str
    description: str
    steps: int = 0
    pieces: list[dict[str, np.ndarray]] = field(default_factory=list)

    def next_piece(self) -> dict[str, Any]:
        """Arguments of the command `expert_chunk` that plays its next steps."""
        steps, job = min(PIECE, self.job.max_steps - self.steps), self.job
        return {"steps": steps, "stop": True, "record": False, "noise_std": job.noise_std, "noise_seed": job.noise_seed}

    def demo(self, success: bool) -> Demo:
        """Join the pieces into the finished demonstration."""
        columns = {name: np.concatenate([piece[name] for piece in self.pieces]) for name in self.pieces[0]}
        return Demo(self.job, self.task, self.description, success, **columns)


class DemoPlayer:
    """Several simulator processes that play one expert episode each at a time.

    Example: `with DemoPlayer(cfg.env.train, spec) as player: demos = list(player.play(jobs))`
    """

    def __init__(self, cfg: EnvConfig, spec: EnvSpec, *, num_processes: int = 0) -> None:
        check_expert(cfg)
        self._jobs: Sequence[DemoJob] = ()  # being played, by row
        self._num_rows = num_processes or cfg.num_processes or os.cpu_count() or 1
        self._fleet = Fleet(
            cfg,
            replace(spec, batched=False),  # an expert looks into one scene at a time
            range(self._num_rows),
            options=env_options(cfg),
            num_processes=self._num_rows,
            chunk_size=PIECE,
            playing=lambda row: f"demonstration reset id {self._jobs[row].reset_id}" if row < len(self._jobs) else "",
            critic_state=True,
            demonstrations=True,
        )

    def __enter__(self) -> DemoPlayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the simulator processes."""
        self._fleet.close()

    def play(self, jobs: Sequence[DemoJob]) -> Iterator[Demo]:
        """Yield a demonstration for each job, in their order; also those that failed, as `Demo.success` tells."""
        self._fleet.start()
        for first in range(0, len(jobs), self._num_rows):
            yield from self._play_together(jobs[first : first + self._num_rows])

    def _play_together(self, jobs: Sequence[DemoJob]) -> list[Demo]:
        """Play one job per process, all at once, in pieces; a job whose simulator died begins again."""
        self._jobs = jobs
        self._fleet.reset_failure_count()
        running: dict[int, _Running] = {}
        finished: dict[int, Demo] = {}
        while len(finished) < len(jobs):
            waiting = [row for row in range(len(jobs)) if row not in running and row not in finished]
            replies, _ = self._fleet.command("reset", {row: {"reset_id": jobs[row].reset_id} for row in waiting})
            running |= {row: _Running(jobs[row], r["task"], r["description"]) for row, r in replies.items()}
            replies, gone = self._fleet.command("expert_chunk", {row: run.next_piece() for row, run in running.items()})
            for row, reply in replies.items():
                run, played = running[row], slice(reply["steps"])
                run.steps += reply["steps"]
                run.pieces.append({n: rows[played].copy() for n, rows in self._fleet.arrays(row, "demo_").items()})
                success, done = (bool(self._fleet.array(row, name)[played].any()) for name in ("success", "done"))
                if success or done or run.steps >= run.job.max_steps:
                    finished[row] = running.pop(row).demo(success)
            running = {row: run for row, run in running.items() if row not in gone}
        return [finished[row] for row in range(len(jobs))]


def check_expert(cfg: EnvConfig) -> None:
    """Refuse a simulator without a scripted expert."""
    if "Expert" not in vars(find_simulator(cfg.env_type)):
        raise UserError(f"simulator {cfg.env_type!r} has no scripted expert")


def play_trials(cfg: EnvConfig, *, seed: int) -> list[EpisodeRecord]:
    """Let the expert play the held-out trials of an evaluation; returns their records in the order of the trials."""
    check_expert(cfg)
    spec = replace(env_spec(cfg, "env.eval"), batched=False)  # an expert looks into one scene at a time
    trials = eval_trials(cfg, spec)
    num_envs = min(cfg.total_num_envs, len(trials))
    cfg = replace(cfg, total_num_envs=num_envs)
    env = VecEnv(cfg, spec, env_ids=range(num_envs), mode="eval", chunk_size=PIECE, seed=seed, trials=trials)
    try:
        env.reset()
        while not env.done:
            env.chunk_step(None)
    finally:
        env.close()
    return sorted(env.drain_episodes(), key=lambda record: trials.index(record.reset_id))
