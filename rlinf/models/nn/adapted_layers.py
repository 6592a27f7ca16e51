"""How a linear layer or convolution computes when it may carry a LoRA adapter of peft's.

An adapted layer keeps its frozen weight as `base_layer` and adds scaling * B A. Adapters are fp32 and compute in the
dtype of their input, so that a bf16 network never makes fp32 copies of its activations. `files.lora` attaches them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor
ADAPTER = "default"  # peft's name of the one set of adapters a network has here


def effective_weight(module: nn.Module) -> Tensor:
    """The weight a Linear or Conv2d acts with: its own or, where it is adapted, base + scaling * B A (in fp32)."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        return module.weight
    layer: Any = module
    weight = layer.base_layer.weight
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight  # [r, in, ...], [out, r, ...]
    delta = layer.scaling[ADAPTER] * (up.flatten(1) @ down.flatten(1))
    return (weight.float() + delta.view(weight.shape)).to(weight.dtype)


def linear_rows(module: nn.Module, x: Tensor, first: int, last: int) -> Tensor:
    """Columns [first, last) of `module(x)`, computing only these: [..., in] -> [..., last - first]."""
    rows = slice(first, last)
    layer: Any = module if isinstance(module, nn.Linear) else module.base_layer
    out = F.linear(x, layer.weight[rows], None if layer.bias is None else layer.bias[rows])
    return out if layer is module else add_adapter(module, x, out, rows)


def add_adapter(layer: Any, x: Tensor, out: Tensor, rows: slice = slice(None)) -> Tensor:
    """out + scaling * B A x in the dtype of x; written into `out`, the fresh output of a frozen layer."""
    hidden = F.linear(layer.lora_dropout[ADAPTER](x), layer.lora_A[ADAPTER].weight.to(x.dtype))
    up = layer.lora_B[ADAPTER].weight[rows].to(x.dtype)
    flat = out.view(-1, out.shape[-1])
    flat.addmm_(hidden.flatten(0, -2), up.T, alpha=layer.scaling[ADAPTER])
    return flat.view_as(out)  # not `out`: hooks on a view older than the change crash torch 2.13
