"""Training without simulators on any number of ranks: experience that a small policy made itself, cut by columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.config.schema import ActorConfig, Config, EnvGroupConfig, FsdpConfig, OptimConfig
from rlinf.data.arena import Arena
from rlinf.data.layout import Columns, EnvLayout
from rlinf.data.noise import Noise
from rlinf.data.row_cache import Shares
from rlinf.data.types import ArenaRows, ChunkIndex, Observation
from rlinf.envs.config import EnvConfig
from rlinf.models.config import ModelConfig, find_config
from rlinf.models.policy import Policy, find_policy
from rlinf.placement.grammar import Slot
from rlinf.placement.plan import Plan
from rlinf.runtime.process_group import ProcessGroup
from rlinf.runtime.worker import Process
from rlinf.training.sharding import Sharded
from rlinf.workers.actor import ActorWorker, MicroBatch

CPU = torch.device("cpu")
COLUMNS, CHUNKS = 12, 2  # 24 rows, in two global batches
PROMPTS = ("push the red button", "open it", "put the small blue block on the shelf")
PPO = AlgorithmConfig()
GRPO = AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2, logprob_type="action_level")


@dataclass(frozen=True)
class Case:
    """One run: a compact policy by its place among the model's examples, an algorithm, and how ranks share the work."""

    model: str
    example: int = 0
    changes: dict[str, Any] = field(default_factory=dict)  # to the model's config
    algorithm: AlgorithmConfig = PPO
    fsdp: FsdpConfig = field(default_factory=lambda: FsdpConfig(strategy="fsdp2"))
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4, value_lr=1e-4))
    masked: bool = False  # episodes that end count up to their end
    cache: bool = False  # prefixes of the rollout are kept
    patience: int = 3  # steps with a bad gradient before the run stops

    def model_config(self) -> ModelConfig:
        return replace(find_config(self.model).examples()[self.example], **self.changes)

    def config(self) -> Config:
        model = self.model_config()
        algorithm = replace(self.algorithm, reward_type=model.value_type)
        train = EnvConfig(auto_reset=not self.masked, group_size=algorithm.group_size)
        actor = ActorConfig(
            model=model,
            micro_batch_size=2,
            global_batch_size=12,
            max_nonfinite_steps=self.patience,
            optim=self.optim,
            fsdp_config=self.fsdp,
        )
        return Config(algorithm=algorithm, actor=actor, env=EnvGroupConfig(train=train))


def make_worker(group: ProcessGroup, case: Case) -> ActorWorker:
    """An actor rank with its share of the experience."""
    cfg = case.config()
    policy = _policy(cfg.actor.model)
    arena = _arena(policy, group, case)
    slots = (Slot(0, ()),) * group.size
    envs = EnvLayout(COLUMNS, 1, cfg.algorithm.group_size)
    plan = Plan(slots, slots, slots, envs, EnvLayout(COLUMNS), one_process=group.size == 1)
    process = Process(CPU, {"actor": group})
    process.shared("policy", lambda: policy)
    process.shared(f"arena-{group.rank}", lambda: arena)
    worker = ActorWorker(cfg, plan, group.rank, process)
    worker.setup()
    worker.metrics = worker.compute_advantages(ArenaRows(group.rank, slice(None)))
    return worker


