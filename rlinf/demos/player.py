"""Play scripted experts in simulator processes: the raw material of demonstrations, and how good the experts are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf.data.types import EpisodeRecord
from rlinf.envs.config import EnvConfig
from rlinf.envs.fleet import scene_arrays
from rlinf.envs.sim_process import ScenesReply, SimProcess, SimulatorDiedError, command_scenes, start_all
from rlinf.envs.spec import env_options, env_spec, eval_trials, find_simulator
from rlinf.envs.vec import VecEnv
from rlinf.errors import SimulatorError, UserError
from rlinf.simulators.contract import EnvSpec

PIECE = 32  # expert steps per message: bounds the shared memory and shows progress


@dataclass(frozen=True)
class DemoJob:
    """One episode to play."""

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
    wrist_images: np.ndarray | None  # u8 [T, N, h, w, 3]
    states: np.ndarray  # f32 [T, S]
    labels: np.ndarray  # f32 [T, A] what the expert wanted, clipped to [-1, 1]
    actions: np.ndarray  # f32 [T, A] what was executed
    critic_states: np.ndarray | None = None  # f32 [T, K] the simulator's privileged state, where it tells it


@dataclass
class _Running:
    """A demonstration under way in one process."""

    job: DemoJob
    task: str
    description: str
    steps: int = 0
    pieces: list[dict[str, np.ndarray]] = field(default_factory=list)


class DemoPlayer:
    """Several simulator processes that play one expert episode each at a time.

    Example: `with DemoPlayer(cfg.env.train, spec) as player: demos = list(player.play(jobs))`
    """

    def __init__(self, cfg: EnvConfig, spec: EnvSpec, *, num_processes: int = 0) -> None:
        check_expert(cfg)
        layout = scene_arrays(spec, 1, 1, 0, False)
        layout |= {
            "demo_images": ("uint8", (PIECE, *spec.image_size, 3)),
            "demo_states": ("float32", (PIECE, spec.state_dim)),
            "demo_labels": ("float32", (PIECE, spec.action_dim)),
            "demo_actions": ("float32", (PIECE, spec.action_dim)),
        }
        if spec.num_wrist_images:
            layout["demo_wrist_images"] = ("uint8", (PIECE, spec.num_wrist_images, *spec.wrist_image_size, 3))
        if spec.critic_state_dim:
            layout["demo_critic_states"] = ("float32", (PIECE, spec.critic_state_dim))
        self._names = [name for name in layout if name.startswith("demo_")]
        self._deadline_s = cfg.step_deadline_s
        self._processes = [
            SimProcess(
                simulator=cfg.env_type,
                options=env_options(cfg),
                num_scenes=1,
                layout=layout,
                name=f"{p} (demonstrations)",
                python=cfg.python,
            )
            for p in range(num_processes or cfg.num_processes or os.cpu_count() or 1)
        ]
        self._started = False

    def __enter__(self) -> DemoPlayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def play(self, jobs: Sequence[DemoJob]) -> Iterator[Demo]:
        """The demonstrations of `jobs`, in their order: failures included, `success` tells."""
        self._start()
        for first in range(0, len(jobs), len(self._processes)):
            batch = dict(zip(self._processes, jobs[first : first + len(self._processes)], strict=False))
            yield from self._play_batch(batch)

    def _start(self) -> None:
        if not self._started:
            start_all(self._processes)
            self._started = True

    def _play_batch(self, jobs: dict[SimProcess, DemoJob]) -> list[Demo]:
        """One job per process, all at once, in pieces."""
        starts = {
            process: {"reset_id": job.reset_id, "noise_std": job.noise_std, "noise_seed": job.noise_seed}
            for process, job in jobs.items()
        }
        running = {
            process: _Running(jobs[process], reply["task"], reply["description"])
            for process, reply in self._command("demo_start", starts).items()
        }
        finished: dict[SimProcess, Demo] = {}
        while running:
            work = {p: {"steps": min(PIECE, r.job.max_steps - r.steps)} for p, r in running.items()}
            for process, reply in self._command("demo_steps", work).items():
                run = running[process]
                run.steps += reply["steps"]
                run.pieces.append({n: process.arrays[n][: reply["steps"]].copy() for n in self._names})
                if reply["success"] or run.steps >= run.job.max_steps:
                    finished[process] = _join(running.pop(process), reply["success"])
        return [finished[process] for process in jobs]

    def _command(self, command: str, work: dict[SimProcess, dict]) -> dict[SimProcess, dict]:
        replies = {}
        scenes = {process: [(0, arguments)] for process, arguments in work.items()}
        for process, reply in command_scenes(command, scenes, self._deadline_s).items():
            if isinstance(reply, SimulatorDiedError):
                raise SimulatorError(str(reply))
            assert isinstance(reply, ScenesReply)
            if reply.failed:
                raise SimulatorError(f"a demonstration failed in simulator process {process.name}:\n{reply.failed[0]}")
            replies[process] = reply.replies[0]
        return replies


def check_expert(cfg: EnvConfig) -> None:
    """Refuse a simulator without a scripted expert."""
    if "Expert" not in vars(find_simulator(cfg.env_type)):
        raise UserError(f"simulator {cfg.env_type!r} has no scripted expert")


def play_trials(cfg: EnvConfig, *, seed: int) -> list[EpisodeRecord]:
    """The held-out trials of an evaluation, played by the expert; images are drawn now and then, and not looked at."""
    check_expert(cfg)
    spec = replace(env_spec(cfg, "env.eval"), batched=False)  # an expert looks into one scene at a time
    trials = eval_trials(cfg, spec)
    num_envs = min(cfg.total_num_envs, len(trials))
    env = VecEnv(
        replace(cfg, total_num_envs=num_envs),
        spec,
        num_envs=num_envs,
        first_env=0,
        mode="eval",
        chunk_size=PIECE,
        seed=seed,
        trials=trials,
    )
    try:
        env.reset()
        while not env.done:
            env.chunk_step(None)
    finally:
        env.close()
    return sorted(env.drain_episodes(), key=lambda record: trials.index(record.reset_id))


def _join(run: _Running, success: bool) -> Demo:
    def column(name: str) -> np.ndarray:
        return np.concatenate([piece[f"demo_{name}"] for piece in run.pieces])

    return Demo(
        job=run.job,
        task=run.task,
        description=run.description,
        success=success,
        images=column("images"),
        wrist_images=column("wrist_images") if "demo_wrist_images" in run.pieces[0] else None,
        states=column("states"),
        labels=column("labels"),
        actions=column("actions"),
        critic_states=column("critic_states") if "demo_critic_states" in run.pieces[0] else None,
    )
