"""Instructions to the token rows Prismatic reads: BOS, pads, prompt, empty token."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor

from rlinf.errors import UserError
from rlinf.models.files import tokenizers
from rlinf.models.files.tokenizers import BUNDLED, FILE

__all__ = ["BUNDLED", "FILE", "PromptTokenizer", "find_tokenizer", "load_tokenizer", "prompt_text"]

Tensor = torch.Tensor


def prompt_text(task: str) -> str:
    """The published question; its trailing space becomes the empty token."""
    return f"In: What action should the robot take to {task.lower()}?\nOut: "


class PromptTokenizer:
    """Instructions to padded ids. Its special ids are the file's own, so any sentencepiece model will do."""

    def __init__(self, pieces: SentencePieceProcessor, *, max_len: int) -> None:
        if max_len < 2:
            raise UserError(f"actor.model.max_prompt_length={max_len} must be at least 2: a prompt has two end tokens")
        self.max_len = max_len
        self.bos, self.eos = pieces.bos_id(), pieces.eos_id()
        self.pad = pieces.pad_id() if pieces.pad_id() >= 0 else pieces.vocab_size()  # Llama-2: one past its pieces
        self.empty = pieces.piece_to_id("▁")  # a file without that piece gives its unknown id: any fixed id serves
        self._pieces = pieces
        self._row = lru_cache(maxsize=65536)(self._encode)

    def __call__(self, tasks: list[str]) -> tuple[Tensor, Tensor]:
        """Ids i32 [B, L] = BOS, pads, prompt, empty token, and validity bool [B, L] (False on pads)."""
        ids = torch.full((len(tasks), self.max_len), self.pad, dtype=torch.int32)
        valid = torch.zeros(len(tasks), self.max_len, dtype=torch.bool)
        ids[:, 0], valid[:, 0] = self.bos, True
        for i, task in enumerate(tasks):
            row = self._row(task)
            if len(row) >= self.max_len:
                warnings.warn(f"prompt cut from {len(row) + 1} to {self.max_len} tokens: {task!r}", stacklevel=2)
                row = (*row[: self.max_len - 2], self.empty)
            ids[i, self.max_len - len(row) :] = torch.tensor(row, dtype=torch.int32)
            valid[i, self.max_len - len(row) :] = True
        return ids, valid

    def _encode(self, task: str) -> tuple[int, ...]:
        """Without BOS, with exactly what the network was trained to answer after: the empty token."""
        row = tuple(self._pieces.encode(prompt_text(task)))
        return row if row[-1] == self.empty else (*row, self.empty)


def load_tokenizer(path: Path, *, max_len: int, vocab_size: int) -> PromptTokenizer:
    """A sentencepiece file as a prompt tokenizer for an embedding table of `vocab_size` rows."""
    pieces = tokenizers.load_pieces(path, vocab_size=vocab_size)
    for name, id_ in (("<s>", pieces.bos_id()), ("</s>", pieces.eos_id())):
        if id_ < 0:
            raise UserError(f"{path} has no {name} token; Prismatic prompts need one")
    tokenizer = PromptTokenizer(pieces, max_len=max_len)
    if tokenizer.pad >= vocab_size:
        raise UserError(f"{path} has {tokenizer.pad} pieces and no pad, the model embeds {vocab_size}: no id is left")
    return tokenizer


def find_tokenizer(folder: Path | None, *, size: str) -> Path:
    """The checkpoint's own file, or the bundled one."""
    return tokenizers.find_tokenizer(folder, size=size, family="Llama-2")
