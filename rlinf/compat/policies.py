"""Policies that compute what RLinf 0.4 computed where that differs from what it meant (`compat: rlinf-0.4`).

Each class adds published defects to one of the clean policies; docs/compat.md lists them. Weights and actions are the
same: only values, and the log-probs of updates with top-k, differ.

Letters: B rows, n cameras, N denoising steps, M action tokens, P tokens before them, V vocabulary, W width.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from rlinf.models.openpi import prefix_cache
from rlinf.models.openpi.config import ALL_CAMERAS
from rlinf.models.openpi.model import Prefix
from rlinf.models.openpi.policy import Policy as OpenPi
from rlinf.models.openvla.policy import Policy as OpenVla
from rlinf.models.openvla_oft.policy import Policy as OpenVlaOft
from rlinf.models.policy import Policy, find_policy
from rlinf.models.prismatic.policy import PrismaticPolicy, Readout
from rlinf.models.prismatic.sequence import Context

Tensor = torch.Tensor


class PublishedOpenPi(OpenPi):
    """The rollout's value is averaged over all denoising steps; pooled values also read padding.

    The prefix is therefore computed in full: absent cameras as black images, and every prompt slot, masked.
    """

    def prefix(self, images: Tensor, tokens: Tensor, valid: Tensor | None, *, output: bool | None = None) -> Prefix:
        """See OpenPi.prefix: three cameras and every prompt slot."""
        slots = (0, self.arch.max_token_len - tokens.shape[1])
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        tokens, valid = F.pad(tokens, slots), F.pad(valid, slots)
        images = F.pad(images, (0, 0) * (images.dim() - 2) + (0, ALL_CAMERAS - images.shape[1]))
        output = self.cfg.value_input == "vlm" if output is None else output
        cameras = self._image_valid(len(images))
        return self.net.prefix(images, tokens, valid, image_valid=cameras, output=output, full_mask=True)

    def pool(self, prefix: Prefix) -> Tensor | None:
        """See OpenPi.pool: the mean includes padded prompt slots, the last token may be a pad."""
        if prefix.output is None or self.cfg.openpi.value_vlm_mode == "first_token":
            return super().pool(prefix)
        out = prefix.output.float()
        if self.cfg.openpi.value_vlm_mode == "last_token":
            return out[:, -1]
        images = self.arch.image_tokens * self.cfg.num_cameras
        return torch.cat((out[:, :images], out[:, -self.arch.max_token_len :]), 1).mean(1)

    def prefix_length(self) -> int:
        """See OpenPi.prefix_length."""
        return ALL_CAMERAS * self.arch.image_tokens + self.arch.max_token_len

    def cached_prefix(self, cache: dict[str, Tensor], valid: Tensor | None) -> tuple[Prefix, Tensor | None]:
        """See OpenPi.cached_prefix."""
        return prefix_cache.restore(self.net, cache, valid, image_valid=self._image_valid(len(cache["k"])))

    @property
    def averages_values(self) -> bool:
        """Always, while `evaluate` reads one step alone where one is scored."""
        return True

    def _image_valid(self, rows: int) -> Tensor:
        """Which cameras exist, bool [B, 3]."""
        return (torch.arange(ALL_CAMERAS, device=self.processor.device) < self.cfg.num_cameras).expand(rows, -1)


class PublishedTopK(PrismaticPolicy):
    """Updates rank the whole vocabulary for top-k, rollouts the 256 bins alone."""

    def score(self, slots: Tensor, bins: Tensor) -> Tensor:
        """See PrismaticPolicy.score; a bin drawn in the rollout may be impossible here, with a log-prob of -inf."""
        top_k = self.cfg.top_k
        if top_k <= 0:
            return super().score(slots, bins)
        vocabulary = self.net.language_model.lm_head(slots).float()  # [B, M, V]
        lowest = vocabulary.topk(min(top_k, vocabulary.shape[-1]), -1).values[..., -1:]
        logits = self.net.action_logits(slots)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
        return (logits / self.cfg.temperature_train).log_softmax(-1)


class PublishedOpenVla(PublishedTopK, OpenVla):
    """OpenVLA with the published top-k."""


class PublishedOpenVlaOft(PublishedTopK, OpenVlaOft):
    """OpenVLA-OFT with the published top-k; the critic of `implement_version: official` reads a later slot.

    It counts from the end of the sequence padded to the longest prompt, which is a slot, </s> or a pad.
    """

    def read(self, context: Context, bins: Tensor | None) -> Readout:
        """See OpenVlaOft.read."""
        if not (self.cfg.has_stop_token and self.cfg.has_critic):
            return super().read(context, bins)
        x, positions, valid = self.with_slots(context)
        # One pad behind the sequence, where the published layout has all of them; it is masked.
        x = torch.cat((x, self.embed_token(self.processor.tokenizer.pad, len(x))), 1)
        valid = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid
        longest = self.cfg.num_images_in_input * self.arch.image_tokens
        longest += (self.cfg.state_columns > 0) + self.cfg.prompt_slots  # tokens before the slots, without pads
        at = torch.cat((positions, torch.full_like(positions[:, :1], longest)), 1)
        hidden = self.net.hidden(x, at, F.pad(valid, (0, 1), value=False), causal=False)
        length = context.x.shape[1]
        used = positions[:, length - 1] + 1
        index = (length + longest - used).clamp(max=hidden.shape[1] - 1)
        value = hidden[torch.arange(len(hidden), device=hidden.device), index]
        return Readout(self.slots(hidden, context), value)


_PUBLISHED: dict[type[Policy], type[Policy]] = {
    OpenPi: PublishedOpenPi,
    OpenVla: PublishedOpenVla,
    OpenVlaOft: PublishedOpenVlaOft,
}


def policy_class(model_type: str, compat: str | None) -> type[Policy]:
    """The `Policy` of a model or, where a config sets `compat`, its published variant; other models have none."""
    clean = find_policy(model_type)
    return clean if compat is None else _PUBLISHED.get(clean, clean)
