"""VecEnv: a batch of environments over simulator processes. Written once for every simulator.

It owns chunks, auto-reset, groups, ignore_terminations, relative reward, episode records, video, and what happens when a
simulator dies. Letters: B envs, C actions per chunk, A action dims, K critic-state dims.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import torch

from rlinf.config.schema import EnvConfig
from rlinf.data.types import EnvStep, EpisodeRecord, Observation, Tensor
from rlinf.envs.episodes import Episode, EvalIds, TrainIds, split_evenly
from rlinf.envs.sim.base import EnvSpec
from rlinf.envs.spec import env_options, eval_trials
from rlinf.envs.supervise import ScenesReply, SimProcess, SimulatorError, SimulatorFault, command_scenes
from rlinf.envs.video import VideoRecorder
from rlinf.errors import UserError

__all__ = ["VecEnv", "eval_trials"]
logger = logging.getLogger(__name__)


class VecEnv:
    """`num_envs` environments, numbered from `first_env` over all workers and stages.

    Train: `reset()` begins the next episode everywhere; an ended episode waits for it, or restarts at the chunk end with
    auto_reset. Eval: each env plays its share of `trials` one after another, whatever auto_reset says, until `done`.
    """

    def __init__(
        self,
        cfg: EnvConfig,
        spec: EnvSpec,
        *,
        num_envs: int,
        first_env: int,
        mode: Literal["train", "eval"],
        chunk_size: int,
        seed: int,
        trials: Sequence[int] | None = None,
        video: VideoRecorder | None = None,
        critic_state: bool = False,
    ) -> None:
        if mode == "eval" and trials is None:
            raise ValueError("mode='eval' needs trials: the held-out reset ids to play")
        if first_env % cfg.group_size or num_envs % cfg.group_size:
            raise UserError(f"num_envs={num_envs} from env {first_env} splits a group of group_size={cfg.group_size}")
        self.cfg, self.spec, self.mode, self.seed = cfg, spec, mode, seed
        self.num_envs, self.chunk_size = num_envs, chunk_size
        self.num_restarts = 0  # simulator failures since the start, for the metrics
        self._options = env_options(cfg, f"env.{mode}")
        self._critic_state = critic_state
        self._video = video
        self._episodes = [Episode(first_env + i) for i in range(num_envs)]
        self._ids: TrainIds | EvalIds = TrainIds(cfg, spec, seed) if trials is None else EvalIds(cfg, trials)
        self._begun = False
        self._parked: dict[str, Any] | None = None  # state while offloaded
        count = min(num_envs, cfg.num_processes or os.cpu_count() or 1)
        self._rows = split_evenly(num_envs, count)  # rows of each process
        self._place = {row: (p, row - rows[0]) for p, rows in enumerate(self._rows) for row in rows}
        self._num_recorded = min(num_envs, video.max_envs) if video else 0
        self._processes: list[SimProcess] = []
        self._failures = [0] * count  # per process since `begin_step`

    # ------------------------------------------------------------------ the loop

    def reset(self) -> EnvStep:
        """Train: the next episode of every env. Eval: everybody's first trial."""
        self._start_processes()
        self.begin_step()
        self.flush_video()
        if isinstance(self._ids, EvalIds):
            for episode in self._episodes:
                episode.number, episode.waiting = -1, True
        else:
            self._align_groups()
        self._begun = True
        self._begin_episodes(range(self.num_envs))
        self._film_start()
        return self._step(self._observation())

    def chunk_step(self, actions: Tensor) -> EnvStep:
        """Execute actions f32 [B, C, A_env]; rows that wait are not simulated and come back with valid=False."""
        self._check_actions(actions)
        B, C = actions.shape[:2]
        rewards, terminated = np.zeros((B, C), np.float32), np.zeros((B, C), bool)
        truncated, valid = np.zeros((B, C), bool), np.zeros((B, C), bool)
        running = [row for row in range(B) if not self._episodes[row].waiting]
        replies, lost = self._play(actions.numpy(), running)
        records: list[EpisodeRecord] = []
        ended: list[int] = []
        for row, reply in replies.items():
            episode, steps = self._episodes[row], int(reply["steps"])
            levels, success, done = self._results(row)
            ends = np.zeros_like(success) if self.cfg.ignore_terminations else success | done
            if ends[:steps].any():
                steps = int(np.argmax(ends)) + 1
                terminated[row, steps - 1] = True
            rewards[row, :steps] = episode.advance(
                [self.cfg.reward_coef * float(x) for x in levels[:steps]],
                success[:steps].tolist(),
                relative=self.cfg.use_rel_reward,
            )
            episode.extra = reply["info"]
            valid[row, :steps] = True
            # a success on the last allowed step is a success: the flags never coincide
            truncated[row, steps - 1] = episode.elapsed >= self.cfg.max_episode_steps and not terminated[row, steps - 1]
            if terminated[row, steps - 1] or truncated[row, steps - 1]:
                episode.waiting = True
                ended.append(row)
                records.append(episode.record(self.spec.suite, self.seed))
        self._film(replies, rewards)
        restart = ended if self.cfg.auto_reset or self.mode == "eval" else []
        final_obs = self._observation(restart) if restart and self.mode == "train" else None
        lost |= self._begin_episodes([*lost, *restart])
        for row in lost:
            rewards[row], terminated[row], truncated[row], valid[row] = 0.0, False, False, False
        return EnvStep(
            obs=self._observation(),
            rewards=torch.from_numpy(rewards),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            valid=torch.from_numpy(valid),
            lost=torch.tensor([row in lost for row in range(B)]),
            final_obs=final_obs,
            final_rows=torch.tensor(restart) if final_obs is not None else None,
            episodes=tuple(records),
        )

    @property
    def done(self) -> bool:
        """Eval: whether every trial of these envs has been played."""
        return self.mode == "eval" and self._begun and all(e.waiting for e in self._episodes)

    def begin_step(self) -> None:
        """A new training step: failures so far no longer count against max_restarts."""
        self._failures = [0] * len(self._rows)

    # ------------------------------------------------------------------ keeping and releasing

    def state(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as JSON."""
        if self._parked is not None:
            return self._parked
        rows = [row for row, e in enumerate(self._episodes) if e.on_stage] if self._processes else []
        scenes: dict[int, str] = {}
        for p, reply in self._command("get_state", {row: {} for row in rows}).items():
            if isinstance(reply, SimulatorFault) or reply.failed:
                raise SimulatorError(f"{self._who(p)} cannot save its state: {reply}")
            scenes |= {self._rows[p][scene]: r["state"] for scene, r in reply.replies.items()}
        return {
            "begun": self._begun,
            "episodes": [asdict(e) for e in self._episodes],
            "scenes": {str(row): state for row, state in scenes.items()},
        }

    def load_state(self, saved: Mapping[str, Any]) -> EnvStep:
        """Continue from `state()`; returns the observation the envs stand at."""
        if len(saved["episodes"]) != self.num_envs:
            raise UserError(f"the saved state holds {len(saved['episodes'])} envs, these are {self.num_envs}")
        self._start_processes()
        self._begun = saved["begun"]
        self._episodes = [Episode(**e) for e in saved["episodes"]]
        work = {int(row): {"state": state} for row, state in saved["scenes"].items()}
        for p, reply in self._command("set_state", work).items():
            if isinstance(reply, SimulatorFault) or reply.failed:
                raise SimulatorError(f"{self._who(p)} cannot continue a saved state: {reply}")
        return self._step(self._observation())

    def offload(self) -> None:
        """Remember where the envs stand and end the simulator processes."""
        if self._processes:
            self._parked = self.state()
            self._close_processes()

    def onload(self) -> None:
        """Start the simulators again and continue; nothing to do when they run."""
        if self._parked is not None:
            parked, self._parked = self._parked, None
            self.load_state(parked)

    def flush_video(self) -> None:
        """Finish the running video file; the next frame begins another."""
        if self._video is not None:
            self._video.flush()

    def close(self) -> None:
        """End the simulator processes and the video."""
        self.flush_video()
        self._parked = None
        self._close_processes()

    # ------------------------------------------------------------------ simulator processes

    def _start_processes(self) -> None:
        if self._parked is not None:
            self.onload()
        if self._processes:
            return
        for p, rows in enumerate(self._rows):
            recorded = sum(row < self._num_recorded for row in rows)
            process = SimProcess(
                simulator=self.cfg.env_type,
                options=self._options,
                num_scenes=len(rows),
                layout=self._layout(len(rows), recorded),
                name=f"{p} (envs {self._episodes[rows[0]].env_id}-{self._episodes[rows[-1]].env_id})",
                python=self.cfg.python,
            )
            self._processes.append(process)
            process.start()
        try:
            for process in self._processes:
                process.wait_ready()
        except Exception:
            self._close_processes()
            raise

    def _close_processes(self) -> None:
        for process in self._processes:
            process.close()
        self._processes = []
        for episode in self._episodes:
            episode.on_stage = False

    def _layout(self, scenes: int, recorded: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        spec, C = self.spec, self.chunk_size
        layout: dict[str, tuple[str, tuple[int, ...]]] = {
            "actions": ("float32", (scenes, C, spec.action_dim)),
            "rewards": ("float32", (scenes, C)),
            "success": ("bool", (scenes, C)),
            "done": ("bool", (scenes, C)),
            "images": ("uint8", (scenes, *spec.image_size, 3)),
        }
        if spec.num_wrist_images:
            layout["wrist_images"] = ("uint8", (scenes, spec.num_wrist_images, *spec.wrist_image_size, 3))
        if spec.state_dim:
            layout["states"] = ("float32", (scenes, spec.state_dim))
        if self._critic_state and spec.critic_state_dim:
            layout["critic_state"] = ("float32", (scenes, spec.critic_state_dim))
        if recorded:
            layout["frames"] = ("uint8", (recorded, C, *spec.image_size, 3))
        return layout

    def _command(
        self, command: str, rows: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, ScenesReply | SimulatorFault]:
        """One command on some rows, in all processes at once; answers by process number."""
        work: dict[SimProcess, list[tuple[int, Mapping[str, Any]]]] = {}
        for row, arguments in rows.items():
            p, scene = self._place[row]
            work.setdefault(self._processes[p], []).append((scene, arguments))
        number = {process: p for p, process in enumerate(self._processes)}
        replies = command_scenes(command, work, self.cfg.step_deadline_s)
        return {number[process]: reply for process, reply in replies.items()}

    def _play(self, actions: np.ndarray, running: list[int]) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Send the chunk to the running rows; returns their replies and the rows whose simulator failed."""
        work: dict[int, dict[str, Any]] = {}
        for row in running:
            p, scene = self._place[row]
            self._processes[p].arrays["actions"][scene] = actions[row]
            left = self.cfg.max_episode_steps - self._episodes[row].elapsed
            slot = row - self._rows[p][0] if row < self._num_recorded else -1
            stop = not self.cfg.ignore_terminations
            work[row] = {"steps": min(self.chunk_size, left), "stop": stop, "slot": slot}
        replies: dict[int, dict[str, Any]] = {}
        lost: set[int] = set()
        for p, reply in self._command("chunk", work).items():
            failed = self._failed_rows(p, reply)
            lost |= failed
            if isinstance(reply, ScenesReply):
                replies |= {self._rows[p][scene]: r for scene, r in reply.replies.items()}
        return {row: replies[row] for row in sorted(replies) if row not in lost}, lost

    def _begin_episodes(self, rows: Iterable[int]) -> set[int]:
        """Start the next episode of `rows` (eval: those with a trial left); returns other rows lost on the way."""
        wanted = set(rows)
        pending, lost = set(wanted), set()
        while pending:
            work = {}
            for row in sorted(pending):
                episode = self._episodes[row]
                number = episode.number + 1
                if isinstance(self._ids, EvalIds):
                    if not episode.waiting:
                        number = episode.number  # a lost trial is played again
                    if number >= self._ids.count(episode.env_id):
                        continue
                episode.begin(number, self._ids.pick(episode.env_id, number))
                work[row] = {"reset_id": episode.reset_id}
            pending = set()
            for p, reply in self._command("reset", work).items():
                failed = self._failed_rows(p, reply)
                pending |= failed
                lost |= failed - wanted
                if isinstance(reply, ScenesReply):
                    for scene, r in reply.replies.items():
                        episode = self._episodes[self._rows[p][scene]]
                        episode.task, episode.description = r["task"], r["description"]
        return lost

    def _failed_rows(self, p: int, reply: ScenesReply | SimulatorFault) -> set[int]:
        """Rows of process `p` whose running episode is gone; restarts the process when it died."""
        if isinstance(reply, ScenesReply) and not reply.failed:
            return set()
        died = isinstance(reply, SimulatorFault)
        what = str(reply) if isinstance(reply, SimulatorFault) else next(iter(reply.failed.values()))
        rows = set(self._rows[p]) if died else {self._rows[p][scene] for scene in reply.failed}  # type: ignore[union-attr]
        self._count_failure(p, what, sorted(rows))
        while died:
            try:
                self._processes[p].start()
                self._processes[p].wait_ready()
                died = False
            except SimulatorFault as fault:
                self._count_failure(p, str(fault), sorted(rows))
        for row in rows:
            self._episodes[row].on_stage = False
        return {row for row in rows if not self._episodes[row].waiting}

    def _count_failure(self, p: int, what: str, rows: list[int]) -> None:
        self._failures[p] += 1
        self.num_restarts += 1
        playing = [e for e in (self._episodes[row] for row in rows) if not e.waiting]
        where = "; ".join(f"env {e.env_id} task {e.task or '?'} reset id {e.reset_id}" for e in playing[:4])
        text = f"{self._who(p)} failed ({where}{' ...' if len(playing) > 4 else ''}): {what}"
        if self._failures[p] > self.cfg.max_restarts:
            raise SimulatorError(f"{text}\ngiven up after {self.cfg.max_restarts} restarts in one step (env.max_restarts)")
        logger.warning("%s\nrestarting it; the steps of these episodes are masked", text)

    def _who(self, p: int) -> str:
        ids = [self._episodes[row].env_id for row in self._rows[p]]
        return f"simulator {self.cfg.env_type!r} of envs {ids[0]}-{ids[-1]}"

    # ------------------------------------------------------------------ rows

    def _align_groups(self) -> None:
        """Members of a group count alike again, even when one of them lost an episode."""
        size = self.cfg.group_size
        for start in range(0, self.num_envs, size):
            members = self._episodes[start : start + size]
            latest = max(e.number for e in members)
            for episode in members:
                episode.number = latest

    def _check_actions(self, actions: Tensor) -> None:
        expected = (self.num_envs, self.chunk_size, self.spec.action_dim)
        if tuple(actions.shape) != expected:
            raise ValueError(f"actions have shape {tuple(actions.shape)}, expected [B, C, A] = {expected}")
        if not self._begun:
            raise ValueError("chunk_step before reset: call reset() or load_state() first")
        bad = (~torch.isfinite(actions)).nonzero()
        for row, step, dim in bad.tolist():
            if not self._episodes[row].waiting:
                episode = self._episodes[row]
                raise UserError(
                    f"action of env {episode.env_id} is not finite: {actions[row, step, dim].item()} in column {dim} "
                    f"({self.spec.action_names[dim]}) at step {episode.elapsed + step} of reset id {episode.reset_id}"
                )

    def _results(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        p, scene = self._place[row]
        arrays = self._processes[p].arrays
        return arrays["rewards"][scene], arrays["success"][scene], arrays["done"][scene]

    def _step(self, obs: Observation) -> EnvStep:
        """An EnvStep that carries an observation and nothing else."""
        shape = (self.num_envs, self.chunk_size)
        return EnvStep(
            obs=obs,
            rewards=torch.zeros(shape),
            terminated=torch.zeros(shape, dtype=torch.bool),
            truncated=torch.zeros(shape, dtype=torch.bool),
            valid=torch.ones(shape, dtype=torch.bool),
            lost=torch.zeros(self.num_envs, dtype=torch.bool),
        )

    def _observation(self, rows: Sequence[int] | None = None) -> Observation:
        """A copy of what the simulators last showed, for all rows or some."""
        rows = range(self.num_envs) if rows is None else rows
        return Observation(
            images=self._gather("images", rows),
            wrist_images=self._gather("wrist_images", rows) if self.spec.num_wrist_images else None,
            states=self._gather("states", rows) if self.spec.state_dim else None,
            task_descriptions=[self._episodes[row].description for row in rows],
            critic_state=self._privileged(rows) if self._critic_state else None,
        )

    def _privileged(self, rows: Sequence[int]) -> Tensor:
        """The simulator's own state, if it shows one, and the share of the episode that has passed: f32 [B, K + 1]."""
        elapsed = torch.tensor([[self._episodes[row].elapsed / self.cfg.max_episode_steps] for row in rows])
        if not self.spec.critic_state_dim:
            return elapsed
        return torch.cat([self._gather("critic_state", rows), elapsed], dim=1)

    def _gather(self, name: str, rows: Sequence[int]) -> Tensor:
        if len(rows) == self.num_envs:
            return torch.from_numpy(np.concatenate([p.arrays[name] for p in self._processes]))
        places = [self._place[row] for row in rows]
        return torch.from_numpy(np.stack([self._processes[p].arrays[name][scene] for p, scene in places]))

    # ------------------------------------------------------------------ video

    def _film_start(self) -> None:
        if self._video is not None:
            rows = range(self._num_recorded)
            images = self._observation(rows).images.numpy()
            self._video.write(list(images), [_caption(self._episodes[row], 0.0) for row in rows])

    def _film(self, replies: Mapping[int, Mapping[str, Any]], rewards: np.ndarray) -> None:
        """Write the frames of the chunk; an env that ended keeps showing its last one."""
        if self._video is None or not any(row < self._num_recorded for row in replies):
            return
        for t in range(max(int(r["steps"]) for row, r in replies.items() if row < self._num_recorded)):
            frames: list[np.ndarray | None] = [None] * self._num_recorded
            captions: list[list[str] | None] = [None] * self._num_recorded
            for row in range(self._num_recorded):
                if row in replies and t < replies[row]["steps"]:
                    p, scene = self._place[row]
                    frames[row] = self._processes[p].arrays["frames"][scene, t]
                    captions[row] = _caption(self._episodes[row], float(rewards[row, t]))
            self._video.write(frames, captions)


def _caption(episode: Episode, reward: float) -> list[str]:
    return [
        episode.task.removesuffix("-v3"),
        f"step {episode.elapsed} r {reward:.1f}" + (" success" if episode.success_once else ""),
    ]