def train(
    group: ProcessGroup, case: Case, steps: Sequence[int] = (0, 1), load: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Updates number `steps`; every weight afterwards, and the metrics of the last update."""
    with torch.backends.mkldnn.flags(enabled=False):  # virtual machines may advertise bf16 instructions they lack
        worker = make_worker(group, case)
        start = {name: tensor.detach().clone() for name, tensor in worker.policy.named_parameters()}
        if load is not None:
            worker.load(load)
        metrics = [worker.update(step, 4) for step in steps]
        if save is not None:
            save.mkdir(exist_ok=True)
            worker.save(save)
    now = worker.policy.state_dict()
    return {
        "weights": {name: tensor.float().numpy() for name, tensor in now.items()},
        "metrics": worker.metrics | metrics[-1],
        "stepped": sum(p.numel() for group in worker.optimizer.param_groups for p in group["params"]),
        "moved": max(float((now[name] - tensor).abs().max()) for name, tensor in start.items()),
    }


def alone(case: Case, steps: Sequence[int] = (0, 1), **folders: Path) -> dict[str, Any]:
    """The same on one rank, in this process, without a process group."""
    return train(ProcessGroup(), case, steps, **folders)


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Between the weights of two runs."""
    assert one["weights"].keys() == other["weights"].keys()
    return max(float(abs(one["weights"][name] - other["weights"][name]).max()) for name in one["weights"])


def _policy(cfg: ModelConfig) -> Policy:
    """Random weights, with every head awake: value heads start at zero, which would hide mistakes."""
    policy, generator = find_policy(cfg.model_type).build(cfg, CPU, seed=0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "head." in name or "lora_B" in name:
                p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p.dtype))
    spec = policy.spec
    states = torch.randn(64, spec.state_dim, generator=generator) if spec.state_dim else None
    policy.fit_statistics(states, torch.randn(64, spec.action_dim, generator=generator))
    return policy


def _arena(policy: Policy, group: ProcessGroup, case: Case) -> Arena:
    """All columns are played on every rank, which keeps its own."""
    spec, g = policy.spec, torch.Generator().manual_seed(2)
    mine = COLUMNS // group.size
    rows = slice(group.rank * mine, (group.rank + 1) * mine)
    columns = Columns(mine, group_size=case.algorithm.group_size)
    arena = Arena(CHUNKS, columns, spec.num_action_chunks, cache=Shares((1 << 30) if case.cache else 0))
    for chunk in range(CHUNKS):
        wrists = torch.randint(0, 256, (COLUMNS, spec.num_images - 1, 30, 20, 3), generator=g, dtype=torch.uint8)
        obs = Observation(
            images=torch.randint(0, 256, (COLUMNS, 40, 40, 3), generator=g, dtype=torch.uint8),
            wrist_images=wrists if spec.num_images > 1 else None,
            states=torch.randn(COLUMNS, spec.state_dim, generator=g) if spec.state_dim else None,
            task_descriptions=[PROMPTS[i % len(PROMPTS)] for i in range(COLUMNS)],
        )
        noise = Noise(seed=7, at=ChunkIndex(0, 0, chunk), env_ids=range(COLUMNS))
        arena.write_output(chunk, 0, 0, policy.predict(obs, mode="train", noise=noise)[rows])
    shape = (CHUNKS, COLUMNS, spec.num_action_chunks)
    arena.rewards.copy_(torch.randn(shape, generator=g)[:, rows])
    ended = torch.rand(shape, generator=g) < 0.2
    if case.masked:
        arena.terminated.copy_(ended[:, rows])
    arena.valid.fill_(True)
    return arena


def gradient_of_shards(group: ProcessGroup, case: Case, times: int) -> torch.Tensor:
    """The gradient of one micro batch in this rank's shards, added up from `times` equal parts."""
    worker = make_worker(group, case)
    parallel, micro = worker.parallel, MicroBatch(torch.arange(2), weight=1.0, cached=False)
    assert isinstance(parallel, Sharded)
    with parallel.training(0):
        for i in range(times):
            fetched = worker._fetch(micro)
            loss, _ = worker.loss(micro, fetched and fetched(), critic_only=False, measure_gap=False)
            parallel.backward(loss / times, last=i == times - 1)
    return torch.cat([shard.grad.flatten() for shard in parallel.local.values() if shard.grad is not None])


def nonfinite(group: ProcessGroup, case: Case) -> tuple[float, float]:
    """The last rank's rewards are infinite: optimiser steps skipped in an update, and how far weights moved."""
    worker = make_worker(group, replace(case, patience=10))
    before = {name: p.detach().clone() for name, p in worker.policy.named_parameters()}
    if group.rank == group.size - 1:
        worker.targets = replace(worker.targets, advantages=worker.targets.advantages * torch.inf)
    skipped = worker.update(0, 1)["train/actor/skipped_steps"]
    return skipped, max(float((p - before[name]).abs().max()) for name, p in worker.policy.named_parameters())
