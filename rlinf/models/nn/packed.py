"""Linear layers that read the same input, run as one matrix product while acting.

The layers keep their names and their own parameters (checkpoints, adapters and optimisers see nothing); their weights
are moved into one tensor of which each is a view, so that in-place updates reach the product too.

Measured with it (docs/benchmarks.md, one H200): OpenVLA gives one row's action in 36.3 ms, 1.48 times the floor; three
quarters of that floor are reading the weights once per token, which so small products cannot hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class Joined(NamedTuple):
    """The weights of a group as one tensor."""

    weight: Tensor  # [sum of out, in]
    bias: Tensor | None
    places: list[int]  # bytes from the joined weight to each layer's own

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        """Whether no layer or parameter was replaced (moved, sharded, adapted) since they were joined."""
        start = self.weight.data_ptr()  # changes when the memory was given back for a while
        return all(
            type(layer) is nn.Linear and layer.weight.data_ptr() - start == place
            for layer, place in zip(layers, self.places, strict=True)
        )


class Packed(nn.Module):
    """A block with groups of linear layers that read the same input: `pack` joins them, `project` applies them."""

    groups: tuple[tuple[str, ...], ...] = ()  # names of the layers that read the same input

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[tuple[str, ...], Joined] = {}

    def pack(self) -> None:
        """Move each group's weights (and biases) into one tensor, wherever they are now."""
        for group in self.groups:
            layers = self._layers(group)
            if all(type(layer) is nn.Linear for layer in layers):
                self._joined[group] = _join(layers)

    def project(self, group: tuple[str, ...], x: Tensor) -> Sequence[Tensor]:
        """What each layer of `group` makes of x [..., W]; one product when no gradient of theirs is wanted."""
        layers = self._layers(group)
        joined = None if torch.is_grad_enabled() else self.joined(group)
        if joined is None:
            return [layer(x) for layer in layers]
        return F.linear(x, joined.weight, joined.bias).split([layer.out_features for layer in layers], -1)

    def joined(self, group: tuple[str, ...]) -> Joined | None:
        """The weights of `group` as one tensor, where they are."""
        joined = self._joined.get(group)
        return joined if joined is not None and joined.is_current(self._layers(group)) else None

    def _layers(self, group: tuple[str, ...]) -> list[nn.Linear]:
        # torch's own table, since this runs in every call; an entry may also be an adapter around a layer.
        return [cast(nn.Linear, self._modules[name]) for name in group]


def pack(module: nn.Module) -> None:
    """Pack every block inside `module`; call it once the weights are on their device."""
    for part in module.modules():
        if isinstance(part, Packed):
            part.pack()


def _join(layers: Sequence[nn.Linear]) -> Joined:
    """One tensor of all weights, which the layers' own become views of."""
    with torch.no_grad():
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    first = 0
    for layer in layers:
        last = first + layer.out_features
        layer.weight.data = weight[first:last]
        if bias is not None:
            layer.bias.data = bias[first:last]
        first = last
    return Joined(weight, bias, [layer.weight.data_ptr() - weight.data_ptr() for layer in layers])
