"""Checkpoints: round trips, every published layout, and refusals that say what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openpi_cases import CPU, build, config, noise, observation
from safetensors.torch import load_file, save_file

from rlinf.errors import UserError
from rlinf.models.files.weights import save_weights
from rlinf.models.openpi.policy import Policy
from tests.weights import load_weights

EMBED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_LM_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"


@pytest.fixture(params=["pi0_metaworld", "pi05_metaworld"])
def saved(request, tmp_path) -> tuple[Policy, Path]:
    policy = build(config(request.param, noise_method="flow_noise"))
    policy.save_pretrained(tmp_path / "policy")
    return policy, tmp_path / "policy"


def reload(policy: Policy, folder: Path, seed: int = 7) -> Policy:
    return Policy.build(replace(policy.cfg, model_path=str(folder)), CPU, seed=seed)


def assert_equal_weights(a: Policy, b: Policy) -> None:
    theirs = b.state_dict()
    assert a.state_dict().keys() == theirs.keys()
    assert [n for n, t in a.state_dict().items() if not torch.equal(t, theirs[n])] == []


def test_round_trip_is_bit_equal(saved):
    policy, folder = saved
    again = reload(policy, folder)
    assert_equal_weights(policy, again)
    obs = observation(policy.cfg)
    want, got = (p.predict(obs, mode="train", noise=noise()) for p in (policy, again))
    assert torch.equal(want.actions, got.actions)
    assert torch.equal(want.logprobs, got.logprobs)
    assert torch.equal(want.values, got.values)
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    stats = "lerobot/metaworld_mt50/norm_stats.json"
    assert files == {"config.json", "model.safetensors", "tokenizer.model", stats}


def test_random_weights_come_from_the_seed_alone():
    cfg = config()
    torch.manual_seed(1)
    first = Policy.build(cfg, CPU, seed=3)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert_equal_weights(first, Policy.build(cfg, CPU, seed=3))
    assert torch.equal(before, torch.get_rng_state())
    other = Policy.build(cfg, CPU, seed=4).state_dict()
    assert not torch.equal(first.state_dict()["net.action_in_proj.weight"], other["net.action_in_proj.weight"])


def _tied(tensors: dict) -> dict:
    """As openpi writes: the tied embedding only as lm_head, and the expert's unused one."""
    tensors[LM_HEAD] = tensors.pop(EMBED)
    return tensors | {EXPERT_LM_HEAD: torch.zeros(3, 2)}


def _lerobot(tensors: dict) -> dict:
    renamed = {re.sub("^action_time_mlp", "time_mlp", n): t for n, t in _tied(tensors).items()}
    return {f"model.{n}" if "head" not in n.split(".")[0] else n: t for n, t in renamed.items()}


def _old_layout(tensors: dict) -> dict:
    out = {}
    for name, tensor in tensors.items():
        name = name.replace("paligemma.model.language_model.", "paligemma.language_model.model.")
        out[name.replace("paligemma.model.", "paligemma.")] = tensor
    return out


@pytest.mark.parametrize("layout", [_tied, _lerobot, _old_layout])
def test_published_layouts(saved, layout):
    policy, folder = saved
    tensors = layout(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    assert_equal_weights(policy, reload(policy, folder))


def test_sharded(saved):
    policy, folder = saved
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_weights(tensors, folder, max_shard_bytes=200_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert_equal_weights(policy, reload(policy, folder))
    shards[1].unlink()
    with pytest.raises(UserError, match=f"lacks {shards[1].name}, named in"):
        reload(policy, folder)


def test_imported_rl_checkpoint(saved):
    """Published RL runs store a pickle of tensors; it is read with weights_only and never written."""
    policy, folder = saved
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model_state_dict").mkdir()
    torch.save(tensors, folder / "model_state_dict" / "full_weights.pt")
    assert_equal_weights(policy, reload(policy, folder))


def test_an_imitation_checkpoint_gets_fresh_heads(saved):
    policy, folder = saved
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith("value_head")}
    save_file(tensors, folder / "model.safetensors")
    again = reload(policy, folder)
    values = again.predict(observation(policy.cfg), mode="train", noise=noise()).values
    assert torch.equal(values, torch.zeros(6, 1))
    without = replace(policy.cfg, add_value_head=False, model_path=str(folder))
    assert Policy.build(without, CPU).value_head is None


def test_a_head_is_there_or_not_but_never_in_part(saved):
    policy, folder = saved
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "value_head.mlp.2.bias"}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"only a part of value_head\.\*: value_head\.mlp\.2\.bias are missing"):
        reload(policy, folder)


