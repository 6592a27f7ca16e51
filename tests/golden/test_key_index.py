"""key_index: parameter names and shapes of the published π0, π0.5 and OpenVLA, without allocating them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rlinf.models.openpi.architecture import BASE
from rlinf.models.openpi.model import PiNet
from rlinf.models.openpi.weights import published_names
from rlinf.models.prismatic import architecture as prismatic
from rlinf.models.prismatic import weights as prismatic_weights
from rlinf.models.prismatic.model import PrismaticNet

SKIPPED = {
    "paligemma_with_expert.paligemma.lm_head.weight",  # tied to embed_tokens
    "paligemma_with_expert.gemma_expert.lm_head.weight",  # never used
}


@pytest.mark.parametrize("name", ["pi0_base", "pi05_base"])
def test_names_and_shapes(name, golden_dir):
    stored = json.loads((golden_dir / "key_index" / f"{name}.json").read_text())
    arch = replace(BASE, pi05=name == "pi05_base")
    with torch.device("meta"):
        net = PiNet(arch)
    ours = {key: list(p.shape) for key, p in net.state_dict().items()}
    assert ours == {key: shape for key, shape in stored.items() if key not in SKIPPED}
    rename = published_names(pi05=arch.pi05)
    reached = {rename(key) for key in stored}
    assert reached == {f"net.{key}" for key in ours} | {None}
    count = sum(p.numel() for p in net.parameters())
    print(f"{name}: {len(ours)} tensors, {count:,} parameters")
    assert count == sum(arch.num_parameters().values())


def test_openvla_names_and_shapes(golden_dir):
    stored = json.loads((golden_dir / "key_index" / "openvla_7b.json").read_text())
    with torch.device("meta"):
        net = PrismaticNet(prismatic.BASE)
    rename = prismatic_weights.published_names(prismatic.BASE, prefix="")
    unread = {name for name in stored if rename(name) is None}
    assert {rename(name): shape for name, shape in stored.items() if name not in unread} == {
        name: list(p.shape) for name, p in net.state_dict().items()
    }
    towers = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
    dead = (
        f"{towers[0]}blocks.23.",
        f"{towers[1]}blocks.26.",
        *(f"{t}norm." for t in towers),
        f"{towers[1]}attn_pool.",
    )
    assert unread == {name for name in stored if name.startswith(dead)}
    count = sum(p.numel() for p in net.parameters())
    print(f"openvla_7b: {len(stored)} tensors stored, {len(unread)} unread; {count:,} parameters of 7,541,237,184")
    assert count == sum(prismatic.BASE.num_parameters().values())
