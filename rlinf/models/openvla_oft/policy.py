"""OpenVLA-OFT: every token of a chunk from one bidirectional pass over empty slots.

Letters: B rows, C actions, A columns, M = C * A slots, P tokens before them, L prompt slots, W width.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from rlinf.models.openvla_oft.config import Config
from rlinf.models.prismatic.policy import PrismaticPolicy, Readout
from rlinf.models.prismatic.sequence import Context

Tensor = torch.Tensor


class Policy(PrismaticPolicy):
    """Slots are zero embeddings, known by their positions alone; each is read one position early."""

    cfg: Config

    def act(self, given: dict[str, Tensor], *, temperature: float, train: bool) -> dict[str, Tensor]:
        """See PrismaticPolicy.act."""
        context = self.context(given["images"], given["ids"], given.get("valid"), given.get("state"))
        read = self.read(context, None)
        if self.cfg.regression is not None:
            return {"actions": self.net.regress(read.slots)}
        bins, logprobs = self.choose(read.slots, given.get("uniforms"), temperature=temperature)
        out = {"bins": bins.to(torch.uint8), "logprobs": logprobs}
        values = self.critic(read.value) if train else None
        return out if values is None else out | {"values": values}

    def read(self, context: Context, bins: Tensor | None) -> Readout:
        """The last prompt token and all slots but the last predict the tokens; bins are never an input."""
        rows, length, width = context.x.shape
        tail = context.x.new_zeros(rows, self.cfg.num_tokens, width)
        if self.stop_token is not None:
            tail = torch.cat((tail, self._token(self.stop_token, rows)), 1)
        x, positions, valid = context.with_tail(tail)
        if self._values_a_later_slot:
            x, positions, valid = self._with_pad(x, positions, valid)
        hidden = self.net.hidden(x, positions, valid, causal=False)
        slots = hidden[:, length - 1 : length - 1 + self.cfg.num_tokens]
        value = self._published_value(hidden, positions, length) if self._values_a_later_slot else slots[:, 0]
        return Readout(slots, value)

    # ------------------------------------------------------------------ compat: the published value slot of `official`
    @property
    def _values_a_later_slot(self) -> bool:
        return self.cfg.upstream_sampling and self.cfg.has_stop_token and self.cfg.has_critic

    def _with_pad(self, x: Tensor, positions: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence with one pad behind it, where the published layout has all of them; nobody sees it."""
        x = torch.cat((x, self._token(self.processor.tokenizer.pad, len(x))), 1)
        valid = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid
        at = torch.full_like(positions[:, :1], self._published_length)
        return x, torch.cat((positions, at), 1), F.pad(valid, (0, 1), value=False)

    def _published_value(self, hidden: Tensor, positions: Tensor, length: int) -> Tensor:
        """The state M + 1 from the end of a sequence padded to the longest prompt: a slot, </s> or a pad."""
        used = positions[:, length - 1] + 1
        index = (length + self._published_length - used).clamp(max=hidden.shape[1] - 1)
        return hidden[torch.arange(len(hidden), device=hidden.device), index]

    @property
    def _published_length(self) -> int:
        """Tokens before the slots of a prompt without pads."""
        images = self.cfg.num_images_in_input * self.arch.image_tokens
        return images + (self.cfg.state_columns > 0) + self.cfg.prompt_slots

    def _token(self, token: int, rows: int) -> Tensor:
        """The embedding of one id, [B, 1, W]."""
        ids = torch.full((rows, 1), token, device=self.processor.device)
        return self.net.embed_tokens(ids)
