"""Prompts and the bundled tokenizer."""

from __future__ import annotations

import pytest
import sentencepiece
import torch
from openpi_cases import PROMPTS

from rlinf.models.files.tokenizers import BUNDLED
from rlinf.models.openpi.architecture import SMALL_VOCAB
from rlinf.models.openpi.prompts import clean_prompt, load_tokenizer, state_prompt


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
    prompts = tokenizer(["push it", "Press a handle down sideways"])
    tokens, valid = prompts.ids, prompts.valid
    assert (prompts.shortest, prompts.longest) == tuple(valid.sum(1).tolist())
    assert tokens.shape == valid.shape == (2, 8)
    assert (tokens[:, 0] == 2).all()
    assert valid.sum(1).tolist() == [int((row != 0).sum()) for row in tokens]
    assert not tokens[0][~valid[0]].any()
    with pytest.warns(UserWarning, match="prompt cut from"):
        prompts = tokenizer(["take the red block and rotate it to the right"])
    assert prompts.valid.all()


def test_a_batch_is_its_texts_one_at_a_time():
    tokenizer = load_tokenizer(BUNDLED, max_len=24, vocab_size=SMALL_VOCAB)
    texts = [PROMPTS[i] for i in (1, 0, 1, 1, 2, 0)]
    together = tokenizer(texts)
    alone = [tokenizer([text]) for text in texts]
    assert torch.equal(together.ids, torch.cat([p.ids for p in alone]))
    assert torch.equal(together.valid, torch.cat([p.valid for p in alone]))
    assert [len(set(map(tuple, together.ids[[i, j]].tolist()))) for i, j in ((0, 2), (1, 5), (0, 1))] == [1, 1, 2]
    states = torch.tensor([[0.0], [0.5], [-0.5], [0.5]])  # part of the prompt: rows of one text differ
    together = tokenizer(["go"] * 4, states)
    alone = [tokenizer(["go"], state[None]) for state in states]
    assert torch.equal(together.ids, torch.cat([p.ids for p in alone]))
    assert torch.equal(together.valid, torch.cat([p.valid for p in alone]))
    assert len(set(map(tuple, together.ids.tolist()))) == 3


def test_a_repeated_text_that_is_cut_is_said_once():
    tokenizer = load_tokenizer(BUNDLED, max_len=4, vocab_size=SMALL_VOCAB)
    with pytest.warns(UserWarning, match="prompt cut from") as said:
        tokenizer([PROMPTS[2]] * 3)
    assert len(said) == 1
