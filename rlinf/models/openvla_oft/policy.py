"""OpenVLA-OFT: every token of a chunk from one bidirectional pass over empty slots.

Letters: B rows, C actions, A columns, M = C * A slots, P tokens before them, W width.
"""

from __future__ import annotations

import torch

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
        slots = self.slots(self.net.hidden(*self.with_slots(context), causal=False), context)
        return Readout(slots, slots[:, 0])

    def with_slots(self, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Embeddings, positions and validity of the whole sequence: the context, M empty slots and </s>, if any."""
        rows, _, width = context.x.shape
        tail = context.x.new_zeros(rows, self.cfg.num_tokens, width)
        if self.stop_token is not None:
            tail = torch.cat((tail, self.embed_token(self.stop_token, rows)), 1)
        return context.with_tail(tail)

    def slots(self, hidden: Tensor, context: Context) -> Tensor:
        """The states [B, M, W] that predict the tokens, of a whole sequence's hidden states."""
        first = context.x.shape[1] - 1
        return hidden[:, first : first + self.cfg.num_tokens]

    def embed_token(self, token: int, rows: int) -> Tensor:
        """The embedding of one id, [B, 1, W]."""
        ids = torch.full((rows, 1), token, device=self.processor.device)
        return self.net.embed_tokens(ids)
