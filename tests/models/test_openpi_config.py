"""The torch-free side: sizes, promises and refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from openpi_cases import config

from rlinf.errors import UserError
from rlinf.models.config import RunSettings, find_config
from rlinf.models.files import lora
from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.openpi.conventions import CONVENTIONS
from rlinf.models.openpi.policy import Policy


def test_config_imports_no_torch():
    code = "import sys; import rlinf.models.openpi.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert find_config("openpi") is Config


@pytest.mark.parametrize("size", ["base", "small", "compact"])
@pytest.mark.parametrize("critic", [{}, {"value_after_vlm": True}, {"value_input": "state", "critic_state_dim": 40}])
@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_maniskill"])
def test_parameter_counts_are_exact(name, critic, size):
    cfg = replace(config(name, noise_method="flow_noise", **critic), size=size)
    policy = Policy(cfg, "meta")
    counts = cfg.num_parameters()
    assert sum(p.numel() for p in policy.parameters()) == sum(counts.values())
    assert sum(p.numel() for _, p in policy.trainable_parameters()) == cfg.num_trainable_parameters()
    assert sum(p.numel() for p in policy.value_head.parameters()) == counts["value_head"]
    bounds = {"base": (3e9, 3.5e9), "small": (20e6, 60e6), "compact": (0.2e6, 1e6)}[size]
    assert bounds[0] < sum(counts.values()) < bounds[1]


def test_published_metaworld_recipe():
    cfg = Config(
        num_action_chunks=5,
        action_dim=4,
        num_steps=5,
        add_value_head=True,
        openpi=OpenPiOptions(
            num_images_in_input=1, action_chunk=5, num_steps=5, train_expert_only=True, action_env_dim=4
        ),
    )
    spec = cfg.spec()
    assert (spec.action_dim, spec.num_action_chunks, spec.image_size, spec.num_images) == (4, 5, 224, 1)
    assert (spec.state_dim, spec.has_logprob, spec.has_value) == (4, True, True)
    assert (spec.critic_state_dim, cfg.denoise_steps, cfg.stored_precision) == (0, 5, "bf16")
    assert cfg.cache_bytes_per_sample() == 2 * 18 * 256 * (256 + 48) * 2
    arch = cfg.architecture()
    assert (arch.action_dim, arch.action_horizon, arch.max_token_len) == (32, 5, 48)


def test_state_less_pi05():
    spec = Config(num_action_chunks=5, action_dim=7, openpi=OpenPiOptions(config_name="pi05_calvin")).spec()
    assert (spec.state_dim, spec.num_images, spec.has_value) == (0, 2, False)
    robotwin = OpenPiOptions(config_name="pi05_aloha_robotwin")
    spec = Config(num_action_chunks=50, action_dim=14, openpi=robotwin).spec()
    assert (spec.state_dim, spec.num_images) == (14, 3)


def test_the_critic_reads_the_state_of_the_runs_simulator():
    run = RunSettings(critic_state_dim=40)
    assert config(value_input="state").for_run(run).spec().critic_state_dim == 40
    assert config().for_run(run).spec().critic_state_dim == 0


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"config_name": "pi0_metawrld"}, "config_name='pi0_metawrld' is unknown (did you mean 'pi0_metaworld'?)"),
        ({}, {"action_chunk": 4}, "openpi.action_chunk=4 must equal actor.model.num_action_chunks=3"),
        ({}, {"action_env_dim": 7}, "openpi.action_env_dim=7 must equal actor.model.action_dim=4"),
        ({}, {"add_value_head": False}, "openpi.add_value_head=False must equal actor.model.add_value_head=True"),
        ({"num_action_chunks": 6}, {}, "num_action_chunks=6 must be at most the action horizon 5"),
        ({"size": "huge"}, {}, "size='huge' must be one of base, small, light, compact"),
        ({"precision": "fp8"}, {}, "precision='fp8' must be 'fp32' or '32' or 'bf16' or 'bf16-mixed' or null"),
        ({}, {"use_dsrl": True}, "use_dsrl=True is not supported"),
        (
            {},
            {"num_images_in_input": 4},
            "openpi.num_images_in_input=4 must be an integer from 1 to 3 or null; nearest is 3",
        ),
        ({}, {"num_images_in_input": -1}, "openpi.num_images_in_input=-1 must be an integer from 1"),
        ({"num_images_in_input": -1}, {}, "actor.model.num_images_in_input=-1 must be an integer from 0"),
        ({}, {"max_token_len": -1}, "openpi.max_token_len=-1 must be an integer from 1"),
        ({}, {"max_token_len": 0}, "openpi.max_token_len=0 must be an integer from 1"),
        ({}, {"action_horizon": 0}, "openpi.action_horizon=0 must be an integer from 1"),
        ({}, {"num_steps": 0}, "openpi.num_steps=0 must be an integer from 1"),
        ({}, {"noise_level": -0.5}, "openpi.noise_level=-0.5 must be a number from 0"),
        ({}, {"noise_level": float("nan")}, "openpi.noise_level=nan must be a number from 0"),
        ({}, {"noise_anneal": True, "noise_params": [0.7, 0.3, 0.0]}, "a positive number of steps"),
        (
            {},
            {"noise_anneal": True, "noise_params": [0.7, -0.3, 9.0]},
            "noise_params=[0.7, -0.3, 9.0] must be a list, each item a number from 0",
        ),
        ({}, {"noise_method": "flow_noise", "noise_logvar_range": [0.0, 0.1]}, "two positive standard deviations"),
        ({}, {"noise_method": "flow_noise", "noise_logvar_range": [-1.0, 0.1]}, "each item a number from 0"),
        ({}, {"noise_method": "flow_noise", "noise_logvar_range": [0.2, 0.1]}, "the smaller one first"),
        (
            {},
            {"noise_per": "chunk", "joint_logprob": True},
            "joint_logprob=True scores every action by itself; set noise_per to action",
        ),
        ({}, {"noise_per": "chunk", "safe_get_logprob": True}, "safe_get_logprob=True scores every action by itself"),
        ({}, {"noise_per": "chunk", "noise_method": "flow_noise"}, "noise_method=flow_noise scores every action"),
        ({}, {"state_dim": 0}, "openpi.state_dim=0 must be at least 1: pi0_metaworld reads it"),
        ({"num_steps": 1}, {"ignore_last": True}, "num_steps=1 leaves no stochastic step"),
        ({"value_type": "action_level"}, {}, "value_type=action_level must be chunk_level"),
    ],
)
def test_refusals(change, options, message):
    cfg = replace(config(), **change)
    with pytest.raises(UserError, match=re.escape(message)):
        replace(cfg, openpi=replace(cfg.openpi, **options)).spec()


def test_state_critic_without_its_size():
    with pytest.raises(UserError, match=r"value_input=state needs openpi.critic_state_dim"):
        Policy(config(value_input="state"), "meta")


def test_compact_runs_are_fp32():
    rest = RunSettings()
    for precision in (None, "bf16", "fp32"):
        assert replace(config(), precision=precision).for_run(rest).stored_precision == "fp32"
    assert replace(config(), size="small", precision="bf16").for_run(rest).stored_precision == "bf16"
    with pytest.raises(UserError, match="precision='fp17' must be 'fp32' or "):
        replace(config(), precision="fp17").spec()


def test_bf16_small_policy():
    cfg = replace(config(), precision="bf16")
    policy = Policy(cfg, "meta")
    dtypes = {n: p.dtype for n, p in policy.named_parameters()}
    assert dtypes["net.paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight"] == torch.bfloat16
    assert dtypes["net.paligemma_with_expert.gemma_expert.model.norm.weight"] == torch.float32
    assert dtypes["value_head.mlp.0.weight"] == dtypes["net.action_in_proj.weight"] == torch.float32


def test_every_convention_has_a_compact_policy():
    for name in CONVENTIONS:
        spec = config(name).spec()
        assert (spec.image_size, spec.num_action_chunks) == (64, 3)


@pytest.mark.parametrize("name", ["pi0_calvin", "pi05_metaworld"])
def test_layers_that_lora_can_adapt_are_those_of_the_network(name):
    policy = Policy(config(name), "meta")
    assert sorted(policy.arch.layers()) == sorted(lora._layers(policy.net))


def test_lora_counts_of_the_published_size():
    cfg = replace(config("pi0_metaworld"), size="base", num_action_chunks=5, is_lora=True, lora_rank=32)
    assert cfg.num_parameters()["adapters"] == 32 * sum(
        layer.inputs + layer.outputs for layer in cfg.architecture().layers() if "paligemma." not in layer.name
    )
    assert cfg.cache_bytes_per_sample() > 0  # the frozen vision-language model has no adapters
    full = replace(cfg, openpi=replace(cfg.openpi, train_expert_only=False))
    assert full.num_parameters()["adapters"] > cfg.num_parameters()["adapters"]
    assert full.cache_bytes_per_sample() == 0
