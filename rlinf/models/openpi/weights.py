"""Names of published π checkpoints, and the random weights of a policy that starts from none."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from rlinf.models.files.weights import Rename
from rlinf.models.nn.gemma import AdaRMSNorm, RMSNorm
from rlinf.models.nn.initialize import initialize_layer, truncated_normal_

HEADS = ("value_head.", "noise_head.")  # parts an RL policy adds: absent from imitation checkpoints
_EMBED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
_TIED = "paligemma_with_expert.paligemma.lm_head.weight"
_UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
_ALIASES = (
    (re.compile(r"^(module\.|model\.(?=paligemma_with_expert|action_|state_proj|time_mlp))"), ""),  # DDP; lerobot
    # exports of transformers < 4.52
    (re.compile(r"paligemma\.(vision_tower|multi_modal_projector)\."), r"paligemma.model.\1."),
    (re.compile(r"paligemma\.language_model\.model\."), "paligemma.model.language_model."),
    (re.compile(r"paligemma\.language_model\.lm_head\."), "paligemma.lm_head."),
    (re.compile(r"paligemma\.language_model\.(?=embed_tokens|layers|norm)"), "paligemma.model.language_model."),
)
_EXPERT_NORM = re.compile(r"gemma_expert\.model\..*(layernorm|norm)\.weight$")


def published_names(*, pi05: bool) -> Rename:
    """From any published layout to `Policy`'s own parameter names (None: a tensor that is not needed)."""

    def rename(name: str) -> str | None:
        for pattern, replacement in _ALIASES:
            name = pattern.sub(replacement, name)
        if name == _UNUSED or (pi05 and _EXPERT_NORM.search(name)):
            return None  # never read: the expert has no vocabulary, and adaptive norms have no weight of their own
        if name == _TIED:
            name = _EMBED
        if not pi05 and name.startswith("time_mlp_"):
            name = f"action_{name}"  # lerobot's name
        return name if name.startswith(HEADS) else f"net.{name}"

    return rename


def initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Random weights that train: fan-in scaled matrices, unit-scale embeddings, open gates, outputs near zero."""
    for name, m in module.named_modules():
        initialize_layer(m, generator)
        if isinstance(m, nn.Embedding):
            # Prompts are scaled by sqrt(width) later; small positions would not tell patches apart.
            truncated_normal_(m.weight, 1.0 if "position" in name else 1.0 / math.sqrt(m.embedding_dim), generator)
        elif isinstance(m, RMSNorm):
            nn.init.zeros_(m.weight)
    with torch.no_grad():
        for name, m in module.named_modules():
            if isinstance(m, AdaRMSNorm):
                m.dense.weight.mul_(0.1)
                m.dense.bias[-m.dense.out_features // 3 :] = 1.0
            elif name.endswith("action_out_proj"):
                m.weight.mul_(0.1)
