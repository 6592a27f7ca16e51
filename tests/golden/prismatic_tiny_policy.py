"""The published RL policies on the tiny OpenVLA network: our policies with the stored weights and sequences."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import sentencepiece
import torch
from prismatic_tiny_model import architecture, full_images, tiny_net
from torch import Tensor

from rlinf.compat.policies import policy_class
from rlinf.data.types import PolicyEval
from rlinf.models.prismatic.base_config import PrismaticConfig
from rlinf.models.prismatic.folder import StatisticsTable
from rlinf.models.prismatic.policy import PrismaticPolicy
from tests.weights import load_weights


def llama_like_tokenizer(folder: Path) -> Path:
    """A sentencepiece file with Llama-2's special ids: no pad, </s> is 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["open the drawer and close the drawer"] * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=280,
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=-1,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def tiny_policy(
    golden: Path,
    cfg: PrismaticConfig,
    folder: Path,
    *,
    value_head: Path | None,
    side: bool = False,
    compat: str | None = None,
) -> PrismaticPolicy:
    """The golden weights and statistics in a policy of `cfg`, fp32; `folder` is for scratch files.

    `side` takes optional parts from the first OFT code's files; else a state projector is left to the caller.
    """
    cfg = replace(cfg, precision="fp32", unnorm_key="tiny", add_value_head=value_head is not None)
    policy = policy_class(cfg.model_type, compat)(cfg, arch=architecture(), tokenizer_file=llama_like_tokenizer(folder))
    assert isinstance(policy, PrismaticPolicy)
    net = tiny_net(golden, **asdict(cfg.parts())) if side else tiny_net(golden)
    policy.net.load_state_dict(net.state_dict(), strict=side)
    if policy.value_head is not None and value_head is not None:
        load_weights(policy.value_head, value_head, rename=lambda name: name.removeprefix("value_head."))
    entries = json.loads((golden / "openvla_tiny" / "norm_stats.json").read_text())
    policy.processor.action_ranges = StatisticsTable(entries, "norm_stats.json").load(
        "tiny", "action", kind=cfg.statistics_kind, columns=cfg.action_dim
    )
    return policy


def with_sampler(policy: PrismaticPolicy, *, temperature: float, top_k: int) -> PrismaticPolicy:
    """The same policy with another sampler."""
    policy.cfg = replace(policy.cfg, temperature_train=temperature, top_k=top_k)
    return policy


def stored_inputs(stored: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Images, prompt rows (BOS moved to the front of its pads) and state of a case, as `evaluate` takes them."""
    ids, valid = stored[f"{prefix}input_ids"], stored[f"{prefix}attention_mask"].bool()
    first = (torch.arange(ids.shape[1]) == 0).expand_as(ids)
    bos = valid & (valid.cumsum(1) == 1)
    ids = torch.where(first, ids[bos][:, None], torch.where(bos & ~first, ids[:, :1], ids))
    inputs = {
        "images": full_images(stored[f"{prefix}pixel_values_lowres"]),
        "ids": ids,
        "valid": (valid & ~bos) | first,
    }
    if f"{prefix}proprio" in stored:
        inputs["state"] = stored[f"{prefix}proprio"]
    return inputs


@torch.no_grad()
def scored(policy: PrismaticPolicy, inputs: dict[str, Tensor], bins: Tensor) -> PolicyEval:
    """`evaluate` on stored inputs and bins."""
    return policy.evaluate(inputs | {"bins": bins}, values=True, entropy=True)


@torch.no_grad()
def greedy(policy: PrismaticPolicy, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `predict` would record, from stored inputs."""
    return policy.act(inputs, temperature=0.0, train=True)
