"""openvla_tiny: every stored activation of the published causal network, reproduced."""

from __future__ import annotations

import json

import pytest
import torch
from prismatic_tiny_model import counted, full_images, tiny_net
from safetensors.torch import load_file

from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic.folder import ColumnRanges

INPUTS = {"pixel_values_lowres", "input_ids", "attention_mask"}


@pytest.fixture(scope="module")
def tiny(golden_dir):
    return tiny_net(golden_dir), load_file(golden_dir / "openvla_tiny" / "io.safetensors")


@torch.no_grad()
def test_every_stored_tensor(tiny, golden_dir, max_delta):
    net, io = tiny
    left = set(io) - INPUTS

    def check(key, got, bound):
        left.discard(key)
        max_delta(key, got, io[key], bound)

    images, ids = full_images(io["pixel_values_lowres"]), io["input_ids"]
    features = net.vision_backbone(images.flatten(0, 1), None)
    check("dinov2_features", features[..., :32], 2e-4)
    check("siglip_features", features[..., 32:], 2e-4)
    patches = net.embed_images(images)
    check("projected", patches, 2e-4)
    tokens = net.embed_tokens(ids)
    x = torch.cat((tokens[:, :1], patches, tokens[:, 1:]), 1)
    check("hidden_states_0", x, 2e-4)
    assert bool(io["attention_mask"].all())
    hidden = net.hidden(x, counted(x), None, causal=True)
    check("last_hidden_state", hidden, 2e-4)
    check("logits_action", net.action_logits(hidden), 1e-3)
    logits = net.language_model.lm_head(hidden)
    check("logits_first64", logits[..., :64], 1e-3)
    check("logits_logsumexp", logits.logsumexp(-1), 1e-3)
    assert torch.equal(
        logits[..., net.arch.action_begin : net.arch.action_end].argmax(-1), net.action_logits(hidden).argmax(-1)
    )

    chosen = greedy(net, io)
    check("greedy_token_ids", chosen, 0)
    stats = json.loads((golden_dir / "openvla_tiny" / "norm_stats.json").read_text())["tiny"]["action"]
    scale = ColumnRanges(*(torch.tensor(stats[field]) for field in ("q01", "q99", "mask")))
    normalized = action_bins.decode(chosen - net.arch.action_begin)
    check("predicted_actions", scale.unnormalize(normalized), 1e-6)
    assert not left, f"stored but not compared: {sorted(left)}"


def greedy(net, io, num_tokens=7):
    """Ids i64 [2, 7] of the most likely bins, one cached step each."""
    tokens = net.embed_tokens(io["input_ids"])
    x = torch.cat((tokens[:, :1], net.embed_images(full_images(io["pixel_values_lowres"])), tokens[:, 1:]), 1)
    b, s, _ = x.shape
    cache = net.new_cache(b, s + num_tokens - 1)
    last = net.hidden(x, counted(x), None, causal=True, cache=cache)[:, -1]
    chosen = []
    for step in range(num_tokens):
        chosen.append(net.action_logits(last).argmax(-1) + net.arch.action_begin)
        if step < num_tokens - 1:
            last = net.decode(chosen[-1], torch.full((b,), s + step), cache, s + step)
    return torch.stack(chosen, 1)


@torch.no_grad()
def test_a_masked_column_changes_nothing(tiny, max_delta):
    net, io = tiny
    tokens = net.embed_tokens(io["input_ids"])
    patches = net.embed_images(full_images(io["pixel_values_lowres"]))
    pads = torch.full((2, 5, net.arch.width), 3.0)
    x = torch.cat((tokens[:, :1], patches, pads, tokens[:, 1:]), 1)
    valid = torch.ones(x.shape[:2], dtype=torch.bool)
    valid[:, 257:262] = False
    hidden = net.hidden(x, valid.cumsum(1) - 1, valid, causal=True)
    max_delta("last_hidden_state", hidden[valid].view(2, 268, -1), io["last_hidden_state"], 2e-4)
