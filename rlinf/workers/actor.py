"""ActorWorker: turns experience into a better policy.

Letters: T chunks, B columns, N = T x B rows, C actions per chunk, A action dims.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlinf.algorithms.losses import Batch
from rlinf.algorithms.registry import LOSSES
from rlinf.compat.formulas import choose_formulas
from rlinf.config.derived import acts_with_old_weights, micro_batch_size
from rlinf.data.arena import Arena
from rlinf.data.layout import chunk_and_column, global_batches
from rlinf.data.noise import generator
from rlinf.data.row_cache import RowCache
from rlinf.data.types import ArenaRows, Trajectory
from rlinf.metrics.reduce import Accumulator
from rlinf.runtime.weight_sync import Sender
from rlinf.runtime.worker import Worker
from rlinf.training.offload import ActorMemory
from rlinf.training.optim import load_optimizer_tensors, lr_scale, optimizer_tensors, set_lr
from rlinf.training.optimizer_files import load_state, save_state
from rlinf.training.parallel import make_parallel
from rlinf.workers.rollout import arena_name, shared_policy

LOGPROB_GAP = "actor/logprob_gap"
Measured = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # a metric's value and weight


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass."""

    rows: torch.Tensor  # i64 [n]
    weight: float  # its part of the global batch of all ranks
    cached: bool  # whether the rollout's kept prefixes are used
    entropy_scale: float = 1.0  # the part of its entropy over `weight`


