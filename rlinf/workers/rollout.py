"""RolloutWorker: runs the policy and owns the experience it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from rlinf.compat.policies import policy_class
from rlinf.data.arena import Arena
from rlinf.data.layout import Columns
from rlinf.data.noise import Noise
from rlinf.data.types import ArenaRows, ChunkIndex, EnvStep, Trajectory
from rlinf.models.policy import Policy
from rlinf.runtime.weight_sync import Receiver
from rlinf.runtime.worker import Worker
from rlinf.training.offload import Parking

Mode = Literal["train", "eval"]


def shared_policy(worker: Worker) -> Policy:
    """The process's policy: rollout and actor in one process hold the same parameters, so nothing is ever synced."""
    cfg = worker.cfg

    def build() -> Policy:
        seed = cfg.runner.seed + cfg.actor.seed
        policy = policy_class(cfg.actor.model.model_type, cfg.compat).build(cfg.actor.model, worker.device, seed=seed)
        weights = Path(cfg.runner.ckpt_path).expanduser() if cfg.runner.ckpt_path is not None else None
        if weights is not None and weights.is_file():  # a folder became model_path
            policy.load_weights(weights)
        return policy

    return worker.process.share("policy", build)


def arena_name(rank: int) -> str:
    """Under which a rollout rank's process shares its arena."""
    return f"arena-{rank}"


class RolloutWorker(Worker):
    """Predicts chunk by chunk; replay inputs go straight to the arena, only actions leave."""

    def setup(self) -> None:
        self.policy = shared_policy(self)
        self.has_copy = self.rank in self.plan.rollout_copies  # weights of its own, not the actor's
        self.receiver = Receiver(self.policy, self.process.team("sync"))
        self._parking = Parking(self.device)

    def receive_weights(self) -> None:
        """Take the actor's current weights over."""
        self.receiver.receive()

    def offload(self) -> int:
        """Leave the device to others between rollouts, where this rank has weights of its own; bytes moved."""
        if not self.has_copy:
            return 0
        self.policy.forget_recordings()
        return self._parking.leave(self.policy.parameters())

    def onload(self) -> int:
        """Come back to the device; bytes moved."""
        return self._parking.come_back()

    def predict(self, step: EnvStep, *, mode: Mode, stage: int, at: ChunkIndex) -> torch.Tensor:
        """Actions f32 [B, C, A] for the envs of one stage."""
        env_ids = self.plan.env_ids("rollout", self.rank, stage, mode)
        if mode == "train":
            self._before_chunk(step, stage, at)
        with torch.no_grad():
            out = self.policy.predict(step.obs.to(self.device), mode=mode, noise=self._noise(env_ids, at, mode))
        if mode == "train":
            self.arena.write_output(at.chunk, stage, at.epoch, out)
        return out.actions.cpu()

    def finish(self, step: EnvStep, *, stage: int, at: ChunkIndex) -> None:
        """Take the last chunk's results and value the observation they led to."""
        self._store_result(step, stage, at)
        if self.arena.values is not None:
            noise = self._noise(self.plan.env_ids("rollout", self.rank, stage), at)
            values = self.policy.value(step.obs.to(self.device), noise=noise)
            self.arena.write_last_values(stage, at.epoch, values)

    def trajectory(self) -> Trajectory:
        """This rank's experience of the iteration, in place."""
        return self.arena.trajectory()

    def experience(self, first: int, end: int, *, reader: int) -> Trajectory | ArenaRows:
        """What the envs first..end of this rank lived through, for an actor rank: by name where it can look itself."""
        columns = self.arena.columns.of_envs(first, end)
        if self.plan.process_of("rollout", self.rank) == self.plan.process_of("actor", reader):
            return ArenaRows(self.rank, columns)
        return self.trajectory().columns(columns).to("cpu")

    @property
    def arena(self) -> Arena:
        """This rank's arena; an actor in the same process reads it in place."""
        env, chunk = self.cfg.env.train, self.policy.spec.num_action_chunks
        ranks = len(self.plan.rollout)
        return self.process.share(
            arena_name(self.rank),
            lambda: Arena(
                env.max_steps_per_rollout_epoch // chunk,
                Columns(self.plan.num_envs("rollout"), self.plan.stages, env.rollout_epoch, env.group_size),
                chunk,
                cache_bytes=self.cfg.rollout.prefix_cache_bytes // ranks if self.plan.keeps_prefixes else 0,
            ),
        )

    def _before_chunk(self, step: EnvStep, stage: int, at: ChunkIndex) -> None:
        if at.chunk > 0:
            self._store_result(step, stage, at)
        elif at.epoch == 0 and stage == 0:
            self.policy.set_global_step(at.step)
            self.arena.cache.clear()

    def _store_result(self, step: EnvStep, stage: int, at: ChunkIndex) -> None:
        """The results of the chunk before `at`, and V(final_obs) of the episodes that ended in it."""
        self.arena.write_result(at.chunk - 1, stage, at.epoch, step)
        if self.arena.final_values is None or step.final_rows is None or step.final_obs is None:
            return
        env_ids = self.plan.env_ids("rollout", self.rank, stage)
        noise = self._noise([env_ids[i] for i in step.final_rows.tolist()], at)
        values = self.policy.value(step.final_obs.to(self.device), noise=noise)
        self.arena.write_final_values(at.chunk - 1, stage, at.epoch, step.final_rows, values)

    def _noise(self, env_ids: list[int], at: ChunkIndex, stream: str = "train") -> Noise:
        return Noise(seed=self.cfg.runner.seed, at=at, env_ids=env_ids, device=self.device, stream=stream)
