"""How the ranks of the actor train one policy: as a single rank, as replicas, or each keeping a shard (sharding.py).

Outside of `training` the policy holds the full and current weights on every rank: acting, saving, loading and weight
sync know nothing of ranks. Gradients are sums over ranks: a loss weighted by its share of the global batch gives the
gradient that one rank would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rlinf.config.schema import ActorConfig
from rlinf.data.buckets import buckets
from rlinf.data.types import PolicyEval
from rlinf.models.policy import Policy
from rlinf.runtime.process_group import ProcessGroup
from rlinf.training.optim import MasterAdamW, make_optimizer, named_tensors
from rlinf.training.optimizer_files import Rows

Tensor = torch.Tensor
BUCKET_SIZE = 32 << 20  # numbers of gradients that are summed in one message
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, None: torch.float32}  # fsdp_config.mixed_precision


class SingleRank:
    """One rank: the policy is trained as it is. Base of the classes for several ranks."""

    def __init__(self, policy: Policy, cfg: ActorConfig, group: ProcessGroup) -> None:
        self.policy, self.cfg, self.group = policy, cfg, group
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> MasterAdamW:
        """The optimiser of what this rank steps."""
        return make_optimizer(self.policy, self.cfg.optim)

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Surround all optimiser steps of training step `step`; inside, a sharded policy has no full weights."""
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
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def take_weights(self) -> None:
        """Train the weights that the policy holds now; called after it has loaded some."""

    @property
    def shard_tensors(self) -> list[Tensor]:
        """This rank's shards, which only the update needs."""
        return []

    @property
    def rows(self) -> dict[str, Rows]:
        """Which rows of a parameter this rank steps, where that is not all of them."""
        return {}

    def _stepped(self) -> list[Tensor]:
        return [tensor for _, tensor in named_tensors(self.optimizer)]


class Replicated(SingleRank):
    """Every rank holds everything; gradients are summed once per optimiser step."""

    def __init__(self, policy: Policy, cfg: ActorConfig, group: ProcessGroup) -> None:
        broadcast_weights(policy, group)
        super().__init__(policy, cfg, group)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro batch; nothing travels before the last one."""
        loss.backward()
        if last:
            sum_gradients(self._stepped(), self.group, DTYPES[self.cfg.fsdp_config.mixed_precision.reduce_dtype])


def make_parallel(policy: Policy, cfg: ActorConfig, group: ProcessGroup) -> SingleRank:
    """What `actor.fsdp_config` asks for, on as many ranks as there are."""
    fsdp = cfg.fsdp_config
    if group.handle is None and not (fsdp.shards and fsdp.cpu_offload):
        return SingleRank(policy, cfg, group)
    if not fsdp.shards:
        return Replicated(policy, cfg, group)
    from rlinf.training.sharding import Sharded

    return Sharded(policy, cfg, group)


@torch.no_grad()
def broadcast_weights(policy: Policy, group: ProcessGroup) -> None:
    """Let every rank start from the weights of rank 0."""
    for tensor in [*policy.parameters(), *policy.buffers()]:
        group.broadcast(tensor)


@torch.no_grad()
def sum_gradients(
    stepped: Sequence[Tensor], group: ProcessGroup, dtype: torch.dtype = torch.float32, bucket_size: int = BUCKET_SIZE
) -> None:
    """Replace every gradient by its sum over the ranks, in few large messages; one that no rank has stays absent."""
    present = torch.tensor([tensor.grad is not None for tensor in stepped], dtype=torch.int32)
    gradients = []
    for tensor, somewhere in zip(stepped, group.max(present).tolist(), strict=True):
        if somewhere:
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
            gradients.append(tensor.grad.view(-1))
    for spans in buckets([len(gradient) for gradient in gradients], bucket_size):
        parts = [gradients[span.item][span.first : span.last] for span in spans]
        total = group.sum(torch.cat([part.to(dtype) for part in parts]))
        for part, summed in zip(parts, total.split([len(part) for part in parts]), strict=True):
            part.copy_(summed)