class ActorWorker(Worker):
    """Advantages, then epochs x global batches x micro batches of gradient steps."""

    def setup(self) -> None:
        self.group = self.process.group("actor")
        self.formulas = choose_formulas(self.cfg.compat)
        self.traits = LOSSES.traits(self.cfg.algorithm.loss_type)
        self.policy = shared_policy(self)  # full weights, current outside of `update`
        self.parallel = make_parallel(self.policy, self.cfg.actor, self.group)
        self.optimizer = self.parallel.optimizer
        self.micro_batch_size = micro_batch_size(self.cfg, self.group.size)
        self.optimizer_steps = 0
        self.nonfinite_in_a_row = 0
        self.proximal: torch.Tensor | None = None  # f32 [T, B, C, A]; what the update's loss clips around
        self.sender = Sender(self.policy, self.process.group("sync"))
        neighbours = self.plan.processes[self.plan.process_of("actor", self.rank)].workers
        owns_weights = all(worker.role != "rollout" for worker in neighbours)
        self.memory = ActorMemory(self.parallel, self.device, owns_weights=owns_weights)

    def compute_advantages(self, *parts: Trajectory | ArenaRows) -> dict[str, float]:
        """Take this rank's share of the experience and prepare the targets of the update; metrics of all ranks."""
        env = self.cfg.env.train
        self.trajectory = Trajectory.cat([self._read(part) for part in parts], dim=1)
        self.targets, metrics = self.formulas.targets(
            self.trajectory,
            self.cfg.algorithm,
            auto_reset=env.auto_reset,
            ignore_terminations=env.ignore_terminations,
            all_reduce=self.group.sum,
            all_max=self.group.max,
        )
        steps = float(self.group.sum(self.trajectory.valid.sum()))
        return {"env/steps": steps} | {f"rollout/{k}": float(v) for k, v in (metrics | self._kept_prefixes()).items()}

    def _kept_prefixes(self) -> dict[str, torch.Tensor]:
        """The shares of all ranks' rows whose prefixes were kept, by where they are; nothing where none can be."""
        if self._cache is None or not self.cfg.actor.model.cache_bytes_per_sample():
            return {}
        counts = self.group.sum(torch.tensor([*self._cache.counts(), self._cache.num_rows], dtype=torch.float32))
        return dict(zip(("prefixes_on_device", "prefixes_on_host"), counts[:2] / counts[2], strict=True))

    def update(self, step: int, total_steps: int) -> dict[str, float]:
        """One training step's worth of optimiser steps; returns the means of its metrics over all ranks."""
        algorithm, optim = self.cfg.algorithm, self.cfg.actor.optim
        scale = lr_scale(optim, step, total_steps, first_warmup_step=self.formulas.first_warmup_step)
        set_lr(self.optimizer, scale)
        metrics = Accumulator()
        with self.parallel.training(step):
            self._compute_proximal()
            for i, rows in enumerate(self._global_batches(step)):
                batch = self.optimizer_step(rows, first=i == 0)
                metrics.merge(batch)
                if algorithm.target_kl is not None and _kl(self._over_ranks(batch)) > 1.5 * algorithm.target_kl:
                    break
        out = {f"train/{k}": v for k, v in self._over_ranks(metrics).result().items()}
        out["train/actor/lr"] = self.optimizer.param_groups[0]["lr"]
        if self.traits.uses_critic:
            out["train/critic/lr"] = self.optimizer.param_groups[1]["lr"]
        return out

    def save(self, folder: Path) -> None:
        """Weights in HF layout, by rank 0, and this rank's part of the optimiser's state."""
        if self.rank == 0:
            self.policy.save_pretrained(folder / "model")
        rows = self.parallel.rows
        if self.rank == 0 or rows:  # without rows of its own, rank 0 holds what every rank does
            tensors = optimizer_tensors(self.optimizer)
            tensors["@optimizer_steps"] = torch.tensor(self.optimizer_steps)
            tensors["@nonfinite_in_a_row"] = torch.tensor(self.nonfinite_in_a_row)
            save_state(folder, tensors, rows, part=self.rank, parts=self.group.size if rows else 1)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, on any number of ranks."""
        self.policy.load_pretrained(folder / "model")
        self.parallel.take_weights()
        tensors = load_state(folder, self.parallel.rows)
        self.optimizer_steps = int(tensors.pop("@optimizer_steps"))
        self.nonfinite_in_a_row = int(tensors.pop("@nonfinite_in_a_row"))
        load_optimizer_tensors(self.optimizer, tensors)
        self.sender.has_loaded = True

    def send_weights(self) -> int:
        """Bring the rollout ranks' copies of the weights up to date; bytes sent, 0 where there are none."""
        with self.memory.weights():  # every rank holds all of them: rank 0 sends for all
            return self.sender.send()

    def offload(self) -> int:
        """Free the device for the rollout; bytes moved."""
        return self.memory.offload()

    def onload(self) -> int:
        """Move back to the device for the update; bytes moved."""
        return self.memory.onload()

    def _global_batches(self, step: int) -> Iterator[torch.Tensor]:
        """This rank's row numbers of each optimiser step, a new keyed shuffle every epoch."""
        num_chunks, columns = self.trajectory.logprobs.shape[:2]
        seed, size = self.cfg.runner.seed + self.cfg.actor.seed, self.cfg.actor.global_batch_size
        ranks, rank = self.group.size, self.group.rank
        for epoch in range(self.cfg.algorithm.update_epoch):

            def shuffle(stratum: int, count: int, epoch: int = epoch) -> np.ndarray:
                return generator(seed, "shuffle", step, epoch, stratum).permutation(count)

            for rows in global_batches(num_chunks, columns, batch_size=size, ranks=ranks, rank=rank, shuffle=shuffle):
                yield torch.from_numpy(rows)

    def optimizer_step(self, rows: torch.Tensor, *, first: bool) -> Accumulator:
        """One global batch: accumulate gradients over micro batches, clip, step. Returns this rank's metrics."""
        actor, parallel = self.cfg.actor, self.parallel
        warmup = self.optimizer_steps < actor.optim.critic_warmup_steps
        batch = self._accumulate(rows, critic_only=warmup, measure_gap=first)
        while batch is None:
            batch = self._accumulate(rows, critic_only=warmup, measure_gap=first)
        if warmup:
            for param in self.optimizer.param_groups[0]["params"]:  # all but the value head
                param.grad = None
        norm = parallel.clip_gradients(actor.optim.clip_grad)
        if math.isfinite(norm):
            self.optimizer.step()
            self.nonfinite_in_a_row = 0
            batch.add("actor/grad_norm", norm, 1.0)
        else:
            self._skip_nonfinite()
        self.optimizer_steps += 1
        if self.rank == 0:  # every rank takes the same steps
            batch.add_sum("actor/optimizer_steps", 1.0)
            batch.add_sum("actor/skipped_steps", 0.0 if math.isfinite(norm) else 1.0)
        return batch

    def _accumulate(self, rows: torch.Tensor, *, critic_only: bool, measure_gap: bool) -> Accumulator | None:
        """Add up the gradients of a global batch, prefixes copied ahead; this rank's metrics.

        None if the device ran out of memory: it has given up half of the prefixes it kept, and this must be done again.
        """
        measured: list[Measured] = []
        micros = self._micro_batches(rows)
        self.parallel.zero_gradients()
        try:
            following = self._fetch(micros[0])
            for i, micro in enumerate(micros):
                fetched, last = following, i == len(micros) - 1
                following = None if last else self._fetch(micros[i + 1])
                kept = None if fetched is None else fetched()
                loss, values = self.loss(micro, kept, critic_only=critic_only, measure_gap=measure_gap and i == 0)
                measured.append(values)
                self.parallel.backward(loss * micro.weight, last=last)
                del loss  # while its graph lives, so do nodes of this stream, and no other shape can be recorded
            return _collected(measured)
        except torch.OutOfMemoryError:
            cache = self._cache
            if cache is None or self.group.size > 1:  # other ranks wait for this one in the middle of the batch
                raise
        self.parallel.zero_gradients()
        if not cache.shrink():
            size = self.micro_batch_size
            raise torch.OutOfMemoryError(f"actor.micro_batch_size={size} does not fit on {self.device}; halve it")
        torch.cuda.empty_cache()
        return None

    def _fetch(self, micro: MicroBatch) -> Callable[[], dict[str, torch.Tensor]] | None:
        """Begin to bring a micro batch's kept prefixes together."""
        cache = self._cache
        return cache.fetch(micro.rows) if cache is not None and micro.cached else None

    def _over_ranks(self, metrics: Accumulator) -> Accumulator:
        """The metrics of all ranks together."""
        merged = Accumulator()
        for part in self.group.gather(metrics):
            merged.merge(part)
        return merged

    def loss(
        self, micro: MicroBatch, cache: dict[str, torch.Tensor] | None, *, critic_only: bool, measure_gap: bool
    ) -> tuple[torch.Tensor, Measured]:
        """The mean loss of a micro batch, with its kept prefixes if any, and its metrics; the device is not awaited."""
        cfg, traj = self.cfg.algorithm, self.trajectory
        at = chunk_and_column(micro.rows, traj.logprobs.shape[1])

        def take(x: torch.Tensor) -> torch.Tensor:
            return x[at].to(self.device)

        new = self.parallel.evaluate(
            {k: take(v) for k, v in traj.replay.items()},
            values=self.traits.uses_critic,
            entropy=True,
            cache=cache,
        )
        old_logprobs = take(traj.logprobs)
        proximal = None if self.proximal is None else take(self.proximal)
        batch = Batch(
            new=new,
            old_logprobs=old_logprobs,
            proximal_logprobs=proximal,
            old_values=take(traj.values[:-1]) if self.traits.uses_critic and traj.values is not None else None,
            targets=self.targets.map(take),
            max_episode_steps=self.cfg.env.train.max_episode_steps,
            critic_only=critic_only,
            entropy_scale=micro.entropy_scale,
        )
        loss, values = self.formulas.loss(batch, cfg)
        if measure_gap:
            gap = (new.logprobs.detach() - (old_logprobs if proximal is None else proximal)).abs()
            values = {**values, LOGPROB_GAP: (gap.max(), gap.new_ones(()))}
        return loss, values

    def _compute_proximal(self) -> None:
        """Compute log-probs [T, B, C, A] under the weights this update starts from, for a loss that clips around them.

        Where rollouts always act with these very weights they are the rollout's own, and nothing is computed.
        """
        self.proximal = None
        if not self.traits.clips_around_update_start or not acts_with_old_weights(self.cfg, self.plan):
            return
        traj, proximal = self.trajectory, torch.empty_like(self.trajectory.logprobs)
        num_chunks, columns = traj.logprobs.shape[:2]
        for rows in torch.arange(num_chunks * columns).split(self.micro_batch_size):
            at = chunk_and_column(rows, columns)
            replay = {k: v[at].to(self.device) for k, v in traj.replay.items()}
            with torch.no_grad():
                new = self.parallel.evaluate(replay, values=False, entropy=False, cache=None)
            proximal[at] = new.logprobs.float().cpu()
        self.proximal = proximal

    def _micro_batches(self, rows: torch.Tensor) -> list[MicroBatch]:
        """This rank's rows of a global batch, `micro_batch_size` at a time.

        Each is weighted so that how the batch is cut does not change the gradient. A pass uses kept prefixes only if it
        has those of all of its rows, on all ranks (which gather sharded weights together), so rows with one come first.
        """
        cache, columns = self._cache, self.trajectory.logprobs.shape[1]
        if cache is not None:
            rows = torch.cat([rows[cache.held(rows)], rows[~cache.held(rows)]])
        micros = rows.split(self.micro_batch_size)
        at = [chunk_and_column(micro, columns) for micro in micros]
        targets = [self.targets.map(operator.itemgetter(where)) for where in at]
        weights, entropy_weights = (
            self._parts(torch.stack([count(t) for t in targets]))
            for count in (self.formulas.weight, self.formulas.entropy_weight)
        )
        scales = [mine / loss if loss else 0.0 for mine, loss in zip(entropy_weights, weights, strict=True)]
        cached = [False] * len(micros)
        if cache is not None:
            lacking = torch.tensor([not bool(cache.held(micro).all()) for micro in micros], dtype=torch.int32)
            cached = [not lack for lack in self.group.max(lacking).tolist()]
        return list(map(MicroBatch, micros, weights, cached, scales))

    def _parts(self, counts: torch.Tensor) -> list[float]:
        """Counts of this rank's micro batches as parts of those of all ranks together."""
        return (counts / self.group.sum(counts.sum()).clamp(min=1)).tolist()

    @property
    def _cache(self) -> RowCache | None:
        """Prefixes kept since the rollout, when one rollout rank of this process made all of this rank's rows."""
        return self._arena(self.rank).cache if self.plan.keeps_prefixes else None

    def _arena(self, rollout_rank: int) -> Arena:
        """The arena of a rollout rank of this process."""
        return self.process.find(arena_name(rollout_rank))

    def _read(self, part: Trajectory | ArenaRows) -> Trajectory:
        if isinstance(part, Trajectory):
            return part
        return self._arena(part.rank).trajectory().columns(part.columns)

    def _skip_nonfinite(self) -> None:
        """Drop the gradient of this step; too many in a row end the run."""
        self.nonfinite_in_a_row += 1
        self.parallel.zero_gradients()
        if self.nonfinite_in_a_row >= self.cfg.actor.max_nonfinite_steps:
            raise FloatingPointError(
                f"the gradient was not finite for {self.nonfinite_in_a_row} optimiser steps in a row "
                "(actor.max_nonfinite_steps); lower actor.optim.lr or look at the rewards and values in metrics.jsonl"
            )


def _collected(measured: Sequence[Measured]) -> Accumulator:
    """The metrics of micro batches; one copy brings all of their numbers to the host."""
    pairs = [torch.stack([x.detach().double().reshape(()) for x in pair]) for m in measured for pair in m.values()]
    numbers = iter(torch.stack(pairs).tolist())
    batch = Accumulator()
    for values in measured:
        plain = {name: tuple(next(numbers)) for name in values}
        if LOGPROB_GAP in plain:
            batch.add_max(LOGPROB_GAP, plain.pop(LOGPROB_GAP)[0])
        batch.add_many(plain)
    return batch


def _kl(metrics: Accumulator) -> float:
    """The approximate KL to the policy that the loss is clipped around."""
    means = metrics.result()
    return means.get("actor/approx_kl", means.get("actor/proximal_approx_kl", 0.0))
