"""Sentencepiece model files: where a checkpoint keeps its own, the bundled one, and reading them."""

from __future__ import annotations

from pathlib import Path

import sentencepiece

from rlinf.errors import UserError

FILE = "tokenizer.model"  # its name in a checkpoint folder
BUNDLED = Path(__file__).with_name("tokenizer_compact.model")


def find_tokenizer(folder: Path | None, *, size: str, model: str, names: tuple[str, ...] = (FILE,)) -> Path:
    """The checkpoint's own file; the small sizes and random weights fall back to the bundled one.

    `model` is the language model whose file a checkpoint without one lacks, as Llama-2.
    """
    if folder is None:
        return BUNDLED
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is not None:
        return found
    if (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder} has tokenizer.json but no {FILE}; copy {model}'s sentencepiece file {FILE} there, "
            "which tokenizer.json was converted from"
        )
    if size == "base":
        raise UserError(f"{folder} has no {FILE}; copy {model}'s sentencepiece model there")
    return BUNDLED


def load_pieces(path: Path, *, vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """A sentencepiece model whose ids fit an embedding table of `vocab_size` rows."""
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path} is not a sentencepiece model; copy it again") from error
    if pieces.vocab_size() > vocab_size:
        raise UserError(f"{path} has {pieces.vocab_size()} pieces, the model embeds {vocab_size}: wrong tokenizer file")
    return pieces
