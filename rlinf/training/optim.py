"""AdamW with a learning rate of its own for the value head, its schedule, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rlinf.config.schema import OptimConfig
from rlinf.errors import UserError
from rlinf.models.policy import Policy

Tensor = torch.Tensor
MASTER = "master"  # field of an fp32 copy in a checkpoint
MOVED_AT_ONCE = 1 << 26  # numbers of gradients that wait in low precision until they are moved
VALUE_HEAD = "value_head"  # parameters whose name contains this learn at value_lr


class MasterAdamW(torch.optim.AdamW):
    """AdamW that steps low-precision parameters through fp32 copies, in which small updates are not rounded away.

    A copy stands in its group in the parameter's place. The parameters' gradients are moved to it during every backward
    pass, many at once, so that micro batches add up, are clipped and stepped in fp32; the parameters are rounded from
    the copies after a step.
    Other parameters are stepped as they are; those listed in `masters` are fp32 copies already (the shards of
    low-precision weights) and are named so in checkpoints. One optimiser at a time can serve a policy.
    """

    def __init__(self, groups: list[dict[str, Any]], masters: Iterable[Tensor] = (), **options: Any) -> None:
        self.pairs: list[tuple[nn.Parameter, Tensor]] = []  # (parameter, its fp32 copy)
        self._arrived: dict[nn.Parameter, Tensor] = {}  # those whose gradient has not been moved yet
        self._arrived_numbers = 0  # of these gradients
        self._pass = -1  # torch's number of the backward pass at whose end what has arrived is moved
        self.copies = {id(master) for master in masters}
        groups = [group | {"params": [self._master(p) for p in group["params"]]} for group in groups]
        devices = {p.device.type for group in groups for p in group["params"]}
        super().__init__(groups, fused=True if devices == {"cuda"} else None, **options)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the copies, then round the parameters from them."""
        super().step()
        with torch.no_grad():
            _copy([parameter for parameter, _ in self.pairs], [master for _, master in self.pairs])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also what a backward pass that failed has left."""
        super().zero_grad(set_to_none)
        self._forget_arrived()
        for parameter, _ in self.pairs:
            parameter.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters into their fp32 copies, after they were loaded."""
        _copy([master for _, master in self.pairs], [parameter for parameter, _ in self.pairs])

    def _master(self, parameter: nn.Parameter) -> Tensor:
        """The tensor to step in the parameter's place: itself, or a new fp32 copy."""
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        master = parameter.detach().float()
        self.pairs.append((parameter, master))
        self.copies.add(id(master))

        def wait(p: Tensor) -> None:
            # private names of torch: nothing public tells when a backward pass has ended
            if self._pass != (now := torch._C._current_graph_task_id()):
                self._pass = now
                torch.autograd.Variable._execution_engine.queue_callback(self._move_gradients)
            self._arrived[parameter] = master
            self._arrived_numbers += parameter.numel()
            if self._arrived_numbers >= MOVED_AT_ONCE:
                self._move_gradients()

        parameter.register_post_accumulate_grad_hook(wait)
        return master

    @torch.no_grad()
    def _move_gradients(self) -> None:
        """Add the gradients that have arrived to those of the copies."""
        arrived = [(p, p.grad, master) for p, master in self._arrived.items() if p.grad is not None]
        self._forget_arrived()
        moved = [torch.empty_like(master) for _, _, master in arrived]
        _copy(moved, [gradient for _, gradient, _ in arrived])
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for (parameter, _, master), gradient in zip(arrived, moved, strict=True):
            parameter.grad = None
            if master.grad is None:
                master.grad = gradient
            else:
                sums.append(master.grad)
                parts.append(gradient)
        if sums:
            torch._foreach_add_(sums, parts)

    def _forget_arrived(self) -> None:
        self._arrived.clear()
        self._arrived_numbers = 0


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors with few kernels, each to its target's dtype."""
    if targets:
        torch._foreach_copy_(targets, sources)  # private: torch's own optimisers use it, nothing public does this


def make_optimizer(policy: Policy, cfg: OptimConfig) -> MasterAdamW:
    """The optimiser of everything that trains."""
    return optimizer_of(list(policy.trainable_parameters()), cfg)


def optimizer_of(named: Sequence[tuple[str, Any]], cfg: OptimConfig, masters: Iterable[Tensor] = ()) -> MasterAdamW:
    """Group 0: the policy at `lr`; group 1: the value head at `value_lr`. Names are kept for checkpoints."""
    groups = []
    for is_value, lr in ((False, cfg.lr), (True, cfg.value_lr)):
        members = [(n, p) for n, p in named if (VALUE_HEAD in n) == is_value]
        names, params = [n for n, _ in members], [p for _, p in members]
        groups.append({"params": params, "names": names, "lr": lr, "base_lr": lr})
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    return MasterAdamW(groups, masters, betas=betas, eps=cfg.adam_eps, weight_decay=cfg.weight_decay)


def lr_scale(cfg: OptimConfig, step: int, total_steps: int, *, first_warmup_step: int = 1) -> float:
    """Factor on the base learning rates at training step `step` (counted from 0).

    The warm-up rises from `first_warmup_step` / lr_warmup_steps.
    """
    warmup = max(cfg.lr_warmup_steps, 0)
    if step < warmup:
        return (step + first_warmup_step) / warmup
    if cfg.lr_scheduler == "constant":
        return 1.0
    length = cfg.total_training_steps or total_steps
    progress = min((step - warmup) / max(length - warmup, 1), 1.0)
    cosine = half_cosine(math.pi * 2.0 * cfg.num_cycles * progress)
    return cfg.min_lr_rate + (1.0 - cfg.min_lr_rate) * max(cosine, 0.0)


def half_cosine(angle: float) -> float:
    """From 1 at angle 0 down to 0 at angle π: the shape of every cosine schedule."""
    return 0.5 * (1.0 + math.cos(angle))


def set_lr(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale every group's base learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * scale


def optimizer_tensors(optimizer: MasterAdamW) -> dict[str, Tensor]:
    """The optimiser's state, and its fp32 copies, as `<parameter>/<field>` tensors."""
    out = {}
    for name, param in named_tensors(optimizer):
        fields = dict(optimizer.state.get(param, {})) | ({MASTER: param} if id(param) in optimizer.copies else {})
        for field, value in fields.items():
            out[f"{name}/{field}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return out


def load_optimizer_tensors(optimizer: MasterAdamW, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave, after the weights; every tensor must belong to a parameter."""
    params = dict(named_tensors(optimizer))
    optimizer.refresh()
    for key, value in tensors.items():
        name, field = key.rsplit("/", 1)
        if name not in params:
            raise UserError(
                f"the checkpoint's optimiser trained {name}, which this configuration does not; "
                "resume with the run's own settings, or start from runner.ckpt_path"
            )
        if value.shape not in (params[name].shape, ()):
            raise UserError(
                f"the checkpoint's optimiser has {key} of shape {list(value.shape)}, "
                f"the parameter is {list(params[name].shape)}; resume with the run's own settings"
            )
        if field == MASTER:
            with torch.no_grad():
                params[name].copy_(value)
            continue
        on_host = field == "step" and not optimizer.defaults["fused"]
        optimizer.state[params[name]][field] = value.to("cpu" if on_host else params[name].device).clone()


def named_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What is stepped (parameters, fp32 copies, shards) by the parameter's name."""
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)
