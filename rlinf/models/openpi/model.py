"""The π0 / π0.5 network: images and prompt to a prefix of keys and values, noisy actions to a velocity.

Letters: B rows, n cameras, T tokens a camera, L prompt slots, P prefix tokens (n * T + L), H actions, D action columns,
S suffix tokens (H, and one for the state in π0), W expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from rlinf.models.nn import fused
from rlinf.models.nn.gemma import Frame, Gemma, KeyValue
from rlinf.models.nn.graphs import kept
from rlinf.models.nn.vit import SiglipVision
from rlinf.models.openpi import flow
from rlinf.models.openpi.architecture import Architecture

Tensor = torch.Tensor


@dataclass(frozen=True)
class Times:
    """What the expert reads of N times, computed once per sampler; rows and steps pick theirs with `at`."""

    embedding: Tensor  # f32 [N, W]
    modulation: list[Tensor] | None  # π0.5: of each adaptive norm [N, 1, 3 W]

    def at(self, index: Tensor | slice) -> Times:
        """Those of `index`: one per row, or one for all rows."""
        picked = None if self.modulation is None else [m[index] for m in self.modulation]
        return Times(self.embedding[index], picked)


@dataclass(frozen=True)
class Prefix:
    """What the expert needs of an observation; made by `PiNet.prefix` or, from stored parts, by `PiNet.attach`."""

    kv: Sequence[KeyValue]  # per layer [B, G, P, E]
    valid: Tensor | None  # bool [B, P]; None when every token counts
    frame: Frame  # the suffix's positions and mask, the same at every denoising step
    output: Tensor | None = None  # [B, P, vlm width], when asked for
    image_tokens: Tensor | None = None  # [B, n * T, vlm width] as the images were embedded

    def lengths(self) -> Tensor:
        """Valid tokens per row i64 [B]."""
        return _lengths(self.kv, self.valid)

    def with_room(self, tokens: int) -> Prefix:
        """The same in buffers where every denoising step writes its own keys and values behind the prefix's."""
        return replace(self, kv=[kv.with_room(tokens) for kv in self.kv])


def visible(valid: Tensor, starts: Tensor, first_row: int = 0) -> Tensor:
    """Which token attends to which, bool [B, S - first_row, S], for queries from `first_row` on.

    `starts` [S] is 1 where a new block begins; a token sees its own and all earlier blocks, where both ends are valid.
    """
    block = starts.cumsum(0)
    earlier = block[None, :] <= block[first_row:, None]  # [S - first_row, S]
    return earlier & valid[:, None, :] & valid[:, first_row:, None]


def positions(valid: Tensor) -> Tensor:
    """Positions count valid tokens only: i64 [B, S]."""
    return valid.cumsum(1) - 1


def _lengths(kv: Sequence[KeyValue], valid: Tensor | None) -> Tensor:
    k = kv[0].k
    return torch.full((k.shape[0],), k.shape[2], device=k.device) if valid is None else valid.sum(1)


def _frame_of_all(stack: Gemma, tokens: int, room: int, device: torch.device) -> Frame:
    """Of tokens that all count and see each other, in any number of rows."""
    return stack.frame(torch.arange(tokens, device=device)[None], None, room)


