"""`actor.model` of OpenVLA and OpenVLA-OFT: published blocks load, impossible ones name their key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.compat.keys import without_old_keys
from rlinf.config.load import load_config
from rlinf.errors import UserError
from rlinf.models.config import RunSettings, find_config
from rlinf.models.files.tokenizers import BUNDLED
from rlinf.models.openvla.config import Config as OpenVla
from rlinf.models.openvla_oft.config import Config as Oft
from rlinf.models.prismatic.processor import Processor
from rlinf.models.prismatic.prompts import load_tokenizer
from rlinf.typed import convert

CONFIGS = Path(__file__).parents[2] / "examples/embodiment/config"
COMMON = {
    "model_path": "/path/to/model",
    "precision": "bf16",
    "unnorm_key": "bridge_orig",
    "center_crop": True,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "image_size": [224, 224],
    "is_lora": True,
    "lora_rank": 32,
    "attn_implementation": "flash_attention_2",
    "low_cpu_mem_usage": True,
    "trust_remote_code": True,
    "policy_setup": "widowx_bridge",
}
OPENVLA = COMMON | {
    "model_type": "openvla",
    "action_dim": 7,
    "num_action_chunks": 1,
    "use_proprio": False,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "add_value_head": True,
    "max_prompt_length": 30,
}
MANISKILL_OFT = COMMON | {
    "model_type": "openvla_oft",
    "implement_version": "rlinf",
    "value_type": "action_level",
    "action_dim": 7,
    "num_action_chunks": 8,
    "use_proprio": False,
    "use_film": False,
    "max_prompt_length": 30,
    "add_value_head": False,
    "lora_path": "/path/to/lora",
    "num_images_in_input": 1,
}
ROBOTWIN_OFT = MANISKILL_OFT | {
    "implement_version": "official",
    "action_dim": 14,
    "use_proprio": True,
    "proprio_dim": 14,
    "num_action_chunks": 25,
    "unnorm_key": "place_empty_cup_1k",
    "lora_path": None,
    "max_prompt_length": 512,
}


def block(tree: dict):
    return convert(find_config(tree["model_type"]), without_old_keys(tree), "actor.model", lambda path: "file.yaml")


@pytest.mark.parametrize("tree", [OPENVLA, MANISKILL_OFT, ROBOTWIN_OFT])
def test_published_blocks_load(tree):
    cfg = block(tree)
    spec = cfg.spec()
    assert (spec.action_dim, spec.num_action_chunks) == (tree["action_dim"], tree["num_action_chunks"])
    assert spec.state_dim == tree.get("proprio_dim", 0)
    assert (spec.image_size, spec.num_images, spec.binary_gripper) == (224, 1, True)
    assert spec.has_logprob
    assert cfg.stored_precision == "bf16"
    assert cfg.prompt_slots == tree["max_prompt_length"]
    assert cfg.statistics_kind == ("bounds" if tree is ROBOTWIN_OFT else "q99")


def test_values_per_chunk():
    cfg = replace(block(MANISKILL_OFT), add_value_head=True)
    assert cfg.spec().values_per_chunk == 8
    assert replace(cfg, value_type="chunk_level").spec().values_per_chunk == 1
    assert replace(block(OPENVLA), value_type="action_level").spec().values_per_chunk == 1


def test_parameters_of_the_published_sizes():
    """7.5 B less what is never computed (two blocks, two norms, a pooling head); rank-32 adapters on every linear."""
    counts = replace(block(OPENVLA), model_path=None).num_parameters()
    assert sum(counts[part] for part in ("embedding", "language")) == 6_738_939_904
    assert counts["projector"] == 71_385_600
    assert counts["value_head"] == 4096 * 512 + 512 + 512 * 128 + 128 + 128
    cfg = replace(block(OPENVLA), model_path=None)
    assert cfg.num_trainable_parameters() == counts["adapters"] + counts["value_head"]
    llama = 32 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008)) + 32 * (4096 + 32064)
    assert llama < counts["adapters"] < 1.4 * llama
    assert replace(cfg, is_lora=False).num_trainable_parameters() == sum(counts.values()) - counts["adapters"]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (OpenVla(num_action_chunks=8), "actor.model.num_action_chunks=8 must be 1 for model_type openvla"),
        (OpenVla(num_images_in_input=2), "actor.model.num_images_in_input=2 must be 1 for model_type openvla"),
        (OpenVla(use_proprio=True), "actor.model.use_proprio=True must be False for model_type openvla"),
        (Oft(use_proprio=True), "actor.model.use_proprio=True needs actor.model.implement_version=official"),
        (Oft(action_head="l1"), "actor.model.action_head=l1 needs actor.model.implement_version=official"),
        (
            Oft(implement_version="official", use_proprio=True, proprio_dim=0),
            "actor.model.proprio_dim=0 must be an int",
        ),
        (Oft(size="huge"), "actor.model.size='huge' must be one of base, small, light, compact"),
        (Oft(precision="fp8"), "actor.model.precision='fp8' must be 'fp32' or"),
        (Oft(max_prompt_length=3), "actor.model.max_prompt_length=3 must be an integer from 8"),
        (Oft(temperature_train=0.0), "actor.model.temperature_train=0.0 must be a number from 0.001"),
    ],
)
def test_impossible_blocks(cfg, message):
    with pytest.raises(UserError) as error:
        cfg.spec()
    assert message in str(error.value)


def test_sampling_comes_from_the_rollout_block():
    rest = RunSettings(temperature_train=1.6, temperature_eval=-1.0, top_k=-1, gradient_checkpointing=True)
    cfg = Oft().for_run(rest)
    assert (cfg.temperature_train, cfg.temperature_eval, cfg.top_k) == (1.6, -1.0, -1)
    assert cfg.gradient_checkpointing
    assert Oft(size="compact", precision="bf16").for_run(rest).stored_precision == "fp32"
    assert Oft(precision="bf16").for_run(rest).stored_precision == "bf16"
    recipe = load_config("metaworld_50_grpo_openvlaoft", config_dir=CONFIGS, purpose="plan", devices=[0])
    model = recipe.actor.model
    assert (model.temperature_train, model.temperature_eval, model.top_k) == (1.6, 0.6, -1)
    assert (model.num_action_chunks, model.unnorm_key, model.stored_precision) == (1, "meta_world_strict", "bf16")


L1 = ("actor.model.implement_version=official", "actor.model.action_head=l1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (L1, "actor.model.action_head=l1 gives no log-probs and cannot be trained by RL"),
        (["rollout.sampling_params.top_p=0.9"], "rollout.sampling_params.top_p=0.9 must be 1,"),
        (["rollout.sampling_params.repetition_penalty=1.1"], "sampling_params.repetition_penalty=1.1 must be 1,"),
        (
            ["rollout.sampling_params.temperature_train=-1"],
            "sampling_params.temperature_train=-1 must be a number from",
        ),
        (
            ["actor.model.add_value_head=true", "algorithm.adv_type=gae", "algorithm.reward_type=chunk_level"],
            "algorithm.reward_type=chunk_level pays 1 reward(s) a chunk, but the critic gives 2 value(s)",
        ),
        (
            ["rollout.sampling_params.temperature_train=.nan"],
            "sampling_params.temperature_train=nan must be a number from",
        ),
        (
            ["rollout.sampling_params.temperature_train=.inf"],
            "sampling_params.temperature_train=inf must be a number from",
        ),
        (
            ["rollout.sampling_params.temperature_eval=.nan"],
            "sampling_params.temperature_eval=nan must be a number from -1",
        ),
        (["rollout.sampling_params.top_k=300"], "rollout.sampling_params.top_k=300 must be an integer from -1 to 256"),
        (["actor.model.precision=fp17"], "actor.model.precision='fp17' must be 'fp32' or"),
        (["actor.model.size=small"], "actor.model.precision=bf16 needs a GPU"),
        (
            ["actor.model.num_images_in_input=2"],
            "actor.model.num_images_in_input=2 must be at most 1, the cameras of env.train (toy_2)",
        ),
        (
            ["actor.model.implement_version=official", "actor.model.use_proprio=true", "actor.model.proprio_dim=9"],
            "actor.model.proprio_dim=9 must be at most 2, the state columns of env.train (toy_2)",
        ),
        (["actor.model.action_dim=7"], "actor.model.action_dim=7 must be 2"),
    ],
)
def test_refused_before_anything_starts(overrides, message):
    with pytest.raises(UserError) as error:
        load_config("toy_grpo_openvlaoft_compact", overrides, config_dir=CONFIGS, devices=[0])
    assert message in str(error.value)


def test_sampling_set_in_the_model_block_is_warned_of(caplog):
    settings = ["actor.model.top_k=5", "rollout.sampling_params.top_k=7"]
    cfg = load_config("toy_grpo_openvlaoft_compact", settings, config_dir=CONFIGS, devices=[0])
    assert cfg.actor.model.top_k == 7
    assert "actor.model.top_k=5 has no effect: rollout.sampling_params.top_k=7 decides" in caplog.text
    caplog.clear()
    load_config("toy_grpo_openvlaoft_compact", settings[1:], config_dir=CONFIGS, devices=[0])
    assert "has no effect" not in caplog.text


def test_a_statistics_key_without_statistics(tmp_path, caplog):
    """`base` insists on statistics; smaller sizes may have none, and say so when a key was asked for."""
    cfg = replace(Oft.examples()[0], unnorm_key="foo")
    prompts = load_tokenizer(BUNDLED, max_len=cfg.prompt_slots, vocab_size=cfg.architecture().vocab_size)
    for key, warned in (("foo", True), (None, False)):
        caplog.clear()
        Processor(replace(cfg, unnorm_key=key), cfg.architecture(), prompts).prepare(tmp_path)
        assert ("actor.model.unnorm_key=foo" in caplog.text) == warned
    with pytest.raises(UserError, match="holds no action statistics"):
        Processor(replace(cfg, size="base"), cfg.architecture(), prompts).prepare(tmp_path)


def test_an_l1_head_may_be_evaluated():
    overrides = [*L1, "runner.eval_random=true"]
    cfg = load_config("toy_grpo_openvlaoft_compact", overrides, config_dir=CONFIGS, purpose="eval", devices=[0])
    assert cfg.actor.model.regression == (2, 2)
