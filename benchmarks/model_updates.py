"""PPO updates of `models.py`: rows made by the policy itself, stepped by the worker that training uses."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from model_cases import Subject

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.config.schema import ActorConfig, Config
from rlinf.data.arena import Arena
from rlinf.data.layout import Columns, EnvLayout
from rlinf.data.row_cache import Shares
from rlinf.placement.grammar import Slot
from rlinf.placement.plan import Plan
from rlinf.runtime.worker import Process
from rlinf.workers.actor import ActorWorker


@dataclass(frozen=True)
class Rows:
    """How many of one forward pass, and of one optimiser step."""

    micro_batch: int
    global_batch: int


class Update:
    """A trajectory of as many rows as a global batch, and the actor that learns from it."""

    def __init__(self, subject: Subject, rows: Rows) -> None:
        chunks, columns = rows.global_batch // rows.micro_batch, rows.micro_batch
        self.num_rows, self.device, cfg = rows.global_batch, subject.device, subject.cfg
        cache_bytes = cfg.cache_bytes_per_sample() * rows.global_batch
        self.arena = Arena(chunks, Columns(columns), cfg.num_action_chunks, cache=Shares(cache_bytes))
        self.arena.valid.fill_(True)
        for t in range(chunks):
            out = subject.act(subject.observe(columns, seed=t), "train", chunk=t)
            self.arena.write_output(t, 0, 0, out)
        subject.recorder.clear()
        self.arena.rewards.normal_(generator=torch.Generator().manual_seed(0))
        self.worker = self._worker(subject, rows)
        self.worker.compute_advantages(self.arena.trajectory())

    def _worker(self, subject: Subject, rows: Rows) -> ActorWorker:
        """The actor of a run on one device that already holds policy and rows."""
        run = Config(
            algorithm=AlgorithmConfig(reward_type=subject.cfg.value_type, logprob_type="token_level"),
            actor=ActorConfig(
                model=subject.cfg,
                micro_batch_size=rows.micro_batch,
                global_batch_size=rows.global_batch,
                max_nonfinite_steps=1,
            ),
        )
        here = (Slot(0, ()),)
        envs = EnvLayout(rows.micro_batch)
        plan = Plan(here, here, here, envs, envs)
        process = Process(self.device)
        process.shared("policy", lambda: subject.policy)
        process.shared("arena-0", lambda: self.arena)
        worker = ActorWorker(run, plan, 0, process)
        worker.setup()
        return worker

    def forget_cache(self) -> None:
        """From now on every prefix is computed again."""
        self.arena.cache.clear()

    def measure(self, repeats: int) -> dict[str, float]:
        """Rows/s of an update with its optimiser step (median, after one to warm up), and |Δ log-prob| before it."""
        gap = self.worker.update(0, 1)["train/actor/logprob_gap"]
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.worker.update(0, 1)  # fails when a gradient is not finite
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return {"samples_per_s": self.num_rows / statistics.median(seconds), "logprob_gap": gap}
