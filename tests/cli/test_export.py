"""`rlinf export`: a LoRA run becomes one plain checkpoint that plays the same episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlinf
from rlinf.commands import cli, jobs
from rlinf.commands.export import export_policy, stored_settings
from rlinf.config.load import load_config
from rlinf.errors import UserError
from rlinf.models.files import lora
from rlinf.models.policy import find_policy
from tests.runs import make_runner, toy_config

LORA = ("actor.model.is_lora=true", "actor.model.lora_rank=4", "actor.optim.lr=1.0e-2")
SMALL = ("env.train.rollout_epoch=1", "algorithm.update_epoch=1", "env.eval.num_trials=16", "env.eval.num_processes=1")


def train(folder: Path, *overrides: str) -> None:
    runner = make_runner(toy_config(folder, *SMALL, *LORA, "runner.save_interval=1", *overrides))
    try:
        runner.train()
    finally:
        runner.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one training step with adapters."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "runner.max_epochs=1")
    return folder / "toy_ppo_compact" / "checkpoints" / "global_step_1"


def episodes(folder: Path, *overrides: str) -> list:
    own = [f"runner.logger.log_path={folder}", *SMALL, *overrides]
    jobs.evaluate(load_config("toy_ppo_compact", own, purpose="eval"))
    (file,) = (folder / "eval").glob("*/result.json")
    return json.loads(file.read_text())["episodes"]


def test_the_exported_policy_plays_the_same_episodes_without_peft(saved: Path, tmp_path: Path):
    command = [sys.executable, "-m", "rlinf", "export", str(saved), str(tmp_path / "plain")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == f"policy      {tmp_path / 'plain'}"
    names = {p.name for p in (tmp_path / "plain").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.model"} <= names
    assert not [name for name in names if name.startswith(("adapter", "heads"))]

    cfg = stored_settings(saved / "actor/model")
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    merged, plain = lora.merged_state(policy.net), load_file(tmp_path / "plain/model.safetensors")
    assert all(torch.equal(plain[name], tensor) for name, tensor in merged.items())
    assert sum(not torch.equal(merged[n], t) for n, t in lora.base_state(policy.net).items()) > 10
    want = episodes(tmp_path / "adapters", *LORA, f"runner.ckpt_path={saved}")
    assert episodes(tmp_path / "exported", f"actor.model.model_path={tmp_path / 'plain'}") == want
    settings = json.loads((tmp_path / "plain/config.json").read_text())["rlinf"]
    assert (settings["is_lora"], settings["model_path"]) == (False, None)


def test_policies_that_earlier_versions_saved_can_be_exported(saved: Path, tmp_path: Path):
    first = export_policy(saved / "actor/model", tmp_path / "first")
    content = json.loads((first / "config.json").read_text())
    content["rlinf"]["openpi"] |= {"upstream_values": True, "dsrl_state_dim": 8}
    (first / "config.json").write_text(json.dumps(content))
    again = json.loads((export_policy(first, tmp_path / "second") / "config.json").read_text())
    assert not {"upstream_values", "dsrl_state_dim"} & again["rlinf"]["openpi"].keys()


def test_weights_are_stored_in_the_precision_asked_for(saved: Path, tmp_path: Path):
    plain, half = export_policy(saved, tmp_path / "plain"), export_policy(saved, tmp_path / "half", precision="bf16")
    a, b = (load_file(folder / "model.safetensors") for folder in (plain, half))
    assert {tensor.dtype for tensor in b.values()} == {torch.bfloat16}
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].bfloat16(), b[name]) for name in a)
    cfg = stored_settings(half)
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}  # compact computes in fp32
    with pytest.raises(UserError, match="--precision=fp8 must be one of fp32, bf16"):
        export_policy(saved, tmp_path / "none", precision="fp8")
    assert not (tmp_path / "none").exists()


def test_an_export_can_be_exported_again(saved: Path, tmp_path: Path):
    first = export_policy(saved / "actor/model", tmp_path / "first")
    second = export_policy(first, tmp_path / "second")
    a, b = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_lora_run_resumes_bit_equal(saved: Path, tmp_path: Path):
    """One step, a new process, one more step: as two steps in a row."""
    for folder, steps in (("once", (2,)), ("twice", (1, 2))):
        for n in steps:
            train(tmp_path / folder, f"runner.max_epochs={n}", "runner.resume_dir=auto")
    once, twice = (tmp_path / f / "toy_ppo_compact/checkpoints/global_step_2/actor" for f in ("once", "twice"))
    files = ("model/adapter_model.safetensors", "model/heads.safetensors", "optimizer.safetensors")
    for file in files:
        a, b = load_file(once / file), load_file(twice / file)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), file


def test_a_run_folder_stands_for_its_newest_step(saved: Path, tmp_path: Path):
    run = saved.parents[2]
    assert (export_policy(run, tmp_path / "plain") / "model.safetensors").is_file()
    assert rlinf.load_policy(run).spec == rlinf.load_policy(saved).spec
    with pytest.raises(UserError, match=r"OUTPUT=.*toy_ppo_compact is the folder of a run"):
        export_policy(tmp_path / "plain", saved.parents[1], overwrite=True)
    with pytest.raises(UserError, match="--episodes needs --rollouts CONFIG"):
        cli.export(saved, tmp_path / "out", episodes=3)


def test_refusals(saved: Path, tmp_path: Path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"CHECKPOINT=.*global_step_7 does not exist; there: global_step_1"):
        export_policy(saved.with_name("global_step_7"), out)
    with pytest.raises(UserError, match=r"is a file; pass the folder global_step_N"):
        export_policy(saved / "actor/model/config.json", out)
    with pytest.raises(UserError, match=r"OUTPUT=.* holds CHECKPOINT=.*, which would be replaced"):
        export_policy(saved, saved)
    (tmp_path / "foreign").mkdir()
    with pytest.raises(UserError, match=r"foreign holds no config.json"):
        export_policy(tmp_path / "foreign", out)
    (tmp_path / "foreign/config.json").write_text('{"model_type": "openvla"}')
    with pytest.raises(UserError, match=r"config.json has no entry 'rlinf': only policies that rlinf saved"):
        export_policy(tmp_path / "foreign", out)
    (tmp_path / "foreign/config.json").write_text('{"rlinf": {"model_type": "foo"}}')
    with pytest.raises(UserError, match=r"config.json: rlinf.model_type=foo is unknown; available: .*openpi"):
        export_policy(tmp_path / "foreign", out)
    assert not out.exists()


def test_the_current_folder_is_not_replaced(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"OUTPUT=\. is the current folder; name one inside it"):
        export_policy(saved, Path("."))
