"""The frozen prefix of π as tensors of fixed shapes: what a rollout stores so that updates need not compute it again.

Letters: B rows, G key/value heads, P prefix tokens, E head width, L prompt slots.
"""

from __future__ import annotations

import torch

from rlinf.models.nn.gemma import KeyValue
from rlinf.models.openpi.model import PiNet, Prefix

Tensor = torch.Tensor
NAMES = ("k", "v", "pooled")  # of the tensors that `store` may give


def store(prefix: Prefix, pooled: Tensor | None, length: int) -> dict[str, Tensor]:
    """Keys and values [B, layers, G, length, E], zero behind the prefix's own tokens, and the critic's pooled view."""
    b, groups, used, width = prefix.kv[0].k.shape
    cache = {name: prefix.kv[0].k.new_empty(b, len(prefix.kv), groups, length, width) for name in ("k", "v")}
    for i, kv in enumerate(prefix.kv):
        cache["k"][:, i, :, :used], cache["v"][:, i, :, :used] = kv.k, kv.v
    for rows in cache.values():
        rows[..., used:, :].zero_()
    return cache if pooled is None else cache | {"pooled": pooled}


def trimmed(cache: dict[str, Tensor], unused: int) -> dict[str, Tensor]:
    """Views of what was stored, without the last `unused` slots, which no prompt uses."""
    end = cache["k"].shape[3] - unused
    return {name: x if name == "pooled" else x[..., :end, :] for name, x in cache.items()}


def restore(
    net: PiNet, cache: dict[str, Tensor], token_valid: Tensor | None, *, image_valid: Tensor | None = None
) -> tuple[Prefix, Tensor | None]:
    """What was stored and trimmed: the prefix, and the pooled view.

    `token_valid` bool [B, L] marks the prompt's slots, `image_valid` bool [B, cameras] the images that count (None:
    all of them).
    """
    b, _, _, length, _ = cache["k"].shape
    layers = [KeyValue(k, v) for k, v in zip(cache["k"].unbind(1), cache["v"].unbind(1), strict=True)]
    valid = token_valid
    if image_valid is not None or token_valid is not None:
        valid = torch.ones(b, length, dtype=torch.bool, device=cache["k"].device)
        if image_valid is not None:
            images = image_valid.repeat_interleave(net.arch.image_tokens, 1)
            valid[:, : images.shape[1]] = images
        if token_valid is not None:
            valid[:, length - token_valid.shape[1] :] = token_valid
    return net.attach(layers, valid), cache.get("pooled")
