"""VecEnv: a batch of environments over simulator processes, written once for every simulator.

It owns chunks, auto-reset, groups, ignore_terminations, relative reward, episode records, video, and what happens to an
episode when its simulator dies. Letters: B envs, C actions per chunk, A action dims, K columns of the simulator's
privileged state. A row is the position of an env in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from rlinf.data.types import EnvStep, EpisodeRecord, Observation, Tensor
from rlinf.envs.config import EnvConfig
from rlinf.envs.episodes import Episode, EvalIds, TrainIds
from rlinf.envs.fleet import Fleet
from rlinf.envs.spec import env_options, task_of
from rlinf.envs.video import VideoRecorder
from rlinf.errors import SimulatorError, UserError
from rlinf.simulators.contract import EnvSpec


class VecEnv:
    """The environments `env_ids`, numbered over all workers and stages; groups of them stay together.

    Train: `reset()` begins the next episode everywhere; an ended one waits for it, or restarts at the chunk end with
    auto_reset. Eval: each env plays its share of `trials` one after another, whatever auto_reset says, until `done`.
    """

    def __init__(
        self,
        cfg: EnvConfig,
        spec: EnvSpec,
        *,
        env_ids: Sequence[int],
        mode: Literal["train", "eval"],
        chunk_size: int,
        seed: int,
        trials: Sequence[int] | None = None,
        video: VideoRecorder | None = None,
        critic_state: bool = False,
        labels: Mapping[int, str] | None = None,
    ) -> None:
        """`labels`: reset id -> what the video calls the episode, in place of its task."""
        if mode == "eval" and trials is None:
            raise ValueError("mode='eval' needs trials: the held-out reset ids to play")
        if mode == "train" and (env_ids[0] % cfg.group_size or len(env_ids) % cfg.group_size):
            raise UserError(f"{len(env_ids)} envs from {env_ids[0]} on: splits a group of group_size={cfg.group_size}")
        if critic_state and not spec.critic_state_dim:
            raise UserError(f"suite {spec.suite!r} offers no privileged state for a critic")
        self.cfg, self.spec, self.mode, self.seed = cfg, spec, mode, seed
        self.num_envs, self.chunk_size = len(env_ids), chunk_size
        self._critic_state, self._video, self._labels = critic_state, video, labels or {}
        self._num_recorded = min(self.num_envs, video.max_envs) if video else 0
        self._episodes = [Episode(env_id) for env_id in env_ids]
        self._ids: TrainIds | EvalIds = TrainIds(cfg, spec, seed) if trials is None else EvalIds(cfg, trials)
        self._finished: list[EpisodeRecord] = []  # episodes that ended and were not handed out yet
        self._calls = 0  # evaluations: chunks played since the reset
        self._begun = False
        self._anew = False  # `state` began episodes that nobody has seen the start of
        self._offloaded: dict[str, Any] | None = None  # `state()`, while the processes are ended
        self._fleet = Fleet(
            cfg,
            spec,
            env_ids,
            options=env_options(cfg, f"env.{mode}"),
            chunk_size=chunk_size,
            playing=lambda row: self._episodes[row].title(),
            num_recorded=self._num_recorded,
            critic_state=critic_state,
            load_ahead=mode == "train",
        )

    @property
    def num_restarts(self) -> int:
        """Failures of simulators since the start, each of which cost a restart."""
        return self._fleet.num_restarts

    @property
    def num_tasks_built(self) -> int:
        """Tasks that simulators have loaded since the start, where the simulator keeps tasks in memory."""
        return self._fleet.num_tasks_built

    @property
    def done(self) -> bool:
        """Eval: whether every trial of these envs has been played."""
        return self.mode == "eval" and self._begun and all(e.waiting for e in self._episodes)

    def reset(self, *, new_step: bool = True) -> EnvStep:
        """Train: begin the next episode of every env. Eval: begin the first trial of every env.

        `new_step`: as `begin_step`; a further rollout of the same training step has the same budget of failures.
        """
        self.open()
        if new_step:
            self.begin_step()
        self.flush_video()
        self._begun = True
        if self.mode == "eval":
            self._calls = 0
            for episode in self._episodes:
                episode.number, episode.waiting = -1, True
        self._begin_episodes(range(self.num_envs), whole_groups=self.mode == "train")
        if self._video is not None:
            rows = range(self._num_recorded)
            self._video.write(
                list(self._fleet.gather("images", rows)),
                [self._caption(row, 0, 0.0, False) for row in rows],
            )
        return self.start()

    def chunk_step(self, actions: Tensor | None) -> EnvStep:
        """Execute actions f32 [B, C, A_env]; rows that wait are not simulated and come back with valid=False.

        None leaves the actions to the simulator's scripted expert.
        """
        if actions is not None:
            actions = actions.to("cpu", torch.float32)
            self._check_actions(actions)
        B, C = self.num_envs, self.chunk_size
        rewards = np.zeros((B, C), np.float32)
        terminated, truncated, valid = (np.zeros((B, C), bool) for _ in range(3))
        ended: list[int] = []
        replies, lost = self._play(None if actions is None else actions.numpy())
        self._calls += self.mode == "eval"
        for row, reply in replies.items():
            episode, steps = self._episodes[row], int(reply["steps"])
            success = self._fleet.array(row, "success")[:steps]
            ends = success | self._fleet.array(row, "done")[:steps]
            if ends.any() and not self.cfg.ignore_terminations:
                steps = int(np.argmax(ends)) + 1
                terminated[row, steps - 1] = True
            levels = [self.cfg.reward_coef * float(x) for x in self._fleet.array(row, "rewards")[:steps]]
            relative = self.cfg.use_rel_reward and not self.spec.pays_events
            rewards[row, :steps] = episode.advance(levels, success[:steps].tolist(), relative=relative)
            episode.extra, episode.calls = reply["info"], episode.calls + 1
            episode.told(reply["description"])
            valid[row, :steps] = True
            truncated[row, steps - 1] = self.is_cut(episode, terminated=bool(terminated[row, steps - 1]))
            if terminated[row, steps - 1] or truncated[row, steps - 1]:
                episode.waiting = True
                ended.append(row)
                self._finished.append(episode.record(self.spec.suite, self.seed, self._video_of(row)))
        self._film({row: int(valid[row].sum()) for row in replies if row < self._num_recorded}, rewards)
        again = ended if self.cfg.auto_reset or self.mode == "eval" else []
        final_obs = self._observation(again) if again and self.mode == "train" else None
        lost |= self._begin_episodes([*lost, *again])
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
            final_rows=torch.tensor(again) if final_obs is not None else None,
            trials=self._trials(),
        )

    def step_limit(self, episode: Episode) -> int:
        """Steps after which an episode is cut: max_episode_steps, or less where its task has a limit of its own."""
        return min(self.cfg.max_episode_steps, self.spec.step_limits.get(episode.task, self.cfg.max_episode_steps))

    def is_cut(self, episode: Episode, *, terminated: bool) -> bool:
        """Whether the time limit ends an episode now; one that ends by itself then is not cut."""
        return episode.elapsed >= self.step_limit(episode) and not terminated

    def drain_episodes(self) -> list[EpisodeRecord]:
        """Records of the episodes that ended since the last call, in the order in which they ended."""
        finished, self._finished = self._finished, []
        return finished

    def begin_step(self) -> None:
        """A new training step: failures so far no longer count against max_restarts."""
        self._fleet.reset_failure_count()

    def state(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as JSON; episodes whose simulator dies meanwhile begin anew."""
        if self._offloaded is not None:
            return self._offloaded
        while True:
            rows = [row for row, e in enumerate(self._episodes) if e.loaded]
            replies, gone = self._fleet.command("get_state", {row: {} for row in rows})
            if not gone:
                break
            self._begin_episodes(self._lose(gone))
            self._anew = True
        return {
            "begun": self._begun,
            "episodes": [e.to_json() for e in self._episodes],
            "scenes": {str(row): reply["state"] for row, reply in replies.items()},
        }

    def start(self) -> EnvStep:
        """The observation that the envs stand at, as the start of a rollout."""
        return EnvStep.start(self._observation(), self.chunk_size, self._trials())

    def began_anew(self) -> bool:
        """Whether `state` had to begin episodes anew since the last call: `start` tells where they stand."""
        anew, self._anew = self._anew, False
        return anew

    def load_state(self, saved: Mapping[str, Any]) -> EnvStep:
        """Continue from `state()`; returns the observation the envs stand at."""
        if (there := len(saved["episodes"])) != self.num_envs:
            raise UserError(
                f"the checkpoint was made with {there} envs per env rank and stage, not {self.num_envs}; "
                "keep env.train.total_num_envs and rollout.pipeline_stage_num, or start from runner.ckpt_path"
            )
        self._offloaded = None
        self.open()
        self._begun = saved["begun"]
        self._episodes = [Episode.from_json(e) for e in saved["episodes"]]
        work = {int(row): {"state": state} for row, state in saved["scenes"].items()}
        gone = self._fleet.place({row: self._episodes[row].reset_id for row in work}, ())
        gone |= self._fleet.build("set_state", work, lambda row: self._episodes[row].task)[1]
        if gone:
            raise SimulatorError(f"the simulators of rows {sorted(gone)} died while their state was restored")
        return self.start()

    def offload(self) -> None:
        """Remember where the envs stand and end the simulator processes."""
        if self._fleet.running:
            self._offloaded = self.state()
            self._stop()

    def onload(self) -> None:
        """Start the simulators again and continue; nothing to do when they run."""
        if self._offloaded is not None:
            self.load_state(self._offloaded)

    def flush_video(self) -> None:
        """Finish the running video file; the next frame begins another."""
        if self._video is not None:
            self._video.flush()

    def close(self) -> None:
        """End the simulator processes and the video."""
        self.flush_video()
        self._offloaded = None
        self._stop()

    def open(self) -> None:
        """Have the simulators running, with the episodes they held when they were offloaded."""
        self.onload()
        self._fleet.start()

    def _stop(self) -> None:
        """End the simulator processes."""
        self._fleet.close()
        for episode in self._episodes:
            episode.loaded = False

    def _play(self, actions: np.ndarray | None) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Send the chunk to the running rows; returns their replies, and the rows whose episode was lost."""
        work: dict[int, dict[str, Any]] = {}
        for row, episode in enumerate(self._episodes):
            if episode.waiting:
                continue
            if actions is not None:
                self._fleet.array(row, "actions")[:] = actions[row]
            work[row] = {
                "steps": min(self.chunk_size, self.step_limit(episode) - episode.elapsed),
                "stop": not self.cfg.ignore_terminations,
                "record": row < self._num_recorded,
            }
        replies, gone = self._fleet.command("chunk" if actions is not None else "expert_chunk", work)
        lost = self._lose(gone)
        return {row: reply for row, reply in replies.items() if row not in lost}, lost

    def _begin_episodes(self, rows: Iterable[int], *, whole_groups: bool = False) -> set[int]:
        """Start the next episode of `rows` (eval: those with a trial left); returns the other rows lost on the way.

        `whole_groups` keeps the members of a group on one reset id even when one of them has to start again.
        """
        wanted = set(rows)
        pending, lost = set(wanted), set()
        first = not any(episode.loaded for episode in self._episodes)
        while pending:
            if whole_groups:
                pending = self._align_groups(pending)
            work = {}
            for row in sorted(pending):
                episode = self._episodes[row]
                replayed = self.mode == "eval" and not episode.waiting  # a lost trial is played again
                number = episode.number if replayed else episode.number + 1
                if isinstance(self._ids, EvalIds) and number >= self._ids.count(episode.env_id):
                    continue
                self._episodes[row] = episode.next(number, self._ids.pick(episode.env_id, number), self._calls)
                work[row] = {"reset_id": self._episodes[row].reset_id}
            running = {row for row, episode in enumerate(self._episodes) if not episode.waiting}
            gone_before = self._fleet.place({row: w["reset_id"] for row, w in work.items()}, running) - work.keys()
            if first and not self.spec.batched:
                first, names = False, {row: task_of(self.spec, self.mode, w["reset_id"]) for row, w in work.items()}
                replies, gone = self._fleet.build("reset", work, names.__getitem__)
            else:
                replies, gone = self._fleet.command("reset", work)
            for row, reply in replies.items():
                self._episodes[row].task = reply["task"]
                self._episodes[row].told(reply["description"])
            pending = self._lose(gone | gone_before)
            lost |= pending - wanted
        return lost

    def _lose(self, gone: set[int]) -> set[int]:
        """Note which scenes hold no episode any more; returns those that were playing one."""
        for row in gone:
            self._episodes[row].loaded = False
        return {row for row in gone if not self._episodes[row].waiting}

    def _align_groups(self, rows: set[int]) -> set[int]:
        """All members of the rows' groups, after their episode numbers were made equal again."""
        size = self.cfg.group_size
        groups = [range(first, first + size) for first in {row - row % size for row in rows}]
        for group in groups:
            latest = max(self._episodes[row].number for row in group)
            for row in group:
                self._episodes[row].number = latest
        return {row for group in groups for row in group}

    def _check_actions(self, actions: Tensor) -> None:
        """Refuse actions of a wrong shape, and those that a simulator could not execute."""
        expected = (self.num_envs, self.chunk_size, self.spec.action_dim)
        if tuple(actions.shape) != expected:
            raise ValueError(f"actions have shape {tuple(actions.shape)}, expected [B, C, A] = {expected}")
        if not self._begun:
            raise ValueError("chunk_step before reset: call reset() or load_state() first")
        bad = ~torch.isfinite(actions)
        if self.spec.gripper == "sign":
            bad[..., -1] |= actions[..., -1] == 0
        for row, step, dim in bad.nonzero().tolist():
            episode, value = self._episodes[row], actions[row, step, dim].item()
            if episode.waiting:
                continue
            where = f"at step {episode.elapsed + step} of reset id {episode.reset_id}"
            if value == 0:
                what = f"gripper action of env {episode.env_id} is 0 {where}"
                raise UserError(f"{what}: it must be above 0 (open) or below (closed)")
            column = f"column {dim} ({self.spec.action_names[dim]})"
            raise UserError(f"action of env {episode.env_id} is not finite: {value} in {column} {where}")

    def _observation(self, rows: Sequence[int] | None = None) -> Observation:
        """A copy of what the simulators showed last, of all rows or of some."""
        rows = range(self.num_envs) if rows is None else rows

        def read(name: str) -> Tensor:
            return torch.from_numpy(self._fleet.gather(name, rows))

        critic_state = None
        if self._critic_state:  # f32 [B, K + 1]: the simulator's columns, then the share of the episode passed
            elapsed = [[e.elapsed / self.step_limit(e)] for e in (self._episodes[row] for row in rows)]
            critic_state = torch.cat([read("critic_state"), torch.tensor(elapsed)], dim=1)
        return Observation(
            images=read("images"),
            wrist_images=read("wrist_images") if self.spec.num_wrist_images else None,
            states=read("states") if self.spec.state_dim else None,
            task_descriptions=[self._episodes[row].description for row in rows],
            critic_state=critic_state,
        )

    def _trials(self) -> Tensor | None:
        """EnvStep.trials; None while training."""
        if self.mode == "train":
            return None
        return torch.tensor([[episode.reset_id, episode.calls] for episode in self._episodes])

    def _caption(self, row: int, steps_ago: int, reward: float, solved: bool) -> list[str]:
        """The lines on a frame of a row's episode."""
        lines = self._episodes[row].caption(self.spec, steps_ago, reward, solved)
        label = self._labels.get(self._episodes[row].reset_id)
        return lines if label is None else [label, *lines[1:]]

    def _video_of(self, row: int) -> str | None:
        """The file that shows a row's episode, where one does."""
        if self._video is None or row >= self._num_recorded or self._video.path is None:
            return None
        return str(self._video.path)

    def _film(self, steps: Mapping[int, int], rewards: np.ndarray) -> None:
        """Write the frames of the chunk (row -> steps played); an env that ended keeps showing its last one."""
        if self._video is None or not steps:
            return
        for t in range(max(steps.values())):
            frames: list[np.ndarray | None] = [None] * self._num_recorded
            captions: list[list[str]] = [[] for _ in frames]
            for row, played in steps.items():
                if t < played:
                    solved = bool(self._fleet.array(row, "success")[: t + 1].any())
                    frames[row] = self._fleet.array(row, "frames")[t]
                    reward, ago = float(rewards[row, t]), played - 1 - t
                    captions[row] = self._caption(row, ago, reward, solved)
            self._video.write(frames, captions)
