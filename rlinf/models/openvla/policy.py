"""OpenVLA: action tokens decoded one after another on a key-value cache, scored in one teacher-forced pass.

Letters: B rows, M action tokens, P tokens before them, W width.
"""

from __future__ import annotations

import torch

from rlinf.models.prismatic.policy import PrismaticPolicy, Readout
from rlinf.models.prismatic.sequence import Context

Tensor = torch.Tensor


class Policy(PrismaticPolicy):
    """Causal attention; the critic reads the last prompt token, before any action."""

    def act(self, given: dict[str, Tensor], *, temperature: float, train: bool) -> dict[str, Tensor]:
        """See PrismaticPolicy.act."""
        context = self.context(given["images"], given["ids"], given.get("valid"), given.get("state"))
        (rows, length, _), num_tokens = context.x.shape, self.cfg.num_tokens
        cache = self.net.new_cache(rows, length + num_tokens - 1)
        hidden = self.net.hidden(context.x, context.positions(), context.valid, causal=True, cache=cache)[:, -1]
        values = self.critic(hidden) if train else None
        uniforms, positions = given.get("uniforms"), context.positions(num_tokens)[:, length:]
        chosen = []
        for i in range(num_tokens):
            uniform = None if uniforms is None else uniforms[:, i]
            chosen.append(self.choose(hidden, uniform, temperature=temperature))
            if i + 1 < num_tokens:
                token = chosen[-1][0] + self.arch.action_begin
                hidden = self.net.decode(token, positions[:, i], cache, length + i)
        bins, logprobs = (torch.stack(x, 1) for x in zip(*chosen, strict=True))
        out = {"bins": bins.to(torch.uint8), "logprobs": logprobs}
        return out if values is None else out | {"values": values}

    def read(self, context: Context, bins: Tensor | None) -> Readout:
        """One causal pass over the prompt and all tokens but the last, which nothing reads."""
        length = context.x.shape[1]
        if bins is None:
            hidden = self.net.hidden(context.x, context.positions(), context.valid, causal=True)
        else:
            tail = self.net.embed_tokens(bins[:, :-1] + self.arch.action_begin)
            hidden = self.net.hidden(*context.with_tail(tail), causal=True)
        return Readout(slots=hidden[:, length - 1 :], value=hidden[:, length - 1])
