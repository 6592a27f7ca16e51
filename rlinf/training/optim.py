"""AdamW with a group of its own for the value head, its schedule, and its state as named tensors."""

from __future__ import annotations

import math

import torch

from rlinf.config.schema import OptimConfig
from rlinf.errors import UserError
from rlinf.models.policy import Policy

VALUE_HEAD = "value_head"  # parameters whose name contains this learn at value_lr


def make_optimizer(policy: Policy, cfg: OptimConfig) -> torch.optim.AdamW:
    """Group 0: the policy at `lr`; group 1: the value head at `value_lr`. Names are kept for checkpoints."""
    named = list(policy.trainable_parameters())
    groups = []
    for is_value, lr in ((False, cfg.lr), (True, cfg.value_lr)):
        members = [(n, p) for n, p in named if (VALUE_HEAD in n) == is_value]
        names, params = [n for n, _ in members], [p for _, p in members]
        groups.append({"params": params, "names": names, "lr": lr, "base_lr": lr})
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=cfg.adam_eps, weight_decay=cfg.weight_decay)


def lr_scale(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """Factor on the base learning rates at training step `step` (counted from 0)."""
    warmup = max(cfg.lr_warmup_steps, 0)
    if step < warmup:
        return (step + 1) / warmup
    if cfg.lr_scheduler == "constant":
        return 1.0
    length = cfg.total_training_steps or total_steps
    progress = min((step - warmup) / max(length - warmup, 1), 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * 2.0 * cfg.num_cycles * progress))
    return cfg.min_lr_rate + (1.0 - cfg.min_lr_rate) * max(cosine, 0.0)


def set_lr(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale every group's base learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * scale


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state as `<parameter>/<field>` tensors."""
    out = {}
    for group in optimizer.param_groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            for field, value in optimizer.state.get(param, {}).items():
                out[f"{name}/{field}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return out


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put `optimizer_tensors` back; every tensor must belong to a parameter."""
    params = {n: p for g in optimizer.param_groups for n, p in zip(g["names"], g["params"], strict=True)}
    for key, value in tensors.items():
        name, field = key.rsplit("/", 1)
        if name not in params:
            raise UserError(
                f"the checkpoint's optimiser trained {name}, which this configuration does not; "
                "resume with the run's own settings, or start from runner.ckpt_path"
            )
        device = params[name].device if field != "step" else torch.device("cpu")
        optimizer.state[params[name]][field] = value.to(device).clone()
