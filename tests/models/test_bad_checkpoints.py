"""Damaged and foreign checkpoints: each is refused in a sentence that names file and tensor, and changes nothing."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openpi_cases import CPU, build, config
from safetensors.torch import load_file, save_file

from rlinf.errors import UserError
from rlinf.models.files.weights import save_weights
from rlinf.models.openpi.policy import Policy
from rlinf.models.openvla.config import Config as OpenVlaConfig
from rlinf.models.openvla_oft.config import Config as OftConfig
from rlinf.models.policy import find_policy
from tests.weights import load_weights

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.body = torch.nn.Linear(4, 3)
        self.value_head = torch.nn.Linear(3, 1)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


def make(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.steps += seed
    return net


def tied(name: str) -> str:
    return "embed.weight" if name == "lm_head.weight" else name


def load(net: torch.nn.Module, source: Path) -> None:
    load_weights(net, source, rename=tied, optional=("value_head.",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint in two shards."""
    save_weights(make(1).state_dict(), tmp_path, max_shard_bytes=120)
    assert sorted(p.name for p in tmp_path.iterdir()) == [*SHARDS, INDEX]
    return tmp_path


def test_the_good_one_loads(folder: Path):
    net = make(0)
    load(net, folder)
    assert all(torch.equal(t, net.state_dict()[n]) for n, t in make(1).state_dict().items())


def edit(number: int, change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    """A change to the tensors of a shard; what is new is entered in the index."""

    def spoil(folder: Path) -> None:
        file = folder / SHARDS[number]
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(number: int, keep: float) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / SHARDS[number]
        os.truncate(file, int(keep * file.stat().st_size))

    return spoil


def forget(folder: Path) -> None:
    """The index still names a tensor that its shard has lost."""
    tensors = load_file(folder / SHARDS[1])
    tensors.pop("body.bias")
    save_file(tensors, folder / SHARDS[1])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 42\n"
BAD_HEADER = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}).encode()
OVERLAP = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}).encode()


def _safetensors(entry: dict) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


DAMAGED = "cannot be read as safetensors"
CASES = {
    "missing shard": (
        lambda f: (f / SHARDS[1]).unlink(),
        f"lacks {SHARDS[1]}, named in {INDEX}",
    ),
    "truncated": (cut(1, 0.97), rf"{SHARDS[1]} {DAMAGED} \(.*file not fully covered; \d+ bytes\): .*cut off"),
    "truncated header": (cut(1, 0.1), rf"{SHARDS[1]} {DAMAGED} \(invalid header length; \d+ bytes\): .*cut off"),
    "empty": (cut(0, 0.0), f"{SHARDS[0]} is empty"),
    "wrong shape": (
        edit(1, lambda t: t.update({"body.bias": torch.zeros(4)})),
        rf"{SHARDS[1]}: body.bias has shape \[4\], the model expects \[3\]",
    ),
    "foreign key": (edit(1, lambda t: t.update(nose=torch.zeros(1))), "holds 1 tensors this model does not have: nose"),
    "missing key": (lambda f: (forget(f), (f / INDEX).unlink(), _join(f)), "lacks 1 tensors of this model: body.bias"),
    "shard lacks a tensor": (forget, f"{SHARDS[1]} lacks body.bias, which {INDEX} says it holds"),
    "stored twice": (
        edit(1, lambda t: t.update({"embed.weight": torch.zeros(6, 4)})),
        f"embed.weight is stored twice: in .*{SHARDS[0]} and in .*{SHARDS[1]}",
    ),
    "integers": (
        edit(1, lambda t: t.update({"body.bias": torch.zeros(3, dtype=torch.int8)})),
        "body.bias is stored as I8, the model expects torch.float32",
    ),
    "float8": (
        edit(1, lambda t: t.update({"body.bias": torch.zeros(3, dtype=torch.float8_e4m3fn)})),
        "body.bias is stored as F8_E4M3, the model expects torch.float32",
    ),
    "floats for integers": (
        edit(0, lambda t: t.update(steps=torch.zeros(2))),
        "steps is stored as F32, the model expects torch.int64",
    ),
    "half a head": (
        lambda f: (edit(1, lambda t: t.pop("value_head.bias"))(f), _unlist(f, "value_head.bias")),
        r"holds only a part of value_head\.\*: value_head.bias are missing",
    ),
    "untied embeddings": (
        edit(1, lambda t: t.update({"lm_head.weight": torch.zeros(6, 4)})),
        "embed.weight and lm_head.weight are one tensor in this model, but their values differ",
    ),
    "LFS pointer": (
        write(SHARDS[0], POINTER),
        f"{SHARDS[0]} is a Git LFS pointer, .*git lfs pull",
    ),
    "web page": (write(SHARDS[0], b"<!DOCTYPE html><html>"), f"{SHARDS[0]} is a web page; the download failed"),
    "not safetensors": (
        write(SHARDS[0], b"\x08" + bytes(7) + b"nonsense"),
        rf"{SHARDS[0]} {DAMAGED} \(invalid JSON in header",
    ),
    "list for a header": (
        write(SHARDS[0], b"\x02" + bytes(7) + b"[]"),
        rf"{SHARDS[0]} {DAMAGED} \(invalid JSON in header",
    ),
    "wrong offsets": (
        write(SHARDS[0], len(BAD_HEADER).to_bytes(8, "little") + BAD_HEADER + bytes(4)),
        rf"{SHARDS[0]} {DAMAGED} \(invalid shape, data type, or offset for tensor",
    ),
    "overlapping tensors": (
        write(SHARDS[0], len(OVERLAP).to_bytes(8, "little") + OVERLAP + bytes(8)),
        rf"{SHARDS[0]} {DAMAGED} \(invalid offset for tensor `[ab]`",
    ),
    **{
        f"header {entry}": (write(SHARDS[0], _safetensors(entry)), rf"{SHARDS[0]} {DAMAGED} \(invalid JSON in header")
        for entry in ({"data_offsets": [0]}, {"data_offsets": ["a", "b"]}, {"dtype": ["F32"]}, {"shape": ["x"]})
    },
    "index with numbers": (write(INDEX, b'{"weight_map": {"a": 3}}'), f"{INDEX} .* must name a file per tensor"),
    "index with a list": (write(INDEX, b'{"weight_map": []}'), f"{INDEX} .* must name a file per tensor"),
    "index not JSON": (write(INDEX, b"{"), f"{INDEX} is not valid JSON"),
    "index without a map": (write(INDEX, b"{}"), f"{INDEX} cannot be read as an index of shards"),
    "adapters without LoRA": (
        edit(1, lambda t: t.update({"body.lora_A.default.weight": torch.zeros(2, 4)})),
        "does not have: body.lora_A.default.weight; for its LoRA adapters set actor.model.is_lora=True",
    ),
    "no weights": (lambda f: [p.unlink() for p in f.iterdir()], "holds no weights: expected model.safetensors"),
}


