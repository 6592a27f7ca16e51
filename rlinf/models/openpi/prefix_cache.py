"""The frozen prefix of π as tensors of fixed shapes: what a rollout stores so that updates need not compute it again.

Letters: B rows, G key/value heads, P prefix tokens, E head width, L prompt slots.
"""

from __future__ import annotations

import torch

from rlinf.models.inputs import Prompts
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


def restore(
    net: PiNet, cache: dict[str, Tensor], token_valid: Tensor, *, image_valid: Tensor | None = None
) -> tuple[Prefix, Tensor | None]:
    """What was stored: the prefix, without slots that no prompt uses, and the pooled view.

    `token_valid` bool [B, L] marks the prompt's slots, `image_valid` bool [B, cameras] the images that count (None:
    all of them).
    """
    image_tokens = cache["k"].shape[3] - token_valid.shape[1]
    tokens, valid = Prompts.stored(token_valid, token_valid, pads_last=True).trimmed()
    end = image_tokens + tokens.shape[1]
    layers = zip(cache["k"][..., :end, :].unbind(1), cache["v"][..., :end, :].unbind(1), strict=True)
    if image_valid is not None:
        valid = torch.cat((image_valid.repeat_interleave(net.arch.image_tokens, 1), tokens), 1)
    elif valid is not None:
        valid = torch.cat((tokens.new_ones(len(tokens), image_tokens), tokens), 1)
    return net.attach([KeyValue(k, v) for k, v in layers], valid), cache.get("pooled")
