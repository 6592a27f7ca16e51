"""Prompts, the bundled tokenizer and image resizing."""

from __future__ import annotations

import pytest
import sentencepiece
import torch
from openpi_cases import PROMPTS

from rlinf.models.openpi.architecture import SMALL_VOCAB
from rlinf.models.openpi.tokenizer import BUNDLED, load_tokenizer
from rlinf.models.openpi.transforms import clean_prompt, resize_with_pad, state_prompt


@pytest.fixture(scope="module")
def pieces():
    return sentencepiece.SentencePieceProcessor(model_file=str(BUNDLED))


def test_bundled_tokenizer(pieces):
    assert pieces.vocab_size() == SMALL_VOCAB
    assert (pieces.pad_id(), pieces.eos_id(), pieces.bos_id(), pieces.unk_id()) == (0, 1, 2, 3)
    assert BUNDLED.stat().st_size < 50_000
    for text in (*PROMPTS, "Ünïcode, 机器人 and 123 zebras", state_prompt("go", torch.zeros(4)), "\n"):
        ids = pieces.encode(text)
        assert pieces.unk_id() not in ids
        assert pieces.decode(ids) == text
    assert len(pieces.encode("Press a handle down sideways")) == 5  # benchmark words are single pieces
    assert len(pieces.encode("\n")) == 1


def test_prompt_rules():
    assert clean_prompt("  Pick_up the\nblock \n") == "Pick up the block"
    state = torch.tensor([-1.5, -1.0, 0.0, 0.999, 1.0, 3.0])
    assert state_prompt("go_left", state) == "Task: go left, State: -1 0 128 255 255 255;\nAction: "


def test_padding_and_cutting():
    tokenizer = load_tokenizer(BUNDLED, max_len=8, vocab_size=SMALL_VOCAB)
    tokens, valid = tokenizer(["push it", "Press a handle down sideways"])
    assert tokens.shape == valid.shape == (2, 8)
    assert (tokens[:, 0] == 2).all()
    assert valid.sum(1).tolist() == [int((row != 0).sum()) for row in tokens]
    assert not tokens[0][~valid[0]].any()
    with pytest.warns(UserWarning, match="prompt cut from"):
        _, valid = tokenizer(["take the red block and rotate it to the right"])
    assert valid.all()


def test_resize_keeps_what_needs_no_resize():
    image = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    assert resize_with_pad(image, 64) is image
    constant = torch.full((1, 30, 60, 3), 77, dtype=torch.uint8)
    out = resize_with_pad(constant, 64)
    assert out.shape == (1, 64, 64, 3)
    assert (out[0, 16:48] == 77).all()
    assert not out[0, :16].any()
    assert not out[0, 48:].any()
    checker = torch.zeros(1, 128, 128, 3, dtype=torch.uint8)
    checker[:, ::2, ::2] = 255
    inside = resize_with_pad(checker, 64)[0, 1:-1, 1:-1].unique().tolist()
    # Halving weighs 4 pixels (1, 3, 3, 1) / 8 along each axis; u8 after each pass: round(255 / 2) = 128, then 64.
    assert inside == [64]
