"""The tiny π networks of the golden vectors, loaded through our own checkpoint reader."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from rlinf.compat.policies import policy_class
from rlinf.models.openpi.architecture import Architecture
from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.openpi.model import PiNet, Prefix
from rlinf.models.openpi.policy import Policy
from rlinf.models.openpi.weights import HEADS, published_names
from tests.weights import load_weights

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def architecture(pi05: bool) -> Architecture:
    return Architecture(
        pi05=pi05,
        image_size=224,
        patch_size=14,
        vit_width=48,
        vit_depth=2,
        vit_mlp=80,
        vit_heads=4,
        vocab_size=320,
        vlm_width=64,
        vlm_mlp=128,
        expert_width=32,
        expert_mlp=64,
        depth=3,
        num_heads=8,
        num_kv_heads=1,
        head_dim=16,
        action_dim=32,
        action_horizon=6,
        max_token_len=200 if pi05 else 48,
    )


def tiny_policy(golden: Path, *, pi05: bool, tokenizer_file: Path, compat: str | None = None, **options) -> Policy:
    """The golden weights in a policy (fp32, 4 of 6 actions, 7 columns, 5 steps); heads keep what `build` would draw."""
    name = "pi05_metaworld" if pi05 else "pi0_metaworld"
    cfg = Config(
        size="base",
        precision="fp32",
        action_dim=7,
        num_action_chunks=4,
        num_steps=5,
        add_value_head=True,
        openpi=OpenPiOptions(config_name=name, num_images_in_input=2, action_horizon=6, **options),
    )
    policy = policy_class("openpi", compat)(cfg, arch=architecture(pi05), tokenizer_file=tokenizer_file)
    folder = golden / ("pi05_tiny" if pi05 else "pi0_tiny")
    load_weights(policy, folder, rename=published_names(pi05=pi05), optional=HEADS)
    return policy


def tiny_inputs(golden: Path, pi05: bool) -> dict[str, torch.Tensor]:
    """The stored tensors, with cameras stacked as `images` u8 [B, 3, ...] and `image_valid` bool [B, 3]."""
    io = load_file(golden / ("pi05_tiny" if pi05 else "pi0_tiny") / "io.safetensors")
    io["images"] = torch.stack([io[f"image.{c}"] for c in CAMERAS], 1)
    io["image_valid"] = torch.stack([io[f"image_mask.{c}"] for c in CAMERAS], 1)
    return io


def tiny_prefix(net: PiNet, io: dict[str, torch.Tensor], *, full_mask: bool = False) -> Prefix:
    """All three cameras and all prompt slots, masked where invalid."""
    return net.prefix(
        io["images"],
        io["tokenized_prompt"],
        io["tokenized_prompt_mask"],
        image_valid=io["image_valid"],
        output=True,
        full_mask=full_mask,
    )
