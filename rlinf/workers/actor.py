"""ActorWorker: turns experience into a better policy.

Letters: T chunks, B columns, N = T x B rows, C actions per chunk, A action dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlinf.algorithms.advantages import compute_targets
from rlinf.algorithms.losses import compute_loss
from rlinf.data.arena import Arena, RowCache
from rlinf.data.noise import generator
from rlinf.data.types import Trajectory
from rlinf.metrics.reduce import Accumulator
from rlinf.runtime.worker import Worker
from rlinf.training.optim import load_optimizer_tensors, lr_scale, make_optimizer, optimizer_tensors, set_lr
from rlinf.workers.rollout import shared_policy


class ActorWorker(Worker):
    """Advantages, then epochs x global batches x micro batches of gradient steps."""

    def setup(self) -> None:
        self.policy = shared_policy(self)
        self.optimizer = make_optimizer(self.policy, self.cfg.actor.optim)
        self.optimizer_steps = 0
        self.nonfinite_in_a_row = 0

    def compute_advantages(self, parts: list[Trajectory]) -> dict[str, float]:
        """Take the rollout ranks' experience and prepare the targets of the update."""
        env = self.cfg.env.train
        self.trajectory = Trajectory.cat_envs(parts)
        self.targets, metrics = compute_targets(
            self.trajectory,
            self.cfg.algorithm,
            auto_reset=env.auto_reset,
            ignore_terminations=env.ignore_terminations,
            compat=self.cfg.compat is not None,
        )
        steps = float(self.trajectory.valid.sum())
        return {"env/steps": steps} | {f"rollout/{k}": float(v) for k, v in metrics.items()}

    def update(self, step: int, total_steps: int) -> dict[str, float]:
        """One training step's worth of optimiser steps; returns the means of its metrics."""
        algorithm, optim = self.cfg.algorithm, self.cfg.actor.optim
        set_lr(self.optimizer, lr_scale(optim, step, total_steps))
        metrics = Accumulator()
        for i, rows in enumerate(self._global_batches(step)):
            kl = self._optimizer_step(rows, metrics, first=i == 0)
            if algorithm.target_kl is not None and kl > 1.5 * algorithm.target_kl:
                break
        out = {f"train/{k}": v for k, v in metrics.result().items()}
        out["train/actor/lr"] = self.optimizer.param_groups[0]["lr"]
        if algorithm.loss_type != "actor":
            out["train/critic/lr"] = self.optimizer.param_groups[1]["lr"]
        return out

    def save(self, folder: Path) -> None:
        """Weights in HF layout and the optimiser's state."""
        self.policy.save_pretrained(folder / "model")
        tensors = optimizer_tensors(self.optimizer)
        tensors["@optimizer_steps"] = torch.tensor(self.optimizer_steps)
        tensors["@nonfinite_in_a_row"] = torch.tensor(self.nonfinite_in_a_row)
        save_file(tensors, folder / "optimizer.safetensors")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self.policy.load_pretrained(folder / "model")
        tensors = load_file(folder / "optimizer.safetensors")
        self.optimizer_steps = int(tensors.pop("@optimizer_steps"))
        self.nonfinite_in_a_row = int(tensors.pop("@nonfinite_in_a_row"))
        load_optimizer_tensors(self.optimizer, tensors)

    def _global_batches(self, step: int) -> Iterator[torch.Tensor]:
        """Row numbers of each optimiser step, a new keyed shuffle every epoch."""
        num_rows = self.trajectory.logprobs.shape[0] * self.trajectory.logprobs.shape[1]
        seed = self.cfg.runner.seed + self.cfg.actor.seed
        for epoch in range(self.cfg.algorithm.update_epoch):
            order = torch.from_numpy(generator(seed, "shuffle", step, epoch).permutation(num_rows))
            yield from order.split(self.cfg.actor.global_batch_size)

    def _optimizer_step(self, rows: torch.Tensor, metrics: Accumulator, *, first: bool) -> float:
        """One global batch: accumulate gradients over micro batches, clip, step. Returns its approximate KL."""
        actor, batch = self.cfg.actor, Accumulator()
        warmup = self.optimizer_steps < actor.optim.critic_warmup_steps
        self.optimizer.zero_grad(set_to_none=True)
        rows = self._cached_first(rows)
        for i, micro in enumerate(rows.split(actor.micro_batch_size)):
            loss = self._loss(micro, batch, critic_only=warmup, measure_gap=first and i == 0)
            (loss * self._share(micro, rows)).backward()
        params = [p for g in self.optimizer.param_groups for p in g["params"]]
        if warmup:
            for param in self.optimizer.param_groups[0]["params"]:  # all but the value head
                param.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(params, actor.optim.clip_grad))
        if math.isfinite(norm):
            self.optimizer.step()
            self.nonfinite_in_a_row = 0
            batch.add("actor/grad_norm", norm, 1.0)
        else:
            self._skip_nonfinite()
        self.optimizer_steps += 1
        batch.add_sum("actor/optimizer_steps", 1.0)
        batch.add_sum("actor/skipped_steps", 0.0 if math.isfinite(norm) else 1.0)
        metrics.merge(batch)
        means = batch.result()
        return means.get("actor/approx_kl", means.get("actor/proximal_approx_kl", 0.0))

    def _loss(self, rows: torch.Tensor, metrics: Accumulator, *, critic_only: bool, measure_gap: bool) -> torch.Tensor:
        cfg, traj = self.cfg.algorithm, self.trajectory
        chunks, columns = rows // traj.logprobs.shape[1], rows % traj.logprobs.shape[1]

        def take(x: torch.Tensor) -> torch.Tensor:
            return x[chunks, columns].to(self.device)

        use_critic = cfg.loss_type != "actor"
        new = self.policy.evaluate(
            {k: take(v) for k, v in traj.replay.items()},
            values=use_critic,
            entropy=cfg.entropy_bonus != 0,
            cache=self._cache.get(rows) if self._cache is not None else None,
        )
        old_logprobs = take(traj.logprobs)
        if measure_gap:
            gap = (new.logprobs.detach() - old_logprobs).abs()
            metrics.add_max("actor/logprob_gap", float(gap.max()))
        loss, values = compute_loss(
            cfg,
            new=new,
            old_logprobs=old_logprobs,
            old_values=take(traj.values[:-1]) if use_critic and traj.values is not None else None,
            targets=self.targets.map(take),
            max_episode_steps=self.cfg.env.train.max_episode_steps,
            critic_only=critic_only,
            compat=self.cfg.compat is not None,
        )
        metrics.add_many(values)
        return loss

    def _share(self, micro: torch.Tensor, rows: torch.Tensor) -> float:
        """Weight of a micro batch in its global batch, so that its size does not change the gradient.

        A masked mean counts by its unmasked entries; one over trajectory weights divides by all rows.
        """
        mask, columns = self.targets.mask, self.trajectory.logprobs.shape[1]
        if mask is None or self.targets.mask_sum is not None or self.cfg.compat is not None:
            return len(micro) / len(rows)
        counted = mask[rows // columns, rows % columns].sum()
        return float(mask[micro // columns, micro % columns].sum() / counted.clamp(min=1))

    @property
    def _cache(self) -> RowCache | None:
        """Prefix rows kept since the rollout, when the one rollout rank of this process made them all."""
        if len(self.plan.rollout) != 1:
            return None
        arena: Arena | None = self.process.share("arena-0", lambda: None)
        return None if arena is None else arena.cache

    def _cached_first(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows with the cached ones in front: a micro batch uses the cache only when it holds all of them."""
        if self._cache is None:
            return rows
        held = self._cache.held(rows)
        return torch.cat([rows[held], rows[~held]])

    def _skip_nonfinite(self) -> None:
        self.nonfinite_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.nonfinite_in_a_row >= self.cfg.actor.max_nonfinite_steps:
            raise FloatingPointError(
                f"the gradient was not finite for {self.nonfinite_in_a_row} optimiser steps in a row "
                "(actor.max_nonfinite_steps); lower actor.optim.lr or look at the rewards and values in metrics.jsonl"
            )
