"""openvla_oft_official: parallel decoding of the published OFT code: L1 and discrete heads, proprio, FiLM, training."""

from __future__ import annotations

import json

import pytest
import torch
from prismatic_tiny_model import OFT, counted, full_images, tiny_net
from safetensors.torch import load_file
from torch.nn import functional as F

from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic.folder import ColumnRanges
from rlinf.models.prismatic.weights import published_names

K, D = 8, 7
EMPTY_TOKEN, EOS = 29871, 2  # of Llama-2
IGNORE_INDEX = -100  # label of a position without a target
CASES = {
    "l1": {"proprio_dim": 8, "regression": (K, D)},
    "discrete": {},
    "discrete_proprio": {"proprio_dim": 8},
    "film": {"proprio_dim": 8, "regression": (K, D), "film": True},
}


@pytest.fixture(scope="module")
def io(golden_dir):
    return load_file(golden_dir / OFT / "io.safetensors")


def test_every_stored_tensor_has_a_case(io):
    inputs = {"input_ids", "attention_mask", "pixel_values_lowres", "proprio"}
    assert {key.split(".")[0] for key in io} == inputs | set(CASES) | {"train"}
    assert all({f"{case}.actions", f"{case}.action_hidden_states"} <= set(io) for case in CASES)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_inference(case, io, golden_dir, max_delta):
    net = tiny_net(golden_dir, **CASES[case])
    ids = F.pad(io["input_ids"], (0, 1), value=EMPTY_TOKEN)
    tokens = net.embed_tokens(ids)
    stop = net.embed_tokens(torch.tensor([[EOS]]))
    language = torch.cat((tokens, stop), 1).mean(1) if net.parts.film else None
    patches = net.embed_images(full_images(io["pixel_values_lowres"]), language)
    state = [net.embed_proprio(io["proprio"][None])] if net.parts.proprio_dim else []
    slots = torch.zeros(1, K * D, net.arch.width)
    x = torch.cat((tokens[:, :1], patches, *state, tokens[:, 1:], slots, stop), 1)
    first = x.shape[1] - K * D - 2  # the last prompt token: every slot is read one position early
    hidden = net.hidden(x, counted(x), None, causal=False)[:, first : first + K * D]
    max_delta(f"{case}.action_hidden_states", hidden, io[f"{case}.action_hidden_states"], 2e-4)
    if net.parts.regression:
        normalized = net.regress(hidden)[0]
    else:
        normalized = action_bins.decode(net.action_logits(hidden).argmax(-1)).view(K, D)
    stats = json.loads((golden_dir / "openvla_tiny" / "norm_stats.json").read_text())["tiny"]["action"]
    scale = ColumnRanges(*(torch.tensor(stats[field]) for field in ("q01", "q99", "mask")))
    max_delta(
        f"{case}.actions", scale.unnormalize(normalized), io[f"{case}.actions"], 1e-4 if net.parts.regression else 1e-6
    )


@torch.no_grad()
def test_labelled_forward(io, golden_dir, max_delta):
    net = tiny_net(golden_dir, proprio_dim=8)
    ids, labels, valid = io["train.input_ids"], io["train.labels"], io["train.attention_mask"]
    patches = net.embed_images(full_images(io["train.pixel_values_lowres"]))
    tokens = net.embed_tokens(ids)
    tokens[labels >= net.arch.action_begin] = 0.0  # actions are read out, never read
    x = torch.cat((tokens[:, :1], patches, net.embed_proprio(io["train.proprio"]), tokens[:, 1:]), 1)
    extra = x.shape[1] - ids.shape[1]
    seen = torch.cat((valid[:, :1], torch.ones(2, extra, dtype=torch.bool), valid[:, 1:]), 1)
    hidden = net.hidden(x, counted(x), seen, causal=False)
    max_delta("train.last_hidden_state", hidden, io["train.last_hidden_state"], 2e-4)
    rounded = io["train.logits_action"].float()
    max_delta("train.logits_action", net.action_logits(hidden), rounded, 1e-3, relative=True)
    targets = torch.cat((labels[:, :1], torch.full((2, extra), IGNORE_INDEX), labels[:, 1:]), 1)
    logits = net.language_model.lm_head(hidden)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
    max_delta("train.loss", loss, io["train.loss"], 1e-5, relative=True)


def test_film_names(golden_dir):
    stored = json.loads((golden_dir / OFT / "film_keys.json").read_text())
    net = tiny_net(golden_dir, film=True)
    rename = published_names(net.arch, prefix="")
    ours = {name for name in net.state_dict() if name.startswith("vision_backbone.")}
    assert {rename(name) for name in stored["all_vision_backbone_keys"]} == ours | {None}
    assert {rename(f"vision_backbone.{name}") for name in stored["all_vision_backbone_keys"]} == ours | {None}
