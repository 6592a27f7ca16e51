"""Fixtures of the golden tests."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece


@pytest.fixture(scope="session")
def small_vocab_tokenizer(tmp_path_factory) -> Path:
    """A sentencepiece file with byte fallback that has fewer pieces than the 320 the tiny networks embed."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["press a handle down", "open the drawer and close the drawer"] * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=280,
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path
