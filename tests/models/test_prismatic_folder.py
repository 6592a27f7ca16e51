"""Checkpoint folders of OpenVLA: what config.json and preprocessor_config.json say is used, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlinf.errors import UserError
from rlinf.models.openvla.config import Config
from rlinf.models.openvla.policy import Policy

CPU = torch.device("cpu")
CFG = Config(size="compact", action_dim=3, unnorm_key="bridge_orig")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    policy = Policy.build(CFG, CPU)
    policy.fit_statistics(None, torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
    policy.save_pretrained(tmp_path)
    return tmp_path


def edit(path: Path, **keys) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def build(folder: Path, **keys) -> Policy:
    return Policy.build(replace(CFG, model_path=str(folder), **keys), CPU)


def test_a_saved_folder_reads_like_a_published_one(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["model_type"] == "openvla"
    assert config["text_config"]["hidden_size"] == 64
    assert config["n_action_bins"] == 256
    assert (saved / "tokenizer.model").is_file()
    assert set(json.loads((saved / "dataset_statistics.json").read_text())) == {"bridge_orig"}
    assert build(saved).arch == CFG.architecture()


def test_epsilon_and_pixel_statistics_come_from_the_folder(saved):
    text = json.loads((saved / "config.json").read_text())["text_config"]
    edit(saved / "config.json", text_config=text | {"rms_norm_eps": 1e-5})
    edit(saved / "preprocessor_config.json", means=[[0.4, 0.5, 0.6], [0.5] * 3], stds=[[0.2] * 3, [0.5] * 3])
    policy = build(saved)
    assert policy.arch.norm_eps == 1e-5
    assert policy.net.language_model.model.norm.eps == 1e-5
    assert (policy.arch.dino.mean, policy.arch.dino.std) == ((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
    with pytest.raises(UserError, match="norm epsilon or pixel statistics differ"):
        Policy.build(CFG, CPU).load_pretrained(saved)


def test_a_published_config_leaves_defaults_out(saved):
    (saved / "config.json").write_text(json.dumps({"model_type": "openvla", "text_config": {"vocab_size": 1280}}))
    (saved / "preprocessor_config.json").unlink()
    assert build(saved).arch == CFG.architecture()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"text_config": {"hidden_size": 4096}}, "says hidden_size=4096, this configuration needs 64"),
        ({"text_config": {"num_hidden_layers": 32}}, "says num_hidden_layers=32, this configuration needs 2"),
        ({"image_sizes": [224, 224]}, "says image_sizes=224, this configuration needs 64"),
        ({"n_action_bins": 512}, "says n_action_bins=512, this configuration needs 256"),
    ],
)
def test_another_network_is_refused(saved, keys, message):
    edit(saved / "config.json", **keys)
    with pytest.raises(UserError, match=message):
        build(saved)


def test_bad_pixel_statistics_are_refused(saved):
    edit(saved / "preprocessor_config.json", means=[[0.5, 0.5]])
    with pytest.raises(UserError, match=r"means=.* must be three numbers for each of two towers"):
        build(saved)


def test_the_only_statistics_are_taken_and_it_is_said(saved, caplog):
    build(saved, unnorm_key="place_empty_cup")
    assert [r.message for r in caplog.records if "unnorm_key" in r.message] == [
        f"actor.model.unnorm_key=place_empty_cup: taking bridge_orig, which {saved} has"
    ]


def test_statistics_must_have_the_columns(saved):
    with pytest.raises(UserError, match=r"has 3 columns, actor\.model\.action_dim is 7"):
        build(saved, action_dim=7)
    with pytest.raises(UserError, match="is not a folder"):
        build(saved / "nothing")


def test_without_statistics_a_small_policy_acts_in_the_bins_own_range(tmp_path):
    policy = Policy.build(CFG, CPU)
    policy.save_pretrained(tmp_path)
    assert not (tmp_path / "dataset_statistics.json").exists()
    bins = torch.tensor([[0, 128, 255]])
    assert torch.equal(build(tmp_path).processor.decode_bins(bins), policy.processor.decode_bins(bins))
    assert policy.processor.decode_bins(bins).abs().max() <= 1.0
