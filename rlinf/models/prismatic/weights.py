"""Names of published OpenVLA checkpoints, the files beside them, and the random weights of a network without one."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from rlinf.models.files.weights import Rename
from rlinf.models.nn.initialize import initialize_layer, truncated_normal_
from rlinf.models.nn.timm_vit import LayerScale, TimmVit
from rlinf.models.prismatic.architecture import Architecture
from rlinf.models.prismatic.model import PrismaticNet

HEADS = ("value_head.",)  # parts an RL policy adds: absent from imitation checkpoints
NET = "net."  # where a policy keeps its PrismaticNet
SIDE = "side."  # marks a tensor of a side file
SIDE_PARTS = ("action_head", "proprio_projector", "vision_backbone")  # published runs may keep them in their own files
_ALIASES = (
    (re.compile(r"\b(module\.|base_model\.model\.)+"), ""),  # DDP; PEFT
    (re.compile(r"^(vision_backbone\.)+"), "vision_backbone."),  # FiLM wraps the backbone,
    (re.compile(r"^(vision_backbone\.\w+\.blocks\.\d+\.)block\."), r"\1"),  # and each of its blocks
    (re.compile(r"\.(ls[12])\.gamma$"), r".\1.scale_factor"),  # timm's own name
)
_BLOCK = re.compile(r"^vision_backbone\.(featurizer|fused_featurizer)\.blocks\.(\d+)\.")
# Layers that start small: outputs, and FiLM's change of its features.
_SMALL = (
    "lm_head",
    "action_head.model.fc2",
    ".scale",
    ".shift",
)
_NUM_WAVES = 6
_UNREAD = re.compile(r"^vision_backbone\.\w+\.(norm|attn_pool)\.|\.rotary_emb\.inv_freq$")


def published_names(arch: Architecture, *, prefix: str = NET, side: Collection[str] = ()) -> Rename:
    """From any published layout to a policy's own parameter names (None: a tensor that is never read).

    Parts named in `side` come from files of their own, whose tensors start with SIDE and the part; they win.
    """
    last = {"featurizer": arch.dino.blocks, "fused_featurizer": arch.siglip.blocks}  # the block that is never computed

    def rename(stored: str) -> str | None:
        name = stored.removeprefix(SIDE)
        for pattern, replacement in _ALIASES:
            name = pattern.sub(replacement, name)
        block = _BLOCK.match(name)
        if _UNREAD.search(name) or (block is not None and int(block[2]) == last[block[1]]):
            return None
        if name.split(".", 1)[0] in side and not stored.startswith(SIDE):
            return None
        return name if name.startswith(HEADS) else f"{prefix}{name}"

    return rename


def side_files(folder: Path) -> dict[str, Path]:
    """The `<part>--<step>_checkpoint.pt` of the last step, by part, as far as `folder` has them."""
    found = {part: sorted(folder.glob(f"{part}--*_checkpoint.pt"), key=_step) for part in SIDE_PARTS}
    return {part: files[-1] for part, files in found.items() if files}


def _step(file: Path) -> int:
    """Training step in a file name; one without counts as the last."""
    digits = re.search(r"--(\d+)_", file.name)
    return int(digits[1]) if digits else 1 << 62


def initialize(net: PrismaticNet, generator: torch.Generator) -> None:
    """Random weights that train: fan-in scaled matrices, unit-scale embeddings, outputs near zero, ordered bins."""
    for name, m in net.named_modules():
        initialize_layer(m, generator, gain=0.1 if name.endswith(_SMALL) else 1.0)
        if isinstance(m, nn.Embedding):
            truncated_normal_(m.weight, 1.0, generator)  # as large as the projected patches beside them
        elif isinstance(m, nn.RMSNorm):
            nn.init.ones_(m.weight)
        elif isinstance(m, LayerScale):
            nn.init.ones_(m.scale_factor)
        elif isinstance(m, TimmVit):
            # Small positions would not tell patches apart.
            for tokens in (m.pos_embed, m.cls_token, m.reg_token):
                if tokens is not None:
                    truncated_normal_(tokens, 1.0, generator)
    _order_bins(net, generator)


def _order_bins(net: PrismaticNet, generator: torch.Generator) -> None:
    """Draw the rows of the action bins as smooth functions of the bin: what one bin learns, its neighbours share.

    With unrelated rows a small network needs several times the data, since it must meet all 256 values of a column.
    """
    arch, language = net.arch, net.language_model
    bins = torch.linspace(0.0, 1.0, arch.num_bins, device=generator.device)[:, None]
    waves = torch.arange(1, _NUM_WAVES + 1, device=generator.device)
    basis = torch.cos(math.pi * waves * bins) * math.sqrt(2.0 / _NUM_WAVES)  # [256, waves]
    rows = slice(arch.action_begin, arch.action_end)
    with torch.no_grad():
        for weight, std in (
            (language.lm_head.weight, 0.5 / math.sqrt(arch.width)),
            (language.model.embed_tokens.weight, 1.0),
        ):
            drawn = torch.randn(_NUM_WAVES, arch.width, generator=generator, device=generator.device)
            weight[rows] = (basis @ drawn * std).to(weight.dtype)
