"""Every rank keeps a shard: FSDP2 on a second skeleton of the policy's modules.

The policy itself is never sharded. While ranks train, its large tensors have no memory; afterwards they are filled
again from the shards, so that rollouts, recorded kernels, checkpoints and weight sync see plain full weights at stable
places: views of joined projections and recorded calls would not survive FSDP's own exchange of parameters, which is why
there are two skeletons. The one that trains shares buffers and small parameters with the policy. Matrices are sharded
by rows; norms, biases and whatever would have to change its dtype are replicated. Low-precision matrices that learn are
sharded in fp32, which needs no further copies, and gathered in their own dtype.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rlinf.config.schema import ActorConfig, FsdpConfig
from rlinf.data.types import PolicyEval
from rlinf.errors import UserError
from rlinf.models.nn.packed import Packed
from rlinf.models.nn.recompute import BlockStack
from rlinf.models.policy import Policy
from rlinf.runtime.process_group import ProcessGroup, group_of_one
from rlinf.training.offload import device_storages
from rlinf.training.optim import MasterAdamW, optimizer_of
from rlinf.training.optimizer_files import Rows
from rlinf.training.parallel import DTYPES, SingleRank, broadcast_weights, sum_gradients

Tensor = torch.Tensor
LOW = (torch.bfloat16, torch.float16)


class Sharded(SingleRank):
    """FSDP2 over the ranks of the group."""

    def __init__(self, policy: Policy, cfg: ActorConfig, group: ProcessGroup) -> None:
        device = next(policy.parameters()).device
        group = group_of_one(device) if group.handle is None else group
        if group.device.type != device.type:
            raise UserError(
                f"actor.fsdp_config.strategy={cfg.fsdp_config.strategy}: ranks that share an accelerator cannot shard; "
                "place one actor rank on each, or set actor.fsdp_config.strategy=no_shard"
            )
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # no block changes another's output
        broadcast_weights(policy, group)
        self.network = Network(_skeleton(policy))
        self.units = _shard(self.network, cfg.fsdp_config, DeviceMesh.from_group(group.handle, device.type))
        self.root = self.units[-1].module
        self.full = dict(policy.named_parameters())
        self.shards = {n: p for n, p in self.network.policy.named_parameters() if isinstance(p, DTensor)}
        with torch.no_grad():
            self.local = {name: shard.to_local() for name, shard in self.shards.items()}
        self._gather()  # FSDP wants every unit to have been whole once, also one that is not run at first
        super().__init__(policy, cfg, group)

    def make_optimizer(self) -> MasterAdamW:
        """AdamW on this rank's rows; those of low-precision matrices are fp32 copies already."""
        named = [(name, self.local.get(name, p)) for name, p in self.policy.trainable_parameters()]
        masters = [tensor for name, tensor in self.local.items() if self.full[name].dtype in LOW]
        return optimizer_of([(n, t) for n, t in named if t.numel()], self.cfg.optim, masters)

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Free the memory of the policy's large tensors, and fill them again with what was learned.

        After an error they are filled only if this rank is the only one: others may wait elsewhere, and a collective
        here would hide the error behind them. The policy's weights are then undefined, and the run must end.
        """
        self.network.policy.set_global_step(step)
        self.policy.forget_recordings()
        large, device = [self.full[name] for name in self.local], next(self.policy.parameters()).device
        freed = [(storage, storage.nbytes()) for storage in device_storages(large, device)]
        for storage, _ in freed:
            storage.resize_(0)
        finished = False
        try:
            yield
            finished = True
        finally:
            for storage, num_bytes in freed:
                storage.resize_(num_bytes)
            if finished or self.group.size == 1:
                self._gather()

    def evaluate(
        self, replay: dict[str, Tensor], *, values: bool, entropy: bool, cache: dict[str, Tensor] | None
    ) -> PolicyEval:
        """`Policy.evaluate`, gathering each block's weights just before it runs."""
        out = PolicyEval(*self.network(replay, values, entropy, cache))
        if not torch.is_grad_enabled():  # no backward pass will do it
            for unit in self.units:
                unit.module.reshard()
        return out

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro batch; the last one (or, to save memory, each) is summed into the shards."""
        fsdp = self.cfg.fsdp_config
        self.root.set_requires_gradient_sync(last or not fsdp.enable_gradient_accumulation)
        self.root.set_reshard_after_backward(last or _reshards(fsdp))
        loss.backward()
        if not last:
            return
        for name, shard in self.shards.items():
            if shard.grad is not None:
                self.local[name].grad = cast(DTensor, shard.grad).to_local()
        sum_gradients(self._split()[1], self.group, DTYPES[fsdp.mixed_precision.reduce_dtype])

    def clip_gradients(self, max_norm: float) -> float:
        """As for one rank; squares of sharded gradients add up over the ranks."""
        sharded, replicated = ([t.grad for t in tensors if t.grad is not None] for tensors in self._split())
        own, shared = (float(torch.nn.utils.get_total_norm(gradients)) for gradients in (sharded, replicated))
        total = (self.group.sum(torch.tensor(own**2, dtype=torch.float64)) + shared**2).sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(self._stepped(), max_norm, total)
        return float(total)

    def zero_gradients(self) -> None:
        """Drop all gradients."""
        super().zero_gradients()
        for shard in self.shards.values():
            shard.grad = None

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy this rank's rows from the policy again."""
        for name, rows in self.rows.items():
            self.local[name].copy_(self.full[name][rows.first : rows.end])

    @property
    def shard_tensors(self) -> list[Tensor]:
        """This rank's rows, frozen ones included."""
        return list(self.local.values())

    @property
    def rows(self) -> dict[str, Rows]:
        """Which rows of a sharded parameter this rank holds: as many as the others, as long as there are any."""
        found = {}
        for name, local in self.local.items():
            total = len(self.full[name])
            most = -(-total // self.group.size)
            first = min(self.group.rank * most, total)
            found[name] = Rows(first, first + len(local), total)
        return found

    @torch.no_grad()
    def _gather(self) -> None:
        """Fill the policy's tensors from all ranks' shards, unit by unit."""
        for unit in self.units:
            unit.module.unshard()
            for name in unit.names:
                self.full[name].copy_(self.network.policy.get_parameter(name))
            unit.module.reshard()

    def _split(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the optimiser steps: shards, and tensors that every rank holds."""
        own = {id(local) for local in self.local.values()}
        stepped = self._stepped()
        return [t for t in stepped if id(t) in own], [t for t in stepped if id(t) not in own]


class Network(nn.Module):
    """`Policy.evaluate` as the forward pass, for FSDP's hooks."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self, replay: dict[str, Tensor], values: bool, entropy: bool, cache: dict[str, Tensor] | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out = self.policy.evaluate(replay, values=values, entropy=entropy, cache=cache)
        return out.logprobs, out.values, out.entropy


class RoundedReduceScatter:
    """Sums gradients over the ranks in a low precision; what FSDP adds up before and after stays fp32.

    FSDP's own `reduce_dtype` would also add up the micro batches in that precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent or received."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum f32 [n x ranks] over the ranks into this rank's f32 [n]."""
        assert not async_op
        summed = torch.empty_like(output_tensor, dtype=self.dtype)
        dist.reduce_scatter_tensor(summed, input_tensor.to(self.dtype), op=op, group=group)
        output_tensor.copy_(summed)


class ShardedUnit(NamedTuple):
    """Parameters that are gathered together, just before their module runs."""

    module: FSDPModule
    names: list[str]  # of the parameters, in the policy


def _skeleton(policy: Policy) -> Policy:
    """The same modules once more, with the very same parameters and buffers."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*policy.parameters(), *policy.buffers()]}
    # private: joined weights serve rollouts only; without this each of them would be copied
    memo |= {id(part._joined): {} for part in policy.modules() if isinstance(part, Packed)}
    return copy.deepcopy(policy, memo)


def _shard(network: Network, cfg: FsdpConfig, mesh: DeviceMesh) -> list[ShardedUnit]:
    """Shard the blocks of the policy, each as a unit, then the rest of it as the last one."""
    policy = network.policy
    reduce_dtype = DTYPES[cfg.mixed_precision.reduce_dtype]
    pinned = cfg.offload_pin_memory and mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if cfg.cpu_offload else OffloadPolicy()
    visited: set[nn.Parameter] = set()

    def unit(modules: list[nn.Module], *, reshard: bool) -> ShardedUnit:
        inside = {p for module in modules for p in module.parameters() if not isinstance(p, DTensor)} - visited
        named = {name: p for name, p in policy.named_parameters() if p in inside}
        chosen, dtype = choose_sharded(list(named.values()), mesh.size())
        visited.update(inside)
        names = [name for name, p in named.items() if p in chosen]
        for name in names:
            if dtype is not None and named[name].requires_grad:
                owner, _, key = name.rpartition(".")
                policy.get_submodule(owner).register_parameter(key, nn.Parameter(named[name].detach().float()))
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # type: ignore[call-overload]
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            offload_policy=offload,
            ignored_params=inside - chosen,
        )
        made = cast(FSDPModule, modules[0])
        made.set_force_sum_reduction_for_comms(True)
        made.set_gradient_divide_factor(1.0)
        if reduce_dtype != torch.float32:
            made.set_custom_reduce_scatter(RoundedReduceScatter(reduce_dtype))  # type: ignore[arg-type]
        return ShardedUnit(made, names)

    units = []
    for stack in [part for part in network.modules() if isinstance(part, BlockStack)]:
        stack.keep_dtype()
        for modules, methods in stack.units():
            units.append(unit(modules, reshard=_reshards(cfg) and len(modules) == 1))
            for method in methods:
                register_fsdp_forward_method(modules[0], method)
    return [*units, unit([network], reshard=False)]


def choose_sharded(parameters: Sequence[nn.Parameter], ranks: int) -> tuple[set[nn.Parameter], torch.dtype | None]:
    """What to shard of a unit, and the low precision it is gathered in (None: everything in its own dtype).

    A unit has one dtype that learns, the one of most of its numbers; few parameters, if any, have another.
    """
    large = [p for p in parameters if p.ndim > 1 and len(p) >= ranks]
    learning = Counter[torch.dtype]()
    for p in large:
        learning[p.dtype] += p.numel() * p.requires_grad
    dtype = learning.most_common(1)[0][0] if learning.total() else None
    if dtype in LOW:
        return {p for p in large if p.dtype == dtype}, dtype
    return {p for p in large if p.dtype == dtype or not p.requires_grad}, None


def _reshards(cfg: FsdpConfig) -> bool:
    """Whether a block's full weights are freed between its forward and its backward pass."""
    return cfg.reshard_after_forward and cfg.sharding_strategy != "shard_grad_op"