def test_a_policy_saves_after_its_own_folder_is_gone(saved, tmp_path):
    """Pruning checkpoints may remove the one a run was started from."""
    policy, folder = saved
    again = reload(policy, folder)
    wanted = (folder / "tokenizer.model").read_bytes()
    shutil.rmtree(folder)
    again.save_pretrained(tmp_path / "later")
    assert (tmp_path / "later" / "tokenizer.model").read_bytes() == wanted


def test_refusals(saved, tmp_path):
    policy, folder = saved
    tensors = load_file(folder / "model.safetensors")
    file = folder / "model.safetensors"
    save_file({n: t for n, t in tensors.items() if "action_out_proj" not in n}, file)
    with pytest.raises(UserError, match=r"lacks 2 tensors of this model: net.action_out_proj.bias"):
        reload(policy, folder)
    save_file(tensors | {"surprise": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="1 tensors this model does not have: surprise"):
        reload(policy, folder)
    save_file(tensors | {"action_in_proj.bias": torch.zeros(3)}, file)
    with pytest.raises(UserError, match=r"action_in_proj.bias has shape \[3\], the model expects \[64\]"):
        reload(policy, folder)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        reload(policy, folder)
    file.unlink()
    with pytest.raises(UserError, match=r"holds no weights: expected model.safetensors"):
        reload(policy, folder)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        reload(policy, tmp_path / "nowhere")


def test_statistics_of_another_convention(saved):
    policy, folder = saved
    other = "pi05_maniskill" if policy.arch.pi05 else "pi0_maniskill"
    cfg = replace(config(other), action_dim=4, model_path=str(folder))
    cfg = replace(cfg, openpi=replace(cfg.openpi, state_dim=4))
    found = "statistics found for: lerobot/metaworld_mt50"
    with pytest.raises(UserError, match=f"has no physical-intelligence/maniskill/norm_stats.json.*{found}"):
        Policy.build(cfg, CPU)


def _edit_statistics(folder: Path, change) -> None:
    path = folder / "lerobot/metaworld_mt50/norm_stats.json"
    content = json.loads(path.read_text())
    for entry in content["norm_stats"].values():
        change(entry)
    path.write_text(json.dumps(content))


def test_padded_statistics(saved):
    """Statistics of vectors padded to the model's width act like those of the real columns."""
    policy, folder = saved
    padding = {"mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}
    _edit_statistics(folder, lambda entry: [entry[k].extend([padding[k]] * 28) for k in padding])
    again, obs = reload(policy, folder), observation(policy.cfg)
    want, got = (p.predict(obs, mode="eval", noise=noise()).actions for p in (policy, again))
    assert torch.equal(want, got)
    want, got = (p.sft_loss(obs, torch.ones(6, 3, 4), noise=noise()) for p in (policy, again))
    assert torch.equal(want, got)


def test_quantiles_may_be_missing_only_where_nobody_reads_them(saved):
    policy, folder = saved
    _edit_statistics(folder, lambda entry: entry.pop("q01"))
    if policy.cfg.convention.quantile_norm:
        with pytest.raises(UserError, match="lacks q01 and q99 of 'state', by which"):
            reload(policy, folder)
    else:
        obs = observation(policy.cfg)
        want, got = (p.predict(obs, mode="eval", noise=noise()).actions for p in (policy, reload(policy, folder)))
        assert torch.equal(want, got)


def test_configuration_of_another_size(saved):
    policy, folder = saved
    cfg = replace(policy.cfg, model_path=str(folder), openpi=replace(policy.cfg.openpi, action_horizon=7))
    with pytest.raises(UserError, match="says action_horizon=5, this configuration needs 7"):
        Policy.build(cfg, CPU)
    stored = json.loads((folder / "config.json").read_text())
    assert stored["config_name"] == policy.cfg.openpi.config_name


def test_base_needs_its_own_tokenizer(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"has no tokenizer.model; copy PaliGemma's"):
        Policy.build(replace(config(), size="base", model_path=str(tmp_path)), CPU)


def test_load_weights_casts_to_the_module(tmp_path):
    linear = torch.nn.Linear(2, 2)
    save_weights({"weight": torch.ones(2, 2, dtype=torch.bfloat16), "bias": torch.zeros(2)}, tmp_path)
    assert load_weights(linear, tmp_path) == set()
    assert linear.weight.dtype == torch.float32
    assert linear.weight.sum() == 4
