"""RolloutWorker: runs the policy and owns the experience it makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlinf.compat.policies import policy_class
from rlinf.data.arena import Arena
from rlinf.data.layout import Columns
from rlinf.data.noise import Noise
from rlinf.data.row_cache import Shares
from rlinf.data.types import ArenaRows, ChunkIndex, EnvStep, PolicyOutput, Trajectory
from rlinf.metrics.machine import processor_name
from rlinf.models.policy import Policy
from rlinf.placement.plan import Mode
from rlinf.runtime.weight_sync import Receiver
from rlinf.runtime.worker import Worker
from rlinf.training.offload import HostBuffer
from rlinf.workers.cache_shares import CacheShares


def shared_policy(worker: Worker) -> Policy:
    """The policy that all workers of the process share: a rollout beside an actor needs no weight sync."""
    cfg = worker.cfg

    def build() -> Policy:
        seed = cfg.runner.seed + cfg.actor.seed
        policy = policy_class(cfg.actor.model.model_type, cfg.compat).build(cfg.actor.model, worker.device, seed=seed)
        weights = Path(cfg.runner.ckpt_path).expanduser() if cfg.runner.ckpt_path is not None else None
        if weights is not None and weights.is_file():  # a folder became model_path
            policy.load_weights(weights)
        return policy

    return worker.process.shared("policy", build)


def arena_name(rank: int) -> str:
    """The name under which a rollout rank's arena is shared in its process."""
    return f"arena-{rank}"


class RolloutWorker(Worker):
    """Predicts chunk by chunk; replay inputs go straight to the arena, only actions leave."""

    def setup(self) -> None:
        self.policy = shared_policy(self)
        self.has_copy = self.rank in self.plan.rollout_copies  # weights of its own, not the actor's
        self.receiver = Receiver(self.policy, self.process.group("sync"))
        self._host_buffer = HostBuffer(self.device)

    def describe_device(self) -> dict[str, Any]:
        """What computes the actions: their last bits depend on it."""
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        else:
            name = f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
        return {"kind": self.device.type, "name": name, "threads": torch.get_num_threads()}

    def receive_weights(self) -> None:
        """Receive the actor's current weights into this rank's copy."""
        self.receiver.receive()

    def offload(self) -> int:
        """Move this rank's copy of the weights, if it has one, to the host; bytes moved."""
        if not self.has_copy:
            return 0
        self.policy.forget_recordings()
        return self._host_buffer.offload(self.policy.parameters())

    def onload(self) -> int:
        """Move the copy back to the device; bytes moved."""
        return self._host_buffer.restore()

    def predict(self, step: EnvStep | None, *, mode: Mode, stage: int, at: ChunkIndex) -> torch.Tensor | None:
        """Actions f32 [B, C, A] for the envs of one stage; None where this rank has none."""
        if step is None:
            return None
        if mode == "train":
            self._before_chunk(step, stage, at)
        obs = step.obs if self.policy.moves_observations else step.obs.to(self.device)
        noise = self._noise_of(step, stage, at)
        out = self._with_memory(lambda: self.policy.predict(obs, mode=mode, noise=noise), mode)
        if mode == "train":
            self.arena.write_output(at.chunk, stage, at.epoch, out)
        return out.actions.cpu()

    def finish(self, step: EnvStep, *, stage: int, at: ChunkIndex) -> None:
        """Store the last chunk's results, and the value of the observation after it."""
        self._store_result(step, stage, at)
        if self.arena.values is not None:
            noise = self._noise(self.plan.env_ids("rollout", self.rank, stage), at)
            values = self.policy.value(step.obs.to(self.device), noise=noise)
            self.arena.write_last_values(stage, at.epoch, values)

    def trajectory(self) -> Trajectory:
        """This rank's experience of the training step: views of the arena."""
        return self.arena.trajectory()

    def experience(self, first: int, end: int, *, reader: int) -> Trajectory | ArenaRows:
        """The experience of envs first..end of this rank (over all its stages), for the actor rank `reader`.

        Returns a reference to the arena if the reader runs in the same process, else a copy on the CPU.
        """
        columns = self.arena.columns.of_envs(first, end)
        if self.plan.process_of("rollout", self.rank) == self.plan.process_of("actor", reader):
            return ArenaRows(self.rank, columns)
        return self.trajectory().columns(columns).to("cpu")

    @property
    def arena(self) -> Arena:
        """This rank's arena; an actor in the same process reads it in place."""
        env, chunk = self.cfg.env.train, self.policy.spec.num_action_chunks
        return self.process.shared(
            arena_name(self.rank),
            lambda: Arena(
                env.max_steps_per_rollout_epoch // chunk,
                Columns(self.plan.num_envs("rollout"), self.plan.stages, env.rollout_epoch, env.group_size),
                chunk,
                cache=self._cache_shares() if self.plan.keeps_prefixes else Shares(0),
            ),
        )

    def _with_memory(self, call: Callable[[], PolicyOutput], mode: Mode) -> PolicyOutput:
        """The call's answer; on a device without memory for it, after kept prefixes were given up."""
        while True:
            try:
                with torch.no_grad():
                    return call()
            except torch.OutOfMemoryError:
                cache = self.arena.cache if mode == "train" else None
                if cache is None or not cache.shrink():
                    raise
            torch.cuda.empty_cache()

    def _cache_shares(self) -> CacheShares:
        return CacheShares.of(self.cfg.rollout, self.plan, self.rank, self.device)

    def _before_chunk(self, step: EnvStep, stage: int, at: ChunkIndex) -> None:
        """Store the results of the chunk before `at`; at the start of a training step, begin a new one."""
        if at.chunk > 0:
            self._store_result(step, stage, at)
        elif at.epoch == 0 and stage == 0:
            self.policy.set_global_step(at.step)
            self.arena.cache.clear()

    def _store_result(self, step: EnvStep, stage: int, at: ChunkIndex) -> None:
        """Store the results of the chunk before `at`, and V(final_obs) of the episodes that ended in it."""
        self.arena.write_result(at.chunk - 1, stage, at.epoch, step)
        if self.arena.final_values is None or step.final_rows is None or step.final_obs is None:
            return
        env_ids = self.plan.env_ids("rollout", self.rank, stage)
        noise = self._noise([env_ids[i] for i in step.final_rows.tolist()], at)
        values = self.policy.value(step.final_obs.to(self.device), noise=noise)
        self.arena.write_final_values(at.chunk - 1, stage, at.epoch, step.final_rows, values)

    def _noise_of(self, step: EnvStep, stage: int, at: ChunkIndex) -> Noise:
        """Noise of the policy call at `step`: by env and chunk in training, by trial in an evaluation."""
        if step.trials is None:
            return self._noise(self.plan.env_ids("rollout", self.rank, stage), at)
        return Noise.of_trials(step.trials, seed=self.cfg.runner.seed, device=self.device)

    def _noise(self, env_ids: list[int], at: ChunkIndex) -> Noise:
        return Noise(seed=self.cfg.runner.seed, at=at, env_ids=env_ids, device=self.device)
