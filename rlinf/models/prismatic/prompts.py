"""The prompts of OpenVLA and OpenVLA-OFT: their text, and token rows of BOS, pads, prompt, empty token."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from rlinf.errors import UserError
from rlinf.models.files.tokenizers import load_pieces
from rlinf.models.inputs import Prompts, cut_prompt


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

    def __call__(self, tasks: list[str]) -> Prompts:
        """Prompts of `max_len` slots: BOS, pads, prompt, empty token."""
        return Prompts.padded([self._row(task) for task in tasks], self.max_len, pad=self.pad, pads_last=False)

    def _encode(self, task: str) -> tuple[int, ...]:
        """BOS and the prompt, with exactly what the network was trained to answer after: the empty token."""
        row = [self.bos, *self._pieces.encode(prompt_text(task))]
        if row[-1] != self.empty:
            row.append(self.empty)
        return cut_prompt(row, self.max_len, task, keep_last=True)


def load_tokenizer(path: Path, *, max_len: int, vocab_size: int) -> PromptTokenizer:
    """A sentencepiece file as a prompt tokenizer for an embedding table of `vocab_size` rows."""
    pieces = load_pieces(path, vocab_size=vocab_size)
    for name, id_ in (("<s>", pieces.bos_id()), ("</s>", pieces.eos_id())):
        if id_ < 0:
            raise UserError(f"{path} has no {name} token; Prismatic prompts need one")
    tokenizer = PromptTokenizer(pieces, max_len=max_len)
    if tokenizer.pad >= vocab_size:
        raise UserError(f"{path} has {tokenizer.pad} pieces and no pad, the model embeds {vocab_size}: no id is left")
    return tokenizer
