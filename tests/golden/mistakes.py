"""Deliberate mistakes, each patched into a shipped module for one test: `MISTAKES` maps a name to the patch.

Every one is an easy way to load a published checkpoint without complaint and get other numbers. A patch gets pytest's
monkeypatch, which takes it back; what it calls must be looked up when called, never bound before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlinf.algorithms import advantages
from rlinf.compat.policies import PublishedTopK
from rlinf.models import images
from rlinf.models.nn import fused, gemma, llama, timm_vit, vit
from rlinf.models.nn.sizes import Tower
from rlinf.models.openpi import flow, heads, model, sampler
from rlinf.models.openvla_oft.policy import Policy as OftPolicy
from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic import model as prismatic_model
from rlinf.models.prismatic.folder import ColumnRanges
from rlinf.models.prismatic.model import PrismaticNet, VisionBackbone
from rlinf.models.prismatic.policy import PrismaticPolicy
from rlinf.models.prismatic.sequence import Context

Tensor = torch.Tensor
MonkeyPatch = pytest.MonkeyPatch
Patch = Callable[[MonkeyPatch], None]


@dataclass(frozen=True)
class Mistake:
    """A patch, and the golden set that must notice it."""

    patch: Patch
    golden: str


MISTAKES: dict[str, Mistake] = {}


def caught_by(*goldens: str, name: str) -> Callable[[Patch], Patch]:
    """Enter a patch under its name, once for each golden set that must notice it."""

    def enter(patch: Patch) -> Patch:
        for golden in goldens:
            MISTAKES[f"{name} ({golden})"] = Mistake(patch, golden)
        return patch

    return enter


# ------------------------------------------------------------------ activations, norms and positions
@caught_by("pi0_tiny", "pi05_tiny", name="erf GELU in PaliGemma's SigLIP")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(fused, "linear_gelu", lambda x, layer: F.gelu(layer(x)))


@caught_by("pi0_tiny", name="erf GELU in Gemma")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(fused, "gelu_gate", lambda gate, up: F.gelu(gate) * up)


@caught_by("openvla_tiny", name="tanh GELU in timm's towers")
def _(patch: MonkeyPatch) -> None:
    right = timm_vit.Block.__init__

    def init(self, *args) -> None:
        right(self, *args)
        self.mlp.gelu = nn.GELU(approximate="tanh")

    patch.setattr(timm_vit.Block, "__init__", init)


@caught_by("openvla_tiny", name="tanh GELU in the projector")
def _(patch: MonkeyPatch) -> None:
    right = prismatic_model.projector

    def projector(vision_width: int, width: int) -> nn.Sequential:
        layers = right(vision_width, width)
        layers.gelu1 = layers.gelu2 = nn.GELU(approximate="tanh")
        return layers

    patch.setattr(prismatic_model, "projector", projector)


@caught_by("openvla_tiny", name="GELU instead of SiLU in Llama")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(fused, "silu_gate", lambda gate, up: F.gelu(gate) * up)


@caught_by("pi0_tiny", "pi05_tiny", name="norm eps 1e-5 in Gemma")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(gemma, "NORM_EPS", 1e-5)


@caught_by("openvla_tiny", "openvla_oft_official", name="norm eps 1e-5 in Llama")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(llama, "_add_norm", lambda stream, norm: fused.add_norm(*stream, norm.weight, eps=1e-5))


@caught_by("pi0_tiny", name="Gemma norms scale by weight, not 1 + weight")
def _(patch: MonkeyPatch) -> None:
    def forward(self, stream, modulation):
        return *fused.add_norm(*stream, self.weight, eps=gemma.NORM_EPS), None

    patch.setattr(gemma.RMSNorm, "forward", forward)


@caught_by("pi0_tiny", "openvla_tiny", name="RoPE interleaved, not half-split")
def _(patch: MonkeyPatch) -> None:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    patch.setattr(fused, "rotate", rotate)


# ------------------------------------------------------------------ π: time, adaptive norms, who sees whom
@caught_by("pi05_tiny", name="adaptive norm takes shift for scale")
def _(patch: MonkeyPatch) -> None:
    def modulate(self, cond: Tensor) -> Tensor:
        scale, shift, gate = self.dense(cond)[:, None].chunk(3, -1)
        return torch.cat((shift, scale, gate), -1)

    patch.setattr(gemma.AdaRMSNorm, "modulate", modulate)


@caught_by("pi05_tiny", name="residual gate dropped")
def _(patch: MonkeyPatch) -> None:
    right = gemma.AdaRMSNorm.forward
    patch.setattr(gemma.AdaRMSNorm, "forward", lambda *args: (*right(*args)[:2], None))


@caught_by("pi05_tiny", name="time embedding as cosines, then sines")
def _(patch: MonkeyPatch) -> None:
    right = model.time_embedding
    patch.setattr(model, "time_embedding", lambda t, width: right(t, width).roll(width // 2, -1))


@caught_by("pi0_tiny", name="the state token sees the actions")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(model.PiNet, "suffix_starts", lambda self: [1] + [0] * self.arch.action_horizon)


@caught_by("pi05_tiny", name="causal actions")
def _(patch: MonkeyPatch) -> None:
    right = model.PiNet.suffix_starts
    patch.setattr(model.PiNet, "suffix_starts", lambda self: [1] * len(right(self)))


def see(patch: MonkeyPatch, change: Callable[[Tensor], Tensor | None]) -> None:
    """Change who sees whom inside the prefix, bool [B, 1 or P, P]."""
    right = gemma.Gemma.frame

    def frame(self, positions, visible, room=0):
        inside = visible is not None and visible.shape[-1] == positions.shape[1]
        return right(self, positions, change(visible) if inside else visible, room)

    patch.setattr(gemma.Gemma, "frame", frame)


@caught_by("pi0_tiny", name="causal prefix")
def _(patch: MonkeyPatch) -> None:
    see(patch, lambda visible: visible & torch.ones(visible.shape[-1], visible.shape[-1], dtype=torch.bool).tril())


@caught_by("pi0_tiny", name="prompt padding is seen")
def _(patch: MonkeyPatch) -> None:
    see(patch, lambda visible: None)


@caught_by("pi0_tiny", name="suffix positions count padding")
def _(patch: MonkeyPatch) -> None:
    right = model._lengths
    patch.setattr(model, "_lengths", lambda kv, valid: right(kv, None))


@caught_by("pi05_tiny", name="prompt embeddings unscaled")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(model.PiNet, "embed_prompt", lambda self, tokens: self._parts.language.embed_tokens(tokens))


@caught_by("pi0_tiny", name="image features divided by sqrt(width)")
def _(patch: MonkeyPatch) -> None:
    right = model.PiNet.embed_images
    patch.setattr(model.PiNet, "embed_images", lambda self, x: right(self, x) / self.arch.vlm_width**0.5)


@caught_by("pi0_tiny", name="SigLIP's last norm missing")
def _(patch: MonkeyPatch) -> None:
    def forward(self, pictures: Tensor) -> Tensor:
        stream = fused.Residual(self.embeddings(pictures))
        for layer in self.encoder["layers"]:
            stream = layer(stream)
        return stream.total()

    patch.setattr(vit.SiglipVision, "forward", forward)


# ------------------------------------------------------------------ OpenVLA and OFT: towers and sequence
@caught_by("openvla_tiny", name="LayerScale dropped")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(timm_vit, "_gain", lambda scale: None)


@caught_by("openvla_tiny", name="last ViT block used")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(Tower, "blocks", property(lambda self: self.depth))


@caught_by("openvla_tiny", name="tower features normalised")
def _(patch: MonkeyPatch) -> None:
    right = timm_vit.TimmVit.forward

    def forward(self, patches: Tensor, condition: Tensor | None = None) -> Tensor:
        out = right(self, patches, condition)
        return F.layer_norm(out, out.shape[-1:], eps=timm_vit.NORM_EPS)

    patch.setattr(timm_vit.TimmVit, "forward", forward)


@caught_by("openvla_tiny", name="towers read each other's pixels")
def _(patch: MonkeyPatch) -> None:
    right = VisionBackbone.forward
    patch.setattr(VisionBackbone, "forward", lambda self, x, language: right(self, x.roll(3, 1), language))


@caught_by("openvla_tiny", name="bidirectional OpenVLA")
def _(patch: MonkeyPatch) -> None:
    right = llama.Attention.forward
    patch.setattr(
        llama.Attention, "forward", lambda self, x, frame, cache: right(self, x, frame._replace(causal=False), cache)
    )


@caught_by("openvla_oft_official", "openvla_oft_rlinf", name="causal OFT")
def _(patch: MonkeyPatch) -> None:
    right = PrismaticNet.hidden
    patch.setattr(
        PrismaticNet, "hidden", lambda self, x, at, valid, causal, cache=None: right(self, x, at, valid, causal=True)
    )


@caught_by("openvla_oft_rlinf", "openvla_rlinf_policy", name="positions count padding")
def _(patch: MonkeyPatch) -> None:
    def positions(self, more: int = 0) -> Tensor:
        return torch.arange(self.x.shape[1] + more).expand(len(self.x), -1)

    patch.setattr(Context, "positions", positions)


@caught_by("openvla_tiny", name="decoded tokens one position late")
def _(patch: MonkeyPatch) -> None:
    right = PrismaticNet.decode
    patch.setattr(PrismaticNet, "decode", lambda self, ids, at, *cache: right(self, ids, at + 1, *cache))


@caught_by("openvla_oft_rlinf_official", name="no </s> behind the slots")
def _(patch: MonkeyPatch) -> None:
    patch.setattr(PrismaticPolicy, "stop_token", None)


@caught_by("openvla_oft_rlinf", "openvla_oft_rlinf_official", name="slots read at their own positions")
def _(patch: MonkeyPatch) -> None:
    right = PrismaticNet.hidden
    patch.setattr(PrismaticNet, "hidden", lambda *args, **keys: right(*args, **keys).roll(-1, 1))


@caught_by("openvla_oft_rlinf", name="slots hold an embedding")
def _(patch: MonkeyPatch) -> None:
    right = Context.with_tail
    patch.setattr(Context, "with_tail", lambda self, tail: right(self, tail + 0.02))


@caught_by("openvla_oft_rlinf", name="the critic reads the last slot")
def _(patch: MonkeyPatch) -> None:
    right = OftPolicy.read

    def read(self, context, bins):
        out = right(self, context, bins)
        return replace(out, value=out.slots[:, -1])

    patch.setattr(OftPolicy, "read", read)


# ------------------------------------------------------------------ sampling, actions, images
@caught_by("openvla_rlinf_policy", name="log-probs without temperature")
def _(patch: MonkeyPatch) -> None:
    right = action_bins.log_probs
    patch.setattr(action_bins, "log_probs", lambda logits, **keys: right(logits, **(keys | {"temperature": 1.0})))


@caught_by("openvla_rlinf_policy", name="top-k before the mask of bins")
def _(patch: MonkeyPatch) -> None:
    right = PrismaticPolicy.score

    def score(self, slots: Tensor, bins: Tensor) -> Tensor:
        return (PublishedTopK.score if self.cfg.top_k > 0 else right)(self, slots, bins)

    patch.setattr(PrismaticPolicy, "score", score)


@caught_by("preprocess_openvla", "openvla_tiny", name="bins decoded one off")
def _(patch: MonkeyPatch) -> None:
    right = action_bins.decode
    patch.setattr(action_bins, "decode", lambda bins: right(bins + 1))


@caught_by("preprocess_openvla", name="bins decoded in reverse")
def _(patch: MonkeyPatch) -> None:
    right = action_bins.decode
    patch.setattr(action_bins, "decode", lambda bins: right(255 - bins))


@caught_by("openvla_rlinf_policy", name="un-normalised without the mask")
def _(patch: MonkeyPatch) -> None:
    right = ColumnRanges.unnormalize

    def unnormalize(self, x: Tensor) -> Tensor:
        return right(ColumnRanges(self.low, self.high, torch.ones_like(self.mask)), x)

    patch.setattr(ColumnRanges, "unnormalize", unnormalize)


@caught_by("preprocess_openvla", name="bilinear resize")
def _(patch: MonkeyPatch) -> None:
    right = images.resize
    patch.setattr(images, "resize", lambda x, size: right(x, size, kernel="triangle"))


@caught_by("preprocess_openvla", name="resize without antialiasing")
def _(patch: MonkeyPatch) -> None:
    def resize(x: Tensor, size: int) -> Tensor:
        out = F.interpolate(x.movedim(-1, 1).float(), (size, size), mode="bicubic", align_corners=False)
        return out.movedim(1, -1).clamp(0, 255).round().to(torch.uint8)

    patch.setattr(images, "resize", resize)


# ------------------------------------------------------------------ flow policies and advantages
def reweigh(patch: MonkeyPatch, change: Callable[[flow.Weights], flow.Weights]) -> None:
    """Change the table of the flow-SDE."""
    right = flow.step_weights

    def step_weights(method, num_steps, noise_level, device):
        table = right(method, num_steps, noise_level, device)
        return change(table) if method == "flow_sde" else table

    patch.setattr(flow, "step_weights", step_weights)


@caught_by("flow_policy_math", "pi_rlinf_policy", name="flow-SDE divides by 1 - t of the next step everywhere")
def _(patch: MonkeyPatch) -> None:
    def change(table: flow.Weights) -> flow.Weights:
        after = torch.cat((table.t[1:], torch.zeros(1)))
        used = torch.cat((after[:1], table.t[1:]))
        return table._replace(std=table.std * torch.sqrt((1 - used) / (1 - after)))

    reweigh(patch, change)


@caught_by("flow_policy_math", name="flow-SDE mean without its drift correction")
def _(patch: MonkeyPatch) -> None:
    reweigh(patch, lambda table: table._replace(w1=1 - table.w0))


@caught_by("flow_policy_math", name="learned std interpolated on a linear scale")
def _(patch: MonkeyPatch) -> None:
    def forward(self, features: Tensor) -> Tensor:
        low, high = (torch.exp(0.5 * x) for x in (self.logvar_min, self.logvar_max))
        return low + (high - low) * (torch.tanh(self.mlp_logvar(features)) + 1) / 2

    patch.setattr(heads.NoiseHead, "forward", forward)


@caught_by("pi_rlinf_policy", name="joint log-prob summed, not averaged")
def _(patch: MonkeyPatch) -> None:
    right = sampler.Sampler.score

    def score(self, *args):
        out = right(self, *args)
        return replace(out, logprobs=out.logprobs * (self.num_steps + 1)) if self.joint else out

    patch.setattr(sampler.Sampler, "score", score)


@caught_by("rl_algorithms", name="GAE with gamma and lambda swapped")
def _(patch: MonkeyPatch) -> None:
    right = advantages.gae

    def swapped(steps, cfg, *more):
        return right(steps, replace(cfg, gamma=cfg.gae_lambda, gae_lambda=cfg.gamma), *more)

    patch.setattr(advantages, "gae", swapped)


@caught_by("rl_algorithms", name="GRPO with the biased std")
def _(patch: MonkeyPatch) -> None:
    right = advantages.group_statistics

    def group_statistics(*args):
        mean, std, count = right(*args)
        return mean, std * ((count - 1) / count).sqrt(), count

    patch.setattr(advantages, "group_statistics", group_statistics)