def _join(folder: Path) -> None:
    """Both shards in one file."""
    save_file(load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1]), folder / "model.safetensors")


def _unlist(folder: Path, name: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop(name)
    (folder / INDEX).write_text(json.dumps(index))


def assert_refused(net: torch.nn.Module, action: Callable[[], object], message: str) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(UserError, match=message):
        action()
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_bad_safetensors(case: str, folder: Path):
    spoil, message = CASES[case]
    spoil(folder)
    net = make(0)
    assert_refused(net, lambda: load(net, folder), message)


def test_tied_embeddings_may_be_stored_twice_when_equal(folder: Path):
    edit(1, lambda t: t.update({"lm_head.weight": make(1).embed.weight.detach().clone()}))(folder)
    net = make(0)
    load(net, folder)
    assert torch.equal(net.embed.weight, make(1).embed.weight)


def test_every_cut_is_noticed(tmp_path: Path):
    """Whatever the length a copy broke off at."""
    save_file(make(1).state_dict(), tmp_path / "model.safetensors")
    whole, net = (tmp_path / "model.safetensors").read_bytes(), make(0)
    for length in range(0, len(whole), 29):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        assert_refused(net, lambda: load(net, tmp_path), "cannot be read|is empty")


class Surprise:
    """A pickle that would run something."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


PICKLES = {
    "code": lambda file: file.write_bytes(pickle.dumps(Surprise(), protocol=2)),
    "code in a torch file": lambda file: torch.save({"body.bias": Surprise()}, file),
    "a whole module": lambda file: torch.save(make(1), file),
    "nested": lambda file: torch.save({"model": make(1).state_dict(), "step": 3}, file),
    "a list": lambda file: torch.save([torch.zeros(1)], file),
    "garbage": lambda file: file.write_bytes(bytes(range(256))),
    "text": lambda file: file.write_bytes(b"Not found: please log in"),
    "LFS pointer": lambda file: file.write_bytes(POINTER),
    "cut": lambda file: (torch.save(make(1).state_dict(), file), os.truncate(file, 700)),
    "empty": lambda file: file.write_bytes(b""),
    "old format, cut": lambda file: (
        torch.save(make(1).state_dict(), file, _use_new_zipfile_serialization=False),
        os.truncate(file, file.stat().st_size - 9),
    ),
}


@pytest.mark.parametrize("name", ["full_weights.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("case", PICKLES)
def test_bad_pickles(case: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file, net = tmp_path / name, make(0)
    PICKLES[case](file)
    assert_refused(net, lambda: load(net, file), f"{name} (cannot be read as plain tensors|is )")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("old_format", [False, True])
def test_pickles_of_plain_tensors_are_read(old_format: bool, tmp_path: Path):
    torch.save(make(1).state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    net = make(0)
    load(net, tmp_path)
    assert all(torch.equal(t, net.state_dict()[n]) for n, t in make(1).state_dict().items())


# ------------------------------------------------------------------ a whole policy
STATS = "lerobot/metaworld_mt50/norm_stats.json"


def _statistics(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / STATS).read_text())
        change(content["norm_stats"]["actions"])
        (folder / STATS).write_text(json.dumps(content))

    return spoil


def _without(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name)
        save_file(tensors, folder / "model.safetensors")

    return spoil


POLICY_CASES = {
    "NaN statistics": (
        _statistics(lambda a: a["q01"].__setitem__(2, float("nan"))),
        "column 2 has q01=nan.*finite",
    ),
    "missing columns": (_statistics(lambda a: [v.pop() for v in a.values()]), "has 3 actions columns, .* needs 4"),
    "uneven columns": (_statistics(lambda a: a["q99"].pop()), "norm_stats.json.*different numbers of columns"),
    "words for numbers": (_statistics(lambda a: a.update(mean="zero")), "norm_stats.json.*must be a list of numbers"),
    "statistics not JSON": (write(STATS, b"{"), "norm_stats.json is not valid JSON"),
    "config not JSON": (write("config.json", b"{bad"), "config.json is not valid JSON"),
    "config a list": (write("config.json", b"[1]"), "config.json holds a list, expected an object"),
    "architecture": (write("config.json", b'{"architecture": 3}'), "config.json: architecture=3 must be an object"),
    "settings": (write("config.json", b'{"rlinf": 3}'), "config.json: rlinf=3 must be an object of settings"),
    "half a head": (_without("value_head.mlp.0.bias"), r"only a part of value_head\.\*"),
    "missing weight": (_without("action_in_proj.bias"), "lacks 1 tensors of this model: net.action_in_proj.bias"),
    "truncated": (
        lambda f: os.truncate(f / "model.safetensors", 100_000),
        "model.safetensors cannot be read as safetensors .*cut off",
    ),
}


@pytest.mark.parametrize("case", POLICY_CASES)
def test_a_policy_takes_all_of_a_folder_or_nothing(case: str, tmp_path: Path):
    spoil, message = POLICY_CASES[case]
    build(config("pi05_metaworld"), seed=1).save_pretrained(tmp_path)
    spoil(tmp_path)
    policy = build(config("pi05_metaworld"))
    before = policy.processor.action_stats
    assert_refused(policy, lambda: policy.load_pretrained(tmp_path), message)
    assert policy.processor.action_stats is before
    with pytest.raises(UserError, match=message):
        Policy.build(replace(policy.cfg, model_path=str(tmp_path)), CPU)


def test_actions_of_another_robot(tmp_path: Path):
    build(config("pi0_metaworld")).save_pretrained(tmp_path)
    cfg = replace(config("pi0_metaworld"), action_dim=7, model_path=str(tmp_path))
    with pytest.raises(UserError, match=r"norm_stats.json has 4 actions columns, pi0_metaworld needs 7"):
        Policy.build(cfg, CPU)


# ------------------------------------------------------------------ a folder of another policy
OFT = OftConfig(size="compact", num_action_chunks=2, action_dim=3)
OFFICIAL = replace(OFT, implement_version="official", statistics="q99")
OTHERS = {
    "openvla for oft": (
        OpenVlaConfig(size="compact", action_dim=3),
        OFT,
        "it is a checkpoint of openvla, .*openvla_oft",
    ),
    "oft for openvla": (
        OFT,
        OpenVlaConfig(size="compact", action_dim=3),
        "it is a checkpoint of openvla_oft, .*=openvla",
    ),
    "pi for oft": (config("pi0_metaworld"), OFT, "it is a checkpoint of openpi, .*openvla"),
    "oft for pi": (OFT, config("pi0_metaworld"), "it is a checkpoint of openvla_oft, .*openpi"),
    "layout": (OFT, OFFICIAL, "it was trained with implement_version=rlinf, .*actor.model.implement_version=official"),
    "head": (OFFICIAL, replace(OFFICIAL, action_head="l1"), "with action_head=tokens, .*actor.model.action_head=l1"),
    "statistics": (OFT, replace(OFT, statistics="bounds"), "with statistics=q99, .*actor.model.statistics=bounds"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_folder_of_another_policy(case: str, tmp_path: Path):
    saved, wanted, message = OTHERS[case]
    find_policy(saved.model_type).build(saved, CPU).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"config.json: .*{message}"):
        find_policy(wanted.model_type).build(replace(wanted, model_path=str(tmp_path)), CPU)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text_config": "llama"}, "text_config=llama must be an object"),
        ({"text_config": {"rms_norm_eps": "tiny"}}, "text_config.rms_norm_eps=tiny must be a number"),
        ({"type": "pi05"}, "it is a checkpoint of pi05"),
    ],
)
def test_a_damaged_prismatic_config(content: dict, message: str, tmp_path: Path):
    find_policy("openvla_oft").build(OFT, CPU).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"config.json: {message}"):
        find_policy("openvla_oft").build(replace(OFT, model_path=str(tmp_path)), CPU)


def test_a_run_folder_is_not_a_policy(tmp_path: Path):
    run = tmp_path / "global_step_3"
    build(config("pi0_metaworld")).save_pretrained(run / "actor/model")
    message = r"model_path=.*global_step_3 is a run's checkpoint, .*actor/model: .*runner.ckpt_path=.*global_step_3"
    with pytest.raises(UserError, match=message):
        Policy.build(replace(config("pi0_metaworld"), model_path=str(run)), CPU)
