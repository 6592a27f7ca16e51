"""The tiny OpenVLA network of the golden vectors, loaded through our own checkpoint reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rlinf.models.files.weights import plain_state, prepare_load
from rlinf.models.prismatic.architecture import BASE, Architecture, Parts
from rlinf.models.prismatic.model import PrismaticNet
from rlinf.models.prismatic.weights import SIDE, published_names

Tensor = torch.Tensor
OFT = "openvla_oft_official"


def architecture() -> Architecture:
    """Published image size and vocabulary, everything else tiny."""
    return replace(
        BASE,
        dino=replace(BASE.dino, width=32, depth=4, mlp=128, heads=4),
        siglip=replace(BASE.siglip, width=48, depth=5, mlp=179, heads=4),
        width=32,
        mlp=64,
        depth=3,
        num_heads=4,
    )


def tiny_net(
    golden: Path, *, proprio_dim: int = 0, film: bool = False, regression: tuple[int, int] | None = None
) -> PrismaticNet:
    """The golden weights; optional parts from the files beside the OFT vectors."""
    net = PrismaticNet(architecture(), Parts(proprio_dim=proprio_dim, film=film, regression=regression))
    oft = golden / OFT
    side = {"action_head": regression is not None, "proprio_projector": proprio_dim > 0}
    files = [(oft / f"{part}.safetensors", f"{SIDE}{part}.") for part, wanted in side.items() if wanted]
    if film:
        files.append((oft / "film.safetensors", ""))  # adds to the backbone instead of replacing it
    rename = published_names(net.arch, prefix="")
    prepare_load(plain_state(net), golden / "openvla_tiny", rename=rename, side=files).run()
    return net


def full_images(lowres: Tensor) -> Tensor:
    """Stored pixels [B, 6 * n, 56, 56] -> the network's input f32 [B, n, 6, 224, 224]."""
    full = lowres.float().repeat_interleave(4, -1).repeat_interleave(4, -2)
    return full.unflatten(1, (-1, 6))


def counted(x: Tensor) -> Tensor:
    """Positions 0, 1, 2, ... of a sequence [B, L, W]: i64 [B, L]."""
    return torch.arange(x.shape[1]).expand(x.shape[0], -1)
