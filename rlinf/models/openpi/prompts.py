"""The prompts of π: their text, with or without the robot state in it, and their token ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from rlinf.models.files.tokenizers import load_pieces
from rlinf.models.inputs import Prompts, cut_prompt

Tensor = torch.Tensor


def clean_prompt(text: str) -> str:
    """The instruction as the tokenizer reads it; its case is kept."""
    return text.strip().replace("_", " ").replace("\n", " ")


def state_prompt(text: str, state: Tensor) -> str:
    """π0.5 prompt with the normalised state f32 [S] written as bins 0-255 (-1 below the range)."""
    edges = torch.linspace(-1.0, 1.0, 257, dtype=torch.float64)[:-1]
    bins = torch.bucketize(state.double().cpu(), edges, right=True) - 1
    return f"Task: {clean_prompt(text)}, State: {' '.join(map(str, bins.tolist()))};\nAction: "


class PromptTokenizer:
    """Instructions (and, for some π0.5, the state) to padded ids; `encode(text, bos)` calls sentencepiece."""

    def __init__(self, encode: Callable[[str, bool], list[int]], *, max_len: int) -> None:
        self.max_len = max_len
        self._encode = encode
        self._row = lru_cache(maxsize=65536)(self._plain_row)
        self._batch = lru_cache(maxsize=64)(self._plain_batch)  # an episode's calls repeat their instructions

    def __call__(self, texts: list[str], states: Tensor | None = None) -> Prompts:
        """Prompts of `max_len` slots, 0 on pads; normalised `states` [B, S] enter the prompt.

        They lie on the host, and are not to be written into.
        """
        if states is None:
            return self._batch(tuple(texts))
        pairs = zip(texts, states.cpu(), strict=True)  # one wait for a GPU, not one for each row
        encoded = (self._encode(state_prompt(text, state), True) for text, state in pairs)
        return self._padded([cut_prompt(row, self.max_len, text) for row, text in zip(encoded, texts, strict=True)])

    def _padded(self, rows: list[tuple[int, ...]]) -> Prompts:
        return Prompts.padded(rows, self.max_len, pad=0, pads_last=True)

    def _plain_batch(self, texts: tuple[str, ...]) -> Prompts:
        return self._padded([self._row(text) for text in texts])

    def _plain_row(self, text: str) -> tuple[int, ...]:
        # The published prompt ends in a newline that is tokenised on its own.
        return cut_prompt(self._encode(clean_prompt(text), True) + self._encode("\n", False), self.max_len, text)


def load_tokenizer(path: Path, *, max_len: int, vocab_size: int) -> PromptTokenizer:
    """A sentencepiece model file as a tokenizer whose ids fit the embedding table."""
    pieces = load_pieces(path, vocab_size=vocab_size)
    return PromptTokenizer(lambda text, bos: pieces.encode(text, add_bos=bos), max_len=max_len)
