"""How the ranks of the actor train one policy: alone, as replicas, or each keeping a shard (sharding.py).

Outside of `training` the policy holds the full and current weights on every rank: acting, saving, loading and weight
sync know nothing of ranks. Gradients are sums over ranks: a loss weighted by its share of the global batch gives the
gradient that one rank would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rlinf.config.schema import ActorConfig
from rlinf.data.types import PolicyEval
from rlinf.models.policy import Policy
from rlinf.runtime.process_group import Team
from rlinf.training.optim import MasterAdamW, make_optimizer, named_tensors
from rlinf.training.optimizer_files import Rows

Tensor = torch.Tensor
BUCKET_BYTES = 128 << 20  # of gradients summed in one call
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, None: torch.float32}  # fsdp_config.mixed_precision


class Alone:
    """One rank: the policy is trained as it is."""

    def __init__(self, policy: Policy, cfg: ActorConfig, team: Team) -> None:
        self.policy, self.cfg, self.team = policy, cfg, team
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> MasterAdamW:
        """The optimiser of what this rank steps."""
        return make_optimizer(self.policy, self.cfg.optim)

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Around all optimiser steps of training step `step`; a sharded policy's full weights are away inside."""
        self.policy.set_global_step(step)
        yield

    def evaluate(
        self, replay: dict[str, Tensor], *, values: bool, entropy: bool, cache: dict[str, Tensor] | None
    ) -> PolicyEval:
        """`Policy.evaluate` with the weights that are trained; all ranks call it together."""
        return self.policy.evaluate(replay, values=values, entropy=entropy, cache=cache)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro batch; with the `last` one gradients become those of all ranks."""
        loss.backward()

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients to at most `max_norm`; returns the norm they had, the same on every rank."""
        return float(torch.nn.utils.clip_grad_norm_(self._stepped(), max_norm))

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def take_weights(self) -> None:
        """Train what the policy holds now, after it was loaded."""

    @property
    def shard_tensors(self) -> list[Tensor]:
        """This rank's shards, which only the update needs."""
        return []

    @property
    def rows(self) -> dict[str, Rows]:
        """Which rows of a parameter this rank steps, where that is not all of them."""
        return {}

    @property
    def part(self) -> tuple[int, int]:
        """Which part of the optimiser's state this rank writes, and how many there are."""
        return self.team.rank, 1

    def _stepped(self) -> list[Tensor]:
        return [tensor for _, tensor in named_tensors(self.optimizer)]


class Replicated(Alone):
    """Every rank holds everything; gradients are summed once per optimiser step."""

    def __init__(self, policy: Policy, cfg: ActorConfig, team: Team) -> None:
        agree(policy, team)
        super().__init__(policy, cfg, team)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro batch; nothing travels before the last one."""
        loss.backward()
        if last:
            sum_gradients(self._stepped(), self.team, DTYPES[self.cfg.fsdp_config.mixed_precision.reduce_dtype])


def make_parallel(policy: Policy, cfg: ActorConfig, team: Team) -> Alone:
    """What `actor.fsdp_config` asks for, on as many ranks as there are."""
    fsdp = cfg.fsdp_config
    if team.group is None and not (fsdp.shards and fsdp.cpu_offload):
        return Alone(policy, cfg, team)
    if not fsdp.shards:
        return Replicated(policy, cfg, team)
    from rlinf.training.sharding import Sharded

    return Sharded(policy, cfg, team)


def agree(policy: Policy, team: Team) -> None:
    """Every rank starts from the weights of rank 0."""
    with torch.no_grad():
        for tensor in [*policy.parameters(), *policy.buffers()]:
            team.broadcast(tensor)


@torch.no_grad()
def sum_gradients(
    stepped: Sequence[Tensor], team: Team, dtype: torch.dtype = torch.float32, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace every gradient by its sum over the ranks, in few large pieces; one that no rank has stays absent."""
    mine = torch.tensor([tensor.grad is not None for tensor in stepped], dtype=torch.int32)
    gradients = []
    for tensor, present in zip(stepped, team.max(mine).tolist(), strict=True):
        if present:
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            gradients.append(tensor.grad)
    for bucket in _buckets(gradients, bucket_bytes):
        total = team.sum(torch.cat([g.flatten().to(dtype) for g in bucket]))
        for gradient, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """In order, each of one device and at most `num_bytes` unless a single one is larger."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(g.nbytes for g in bucket) + gradient.nbytes > num_bytes
        if bucket and (full or gradient.device != bucket[0].device):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