@cache  # never dropped: recorded kernels keep its address
def _block_starts(prefix: int, starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept on the device: one block of `prefix` tokens, then `starts`."""
    return torch.tensor([0] * prefix + list(starts), device=device)


@cache  # never dropped: recorded kernels keep its address
def _angular_frequencies(width: int, device: torch.device) -> Tensor:
    """2π / period at periods from 4e-3 to 4, geometrically: f64 [width / 2]."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=device)
    return 2 * math.pi / (4e-3 * (4.0 / 4e-3) ** fraction)


def time_embedding(t: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of times [B] -> f64 [B, width]."""
    angles = t.double()[:, None] * _angular_frequencies(width, t.device)
    return torch.cat((angles.sin(), angles.cos()), -1)


class _Parts(NamedTuple):
    """Parts of the network under short names; a tuple, which torch does not register a second time."""

    vision: SiglipVision
    projector: nn.ModuleDict  # of its `linear`, which LoRA may replace
    language: Gemma
    expert: Gemma


class PiNet(nn.Module):
    """Weights and passes of π0 (`pi05=False`) or π0.5."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        vision = SiglipVision(
            image_size=arch.image_size,
            patch_size=arch.patch_size,
            width=arch.vit_width,
            depth=arch.vit_depth,
            hidden=arch.vit_mlp,
            heads=arch.vit_heads,
        )
        gemma = partial(
            Gemma, depth=arch.depth, heads=arch.num_heads, kv_heads=arch.num_kv_heads, head_dim=arch.head_dim
        )
        language = gemma(width=arch.vlm_width, hidden=arch.vlm_mlp, vocab_size=arch.vocab_size)
        expert = gemma(width=arch.expert_width, hidden=arch.expert_mlp, adaptive=arch.pi05)
        projector = nn.ModuleDict({"linear": nn.Linear(arch.vit_width, arch.vlm_width)})
        vlm = nn.ModuleDict(
            {
                "vision_tower": nn.ModuleDict({"vision_model": vision}),
                "multi_modal_projector": projector,
                "language_model": language,
            }
        )
        self.paligemma_with_expert = nn.ModuleDict(
            {"paligemma": nn.ModuleDict({"model": vlm}), "gemma_expert": nn.ModuleDict({"model": expert})}
        )
        self._parts = _Parts(vision, projector, language, expert)
        width, d = arch.expert_width, arch.action_dim
        self.action_in_proj = nn.Linear(d, width)
        self.action_out_proj = nn.Linear(width, d)
        if arch.pi05:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(d, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def vlm(self) -> nn.Module:
        """Everything `train_expert_only` freezes."""
        return self.paligemma_with_expert["paligemma"]

    def embed_images(self, images: Tensor) -> Tensor:
        """u8 [B, n, S, S, 3] or f32 in [-1, 1] -> [B, n * T, vlm width]; all cameras in one pass."""
        if images.dtype == torch.uint8:
            images = images.mul(2.0 / 255.0).sub_(1.0)  # f32
        features = self._parts.projector["linear"](self._parts.vision(images.flatten(0, 1)))  # [B * n, T, vlm width]
        return features.view(images.shape[0], -1, features.shape[-1])

    def embed_prompt(self, tokens: Tensor) -> Tensor:
        """i64 [B, L] -> [B, L, vlm width]; only the prompt is scaled, images are not."""
        embedded = self._parts.language.embed_tokens(tokens)
        return embedded * math.sqrt(embedded.shape[-1])

    def prefix(
        self,
        images: Tensor,
        tokens: Tensor,
        token_valid: Tensor | None,
        *,
        image_valid: Tensor | None = None,
        output: bool = False,
        full_mask: bool = False,
    ) -> Prefix:
        """Observation to keys and values; masks are bool [B, L] and [B, n], None when all is valid.

        `image_valid` is read only beside a `token_valid`. `full_mask` also hides valid tokens from padded queries,
        which changes their (otherwise unread) outputs.
        """
        b, n = images.shape[:2]
        room = 0 if torch.is_grad_enabled() else len(self.suffix_starts())
        image_tokens = self.embed_images(images)
        x = torch.cat((image_tokens, self.embed_prompt(tokens)), 1)
        language = self._parts.language
        if token_valid is None:
            valid, frame = None, kept(_frame_of_all, language, x.shape[1], room, x.device)
        else:
            cameras = tokens.new_ones(b, n, dtype=torch.bool) if image_valid is None else image_valid
            valid = torch.cat((cameras.repeat_interleave(self.arch.image_tokens, 1), token_valid), 1)
            see = visible(valid, torch.zeros(x.shape[1], device=x.device)) if full_mask else valid[:, None]
            frame = language.frame(positions(valid), see, room)
        out, kv = language(x, frame, output=output)
        return replace(self.attach(kv, valid, out), image_tokens=image_tokens)

    def attach(self, kv: Sequence[KeyValue], valid: Tensor | None, output: Tensor | None = None) -> Prefix:
        """Prepare the suffix's positions and mask for these keys and values."""
        p, device = kv[0].k.shape[2], kv[0].k.device
        if valid is None:
            return Prefix(kv, valid, kept(self._suffix_frame, p, device), output)
        return Prefix(kv, valid, self._suffix_frame(p, device, valid, _lengths(kv, valid)), output)

    def _suffix_frame(
        self, p: int, device: torch.device, valid: Tensor | None = None, lengths: Tensor | None = None
    ) -> Frame:
        """Positions and mask behind p tokens; bool [B, p] and i64 [B] say which count, None: all, in any row."""
        starts = tuple(self.suffix_starts())
        s, first = len(starts), p if lengths is None else lengths[:, None]
        position = first + torch.arange(s, device=device)[None]
        see = None
        if valid is not None or not self.arch.pi05:  # π0.5's actions see everything that is valid
            everything = torch.ones(1, p, dtype=torch.bool, device=device) if valid is None else valid
            joint = torch.cat((everything, everything.new_ones(len(everything), s)), 1)
            see = visible(joint, _block_starts(p, starts, device), p)
        frame = self._parts.expert.frame(position, see)
        if not self.arch.pi05:  # the state's token does not see the actions
            frame = frame._replace(lead=self._parts.expert.lead(1, p + 1, None if valid is None else joint))
        return frame

    def repeat(self, prefix: Prefix, n: int) -> Prefix:
        """Every row n times in a row, to share one observation among several noisy actions."""
        if n == 1:
            return prefix
        kv = [KeyValue(kv.k.repeat_interleave(n, 0), kv.v.repeat_interleave(n, 0)) for kv in prefix.kv]
        return self.attach(kv, None if prefix.valid is None else prefix.valid.repeat_interleave(n, 0))

    def times(self, t: Tensor) -> Times:
        """What the expert reads of times f32 [N]."""
        return self.times_of(self.embed_times(t))

    def embed_times(self, t: Tensor) -> Tensor:
        """Times f32 [N] -> f32 [N, W]."""
        return time_embedding(t, self.arch.expert_width).float()

    def embed_schedule(self, num_steps: int, device: torch.device) -> Tensor:
        """The times of `num_steps` denoising steps, embedded: f32 [N, W]."""
        return self.embed_times(flow.step_weights("flow_ode", num_steps, 0.0, device).t)

    def times_of(self, embedding: Tensor) -> Times:
        """What the expert reads of embedded times f32 [N, W]."""
        if not self.arch.pi05:
            return Times(embedding, None)
        cond = self.time_condition(embedding)
        return Times(embedding, self._parts.expert.modulate(cond))

    def time_condition(self, embedding: Tensor) -> Tensor:
        """π0.5: time embeddings [N, W] -> the condition [N, W] of the adaptive norms."""
        return F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedding))))

    def embed_suffix(self, state: Tensor | None, x_t: Tensor, embedding: Tensor) -> Tensor:
        """Tokens [B, S, W] of noisy actions [B, H, D], with (π0) the state [B, D] and the time [B or 1, W]."""
        action = self.action_in_proj(x_t)
        if self.arch.pi05:
            return action
        assert state is not None
        both = torch.cat((action, embedding[:, None].expand_as(action)), -1)
        action = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))
        return torch.cat((self.state_proj(state)[:, None], action), 1)

    def noisy_tokens(self, state: Tensor | None, times: Times, rows: int) -> Callable[[Tensor, int], Tensor]:
        """`embed_suffix` of `rows` rows as a function of x_t and the step i, for all steps of a call; no gradients.

        What does not depend on x_t is computed here. In π0, two layers without anything between them become one:
        W [A x + a; t] + b = (W₁ A) x + (W₁ a + W₂ t + b), a product of D inner columns instead of 2 W. A call
        overwrites what the one before returned.
        """
        layers = [self.action_in_proj]
        if not self.arch.pi05:
            layers += [self.state_proj, self.action_time_mlp_in, self.action_time_mlp_out]
        if any(type(layer) is not nn.Linear for layer in layers):  # adapted
            return lambda x, i: self.embed_suffix(state, x, times.embedding[i : i + 1])
        into, width, linear = layers[0], self.arch.expert_width, fused.linear_of_few
        shape = (rows, len(self.suffix_starts()), width)
        tokens = torch.empty(shape, dtype=self._parts.expert.dtype, device=into.weight.device)
        actions = tokens[:, -self.arch.action_horizon :]

        def embed_actions(x: Tensor, i: int) -> Tensor:
            linear(x, into.weight, into.bias, out=actions)
            return tokens

        if self.arch.pi05:
            return embed_actions
        assert state is not None
        _, first, joint, last = layers
        linear(state[:, None], first.weight, first.bias, out=tokens[:, :1])
        weight = fused.product_of_few_columns(joint.weight[:, :width], into.weight)  # [W, D]
        still = torch.cat((into.bias.expand_as(times.embedding), times.embedding), -1)  # [N, 2 W]
        biases = linear(still[None], joint.weight, joint.bias)[0]  # [N, W]

        def embed_with_time(x: Tensor, i: int) -> Tensor:
            linear(linear(x, weight, biases[i], silu=True), last.weight, last.bias, out=actions)
            return tokens

        return embed_with_time

    def suffix_starts(self) -> list[int]:
        """Where blocks begin among the suffix tokens: the state alone (π0), then all actions together."""
        actions = [1] + [0] * (self.arch.action_horizon - 1)
        return actions if self.arch.pi05 else [1, *actions]

    def suffix(self, prefix: Prefix, state: Tensor | None, x_t: Tensor, times: Times) -> Tensor:
        """Expert features f32 [B, H, W] of noisy actions f32 [B, H, D] at a time per row; state f32 [B, D] for π0."""
        return self.features(prefix, self.embed_suffix(state, x_t, times.embedding), times).float()

    def features(self, prefix: Prefix, tokens: Tensor, times: Times) -> Tensor:
        """Expert features [B, H, W] of tokens [B, S, W] at a time per row, in the expert's dtype."""
        out, _ = self._parts.expert(tokens, prefix.frame, past=prefix.kv, modulation=times.modulation)
        return out[:, -self.arch.action_horizon :]

    def velocity(self, features: Tensor) -> Tensor:
        """Expert features [B, H, W] -> velocity f32 [B, H, D]."""
        return self.action_out_proj(features)

    def moved(self, x: Tensor, features: Tensor, way: float) -> Tensor:
        """x + way * velocity, f32 [B, H, D], of features in any dtype; no gradients."""
        layer = self.action_out_proj
        if type(layer) is nn.Linear:
            return fused.linear_of_few(features, layer.weight, layer.bias, onto=x, factor=way)
        return torch.add(x, self.velocity(features.float()), alpha=way)

    def apply_bf16_rule(self) -> None:
        """The published mixture: bf16, but patch and position embeddings, Gemma norms and projections in fp32."""
        self.paligemma_with_expert.to(torch.bfloat16)
        for name, module in self.paligemma_with_expert.named_modules():
            if name.endswith(
                ("embeddings", "input_layernorm", "post_attention_layernorm", "model.norm", "language_model.norm")
            ):
                module.float()
