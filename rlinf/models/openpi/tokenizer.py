"""Prompts to token ids by sentencepiece."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from rlinf.models.files import tokenizers
from rlinf.models.files.tokenizers import BUNDLED, FILE
from rlinf.models.openpi.transforms import clean_prompt, state_prompt

__all__ = ["BUNDLED", "FILE", "PromptTokenizer", "find_tokenizer", "load_tokenizer"]

Tensor = torch.Tensor


class PromptTokenizer:
    """Instructions (and, for some π0.5, the state) to padded ids; `encode(text, bos)` does the real work."""

    def __init__(self, encode: Callable[[str, bool], list[int]], *, max_len: int) -> None:
        self.max_len = max_len
        self._encode = encode
        self._plain = lru_cache(maxsize=65536)(self._encode_plain)

    def __call__(self, texts: list[str], states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ids i32 [B, L] (0 pads on the right) and validity bool [B, L]; `states` [B, S] enter the prompt."""
        if states is None:
            texts, place = _distinct(texts)
            rows = [self._plain(text) for text in texts]
        else:
            rows = [self._encode(state_prompt(text, s), True) for text, s in zip(texts, states, strict=True)]
            place = list(range(len(rows)))
        tokens = torch.zeros(len(rows), self.max_len, dtype=torch.int32)
        valid = torch.zeros(len(rows), self.max_len, dtype=torch.bool)
        for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
            if len(row) > self.max_len:
                warnings.warn(f"prompt cut from {len(row)} to {self.max_len} tokens: {text!r}", stacklevel=2)
            n = min(len(row), self.max_len)
            tokens[i, :n] = torch.tensor(row[:n], dtype=torch.int32)
            valid[i, :n] = True
        return tokens[place], valid[place]

    def _encode_plain(self, text: str) -> list[int]:
        # The published prompt ends in a newline that is tokenised on its own.
        return self._encode(clean_prompt(text), True) + self._encode("\n", False)


def _distinct(texts: list[str]) -> tuple[list[str], list[int]]:
    """Each text once, and where each given one is among them: a batch repeats few sentences many times."""
    places: dict[str, int] = {}
    place = [places.setdefault(text, len(places)) for text in texts]
    return list(places), place


def load_tokenizer(path: Path, *, max_len: int, vocab_size: int) -> PromptTokenizer:
    """A sentencepiece model file as a tokenizer whose ids fit the embedding table."""
    pieces = tokenizers.load_pieces(path, vocab_size=vocab_size)
    return PromptTokenizer(lambda text, bos: pieces.encode(text, add_bos=bos), max_len=max_len)


def find_tokenizer(folder: Path | None, *, size: str) -> Path:
    """The checkpoint's own file, or the bundled one."""
    return tokenizers.find_tokenizer(folder, size=size, family="PaliGemma", names=(FILE, "paligemma_tokenizer.model"))
