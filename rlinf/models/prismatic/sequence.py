"""What the network reads before the actions: BOS, images, state, pads, prompt.

Pads sit between the images and the prompt, so that every row's prompt ends in the same column and its action slots
follow at once; positions count valid tokens only, which makes any other placing of pads give the same numbers.
Letters: B rows, n cameras, L prompt slots, P tokens of the context, W width, M tokens of a tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from rlinf.models.prismatic.model import PrismaticNet

Tensor = torch.Tensor


@dataclass(frozen=True)
class Context:
    """The embedded sequence up to the last prompt token."""

    x: Tensor  # [B, P, W]
    valid: Tensor | None  # bool [B, P]; None when every token counts
    num_image_tokens: int  # of all cameras; they follow the first token

    @property
    def mean_image_token(self) -> Tensor:
        """f32 [B, W]."""
        return self.x[:, 1 : 1 + self.num_image_tokens].float().mean(1)

    def positions(self, more: int = 0) -> Tensor:
        """i64 [B, P + more]: how many valid tokens come before each; pads, which are masked, repeat a position."""
        rows, length = self.x.shape[0], self.x.shape[1] + more
        if self.valid is None:
            return torch.arange(length, device=self.x.device).expand(rows, -1)
        return F.pad(self.valid, (0, more), value=True).cumsum(1) - 1

    def with_tail(self, tail: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Embeddings, positions and validity of the context followed by a tail [B, M, W] that counts everywhere."""
        more = tail.shape[1]
        valid = None if self.valid is None else F.pad(self.valid, (0, more), value=True)
        return torch.cat((self.x, tail), 1), self.positions(more), valid


def make_context(
    net: PrismaticNet, images: Tensor, ids: Tensor, valid: Tensor | None, state: Tensor | None, *, stop: int | None
) -> Context:
    """Images u8 [B, n, S, S, 3] (or normalised f32 [B, n, 6, S, S]), prompt [B, L] and state [B, p], embedded.

    FiLM conditions on the mean embedding of all language tokens, with the id `stop` where the tail will end in it.
    """
    tokens = net.embed_tokens(ids)
    patches = net.embed_images(images, _mean_language(net, tokens, valid, stop) if net.parts.film else None)
    between = [patches] if state is None else [patches, net.embed_proprio(state)]
    x = torch.cat((tokens[:, :1], *between, tokens[:, 1:]), 1)
    if valid is None:
        return Context(x, None, patches.shape[1])
    extra = x.shape[1] - ids.shape[1]
    return Context(x, torch.cat((valid[:, :1].expand(-1, 1 + extra), valid[:, 1:]), 1), patches.shape[1])


def _mean_language(net: PrismaticNet, tokens: Tensor, valid: Tensor | None, stop: int | None) -> Tensor:
    """[B, W] over the tokens that count."""
    count = tokens.shape[1] if valid is None else valid.sum(1, keepdim=True)
    total = (tokens if valid is None else tokens * valid[..., None]).sum(1)
    if stop is not None:
        total = total + net.embed_tokens(torch.full((1,), stop, device=tokens.device))
        count = count + 1
    return total / count
