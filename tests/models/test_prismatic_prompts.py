"""Prismatic prompts: the published text, the row layout and the tokenizer files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
import torch

from rlinf.errors import UserError
from rlinf.models.files.tokenizers import BUNDLED, find_tokenizer
from rlinf.models.prismatic.prompts import PromptTokenizer, load_tokenizer, prompt_text

TASKS = ["Put the CARROT on the plate", "go", "Turn on the stove and put the moka pot on it"]


def train(path: Path, **changes) -> Path:
    """A small file with Llama-2's conventions: unknown 0, BOS 1, EOS 2, no pad, byte fallback, spaces kept."""
    options = {
        "model_type": "bpe",
        "vocab_size": 340,
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": -1,
        "minloglevel": 2,
    }
    model = io.BytesIO()
    sentences = [prompt_text(task) for task in TASKS] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **(options | changes)
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("llama") / "tokenizer.model")


def test_text():
    want = "In: What action should the robot take to put the carrot on the plate?\nOut: "
    assert prompt_text(TASKS[0]) == want


@pytest.mark.parametrize("max_len", [50, 60])
def test_rows(llama_like, max_len):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(llama_like))
    tokenizer = load_tokenizer(llama_like, max_len=max_len, vocab_size=400)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, pieces.vocab_size())
    prompts = tokenizer(TASKS)
    ids, valid = prompts.ids, prompts.valid
    assert (prompts.shortest, prompts.longest) == (valid.sum(1).min(), valid.sum(1).max())
    assert (ids.dtype, valid.dtype) == (torch.int32, torch.bool)
    assert ids.shape == valid.shape == (3, max_len)
    lengths = set()
    for task, row, real in zip(TASKS, ids.tolist(), valid, strict=True):
        prompt = pieces.encode(prompt_text(task))
        assert prompt[-1] == tokenizer.empty == pieces.piece_to_id("▁")
        pads = max_len - 1 - len(prompt)
        assert row == [1] + [tokenizer.pad] * pads + prompt
        assert real.tolist() == [True] + [False] * pads + [True] * len(prompt)
        lengths.add(len(prompt))
    assert len(lengths) == 3


def test_the_empty_token_is_there_even_if_the_file_drops_spaces(tmp_path):
    path = train(tmp_path / "tokenizer.model", remove_extra_whitespaces=True)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(path, max_len=60, vocab_size=400)
    plain = pieces.encode(prompt_text("go"))
    assert plain[-1] != tokenizer.empty
    prompts = tokenizer(["go"])
    assert prompts.ids[0][prompts.valid[0]].tolist() == [1, *plain, tokenizer.empty]


def test_the_bundled_file():
    tokenizer = load_tokenizer(BUNDLED, max_len=48, vocab_size=1000)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(BUNDLED))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (2, 1, 0)
    assert pieces.id_to_piece(tokenizer.empty) == "▁"
    prompts = tokenizer(TASKS)
    ids, valid = prompts.ids, prompts.valid
    assert (ids[:, 0] == 2).all()
    assert (ids[:, -1] == tokenizer.empty).all()
    assert pieces.decode(ids[0][valid[0]].tolist()[1:]) == prompt_text(TASKS[0])


def test_long_prompts_are_cut_before_the_empty_token(llama_like):
    longest = load_tokenizer(llama_like, max_len=200, vocab_size=400)(TASKS[2:]).longest
    tokenizer = load_tokenizer(llama_like, max_len=longest, vocab_size=400)
    whole = tokenizer(TASKS[2:])  # fits exactly: no warning (warnings would be visible in the report)
    assert whole.valid.all()
    short = load_tokenizer(llama_like, max_len=longest - 3, vocab_size=400)
    with pytest.warns(UserWarning, match=f"prompt cut from {longest} to {longest - 3} tokens: 'Turn on the stove"):
        cut = short(TASKS[2:])
    assert cut.valid.all()
    assert cut.ids[0].tolist() == [*whole.ids[0, : longest - 4].tolist(), tokenizer.empty]


def test_tokenisation_is_remembered(llama_like):
    calls = []
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(llama_like))
    tokenizer = PromptTokenizer(pieces, max_len=60)
    encode = pieces.encode
    pieces.encode = lambda text: calls.append(text) or encode(text)  # type: ignore[method-assign]
    first, again = tokenizer(TASKS * 5).ids, tokenizer(TASKS * 5).ids
    assert len(calls) == 3
    assert torch.equal(first, again)


def test_which_file(tmp_path, llama_like):
    assert find_tokenizer(None, size="base", model="Llama-2") == BUNDLED
    assert find_tokenizer(tmp_path, size="compact", model="Llama-2") == BUNDLED
    with pytest.raises(UserError, match=r"has no tokenizer.model; copy Llama-2's sentencepiece model there"):
        find_tokenizer(tmp_path, size="base", model="Llama-2")
    (tmp_path / "tokenizer.json").write_text("{}")
    for size in ("base", "compact"):
        with pytest.raises(UserError, match=r"tokenizer.json but no tokenizer.model; copy Llama-2's sentencepiece"):
            find_tokenizer(tmp_path, size=size, model="Llama-2")
    (tmp_path / "tokenizer.model").write_bytes(llama_like.read_bytes())
    assert find_tokenizer(tmp_path, size="base", model="Llama-2") == tmp_path / "tokenizer.model"


def test_refusals(tmp_path, llama_like):
    with pytest.raises(UserError, match=r"has \d+ pieces, the model embeds 300: wrong tokenizer file"):
        load_tokenizer(llama_like, max_len=30, vocab_size=300)
    rows = sentencepiece.SentencePieceProcessor(model_file=str(llama_like)).vocab_size()
    with pytest.raises(UserError, match=rf"has {rows} pieces and no pad, the model embeds {rows}: no id is left"):
        load_tokenizer(llama_like, max_len=30, vocab_size=rows)
    with pytest.raises(UserError, match="max_prompt_length=1 must be at least 2"):
        load_tokenizer(llama_like, max_len=1, vocab_size=400)
    (tmp_path / "tokenizer.model").write_bytes(llama_like.read_bytes()[:100])
    with pytest.raises(UserError, match="is not a sentencepiece model; copy it again"):
        load_tokenizer(tmp_path / "tokenizer.model", max_len=30, vocab_size=400)
    path = train(tmp_path / "no_bos.model", bos_id=-1)
    with pytest.raises(UserError, match="has no <s> token"):
        load_tokenizer(path, max_len=30, vocab_size=400)
