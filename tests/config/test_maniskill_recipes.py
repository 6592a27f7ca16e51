"""The ManiSkill recipes hold the published numbers, and plan on the eight GPUs they were written for."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.envs.episodes import TrainIds
from rlinf.envs.spec import env_spec
from tests.config.test_recipes import ALGORITHM, CONFIGS, FSDP, LOG, OPTIM, RUNNER, assert_holds

INIT: dict[str, Any] = {
    "id": "PutOnPlateInScene25Main-v3",
    "obs_mode": "rgb+segmentation",
    "sim_backend": "gpu",
    "sim_config": {"sim_freq": 500, "control_freq": 5},
    "sensor_configs": {"shader_pack": "default"},
    "render_mode": "all",
    "obj_set": "train",
    "control_mode": None,
}
TRAIN: dict[str, Any] = {
    "env_type": "maniskill",
    "total_num_envs": 128,
    "auto_reset": True,
    "ignore_terminations": False,
    "use_rel_reward": True,
    "seed": 0,
    "group_size": 1,
    "use_fixed_reset_state_ids": False,
    "max_steps_per_rollout_epoch": 160,
    "max_episode_steps": 80,
    "rollout_epoch": 1,
    "enable_offload": True,
    "video_cfg": {"save_video": False, "info_on_video": True, "video_base_dir": f"{LOG}/video/train"},
    "init_params": INIT,
}
EVAL: dict[str, Any] = TRAIN | {
    "total_num_envs": 16,
    "ignore_terminations": True,
    "policy_setup": "widowx_bridge",
    "use_fixed_reset_state_ids": True,
    "max_steps_per_rollout_epoch": 80,
    "video_cfg": {"save_video": True, "info_on_video": True, "video_base_dir": f"{LOG}/video/eval"},
}
GROUPS = TRAIN | {
    "total_num_envs": 256,
    "auto_reset": False,
    "group_size": 8,
    "use_fixed_reset_state_ids": True,
    "max_steps_per_rollout_epoch": 80,
    "enable_offload": False,
}
PPO = {
    key: value
    for key, value in ALGORITHM.items()
    if key not in ("reward_coef", "filter_rewards", "rewards_lower_bound", "rewards_upper_bound", "update_epoch")
} | {
    "reward_type": "action_level",
    "logprob_type": "action_level",
    "entropy_type": "action_level",
    "bootstrap_type": "always",
    "update_epoch": 1,
}
GRPO = PPO | {
    "adv_type": "grpo",
    "loss_type": "actor",
    "group_size": 8,
    "logprob_type": "token_level",
    "entropy_type": "token_level",
    "bootstrap_type": "standard",
    "clip_ratio_high": 0.28,
}
SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature_train": 1.0,
    "temperature_eval": 0.6,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "max_new_tokens": 7,
}
BF16 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "bf16")
SHARDED = FSDP | {"sharding_strategy": "full_shard", "gradient_checkpointing": True, "mixed_precision": BF16}
COMMON_MODEL: dict[str, Any] = {
    "precision": "bf16",
    "action_dim": 7,
    "use_proprio": False,
    "unnorm_key": "bridge_orig",
    "center_crop": True,
    "policy_setup": "widowx_bridge",
    "max_prompt_length": 30,
    "is_lora": True,
    "lora_rank": 32,
}
OPENVLA = COMMON_MODEL | {
    "model_type": "openvla",
    "model_path": "/path/to/model/rl4vla/openvla-7b-rlvla-warmup/",
    "num_action_chunks": 1,
    "add_value_head": True,
}
OFT = COMMON_MODEL | {
    "model_type": "openvla_oft",
    "implement_version": "rlinf",
    "model_path": "/path/to/model/RLinf-OpenVLAOFT-ManiSkill-Base-Main/",
    "lora_path": "/path/to/model/RLinf-OpenVLAOFT-ManiSkill-Base-Lora",
    "value_type": "action_level",
    "num_action_chunks": 8,
    "use_film": False,
    "add_value_head": False,
    "num_images_in_input": 1,
}
ACTOR: dict[str, Any] = {
    "group_name": "ActorGroup",
    "training_backend": "fsdp",
    "micro_batch_size": 80,
    "global_batch_size": 640,
    "seed": 1234,
    "enable_offload": True,
    "model": OPENVLA,
    "optim": OPTIM | {"lr": 1e-4, "value_lr": 3e-3, "adam_beta2": 0.999, "clip_grad": 10.0},
    "fsdp_config": SHARDED,
}
SPLIT = {"actor": "0-7", "env": "0-3", "rollout": "4-7"}


def recipe(name: str, *, env: dict[str, Any], rollout: dict[str, Any], **blocks: Any) -> dict[str, Any]:
    """The published tree of a token policy's recipe; `rollout` is what it changes of OpenVLA's."""
    tree = {
        "runner": RUNNER | {"save_interval": 40, "logger": RUNNER["logger"] | {"experiment_name": name}},
        "env": {"group_name": "EnvGroup"} | env,
        "rollout": {"group_name": "RolloutGroup", "enable_offload": True} | rollout,
        "reward": {"use_reward_model": False},
        "critic": {"use_critic_model": False},
    }
    return tree | blocks


OFT_ACTOR = ACTOR | {"micro_batch_size": 40, "model": OFT}
OFT_ROLLOUT = {"pipeline_stage_num": 1, "sampling_params": SAMPLING | {"max_new_tokens": None}}
ON_GPUS = EVAL | {"enable_offload": False}  # nothing else needs the evaluation's memory
RECIPES = {
    "maniskill_ppo_openvla": recipe(
        "maniskill_ppo_openvla",
        cluster={"num_nodes": 1, "component_placement": SPLIT},
        algorithm=PPO,
        env={"train": TRAIN, "eval": EVAL},
        rollout={"pipeline_stage_num": 2, "sampling_params": SAMPLING},
        actor=ACTOR,
    ),
    "maniskill_grpo_openvla": recipe(
        "maniskill_grpo_openvla",
        cluster={"component_placement": SPLIT},
        algorithm=GRPO,
        env={"train": GROUPS, "eval": ON_GPUS | {"total_num_envs": 32}},
        rollout={"pipeline_stage_num": 2, "sampling_params": SAMPLING | {"top_k": 50}},
        actor=ACTOR
        | {
            "micro_batch_size": 40,
            "model": OPENVLA | {"is_lora": False, "add_value_head": False},
            "optim": ACTOR["optim"] | {"lr": 1e-5, "clip_grad": 1.0},
        },
    ),
    "maniskill_grpo_openvlaoft": recipe(
        "maniskill_grpo_openvlaoft",
        cluster={"component_placement": dict.fromkeys(SPLIT, "0-7")},
        algorithm=GRPO,
        env={"train": GROUPS, "eval": ON_GPUS},
        rollout=OFT_ROLLOUT,
        actor=OFT_ACTOR,
    ),
    "maniskill_ppo_openvlaoft": recipe(
        "maniskill_ppo_openvlaoft",
        cluster={"component_placement": SPLIT},
        algorithm=GRPO | {"adv_type": "gae", "loss_type": "actor_critic", "group_size": 1, "bootstrap_type": "always"},
        env={"train": TRAIN | {"enable_offload": False}, "eval": ON_GPUS},
        rollout=OFT_ROLLOUT,
        actor=OFT_ACTOR | {"model": OFT | {"add_value_head": True}},
    ),
}


def plan(name: str, *settings: str) -> Config:
    """The recipe as it loads where eight GPUs are."""
    return load_config(
        name, [f"runner.logger.log_path={LOG}", *settings], config_dir=CONFIGS, purpose="plan", devices=[8]
    )


@pytest.mark.parametrize(("name", "expected"), RECIPES.items())
def test_recipe_equals_the_published_tree(name: str, expected: dict[str, Any]) -> None:
    assert_holds(plan(name), expected)


@pytest.mark.parametrize(
    ("name", "path", "update_epoch", "num_steps"),
    [
        ("maniskill_ppo_openpi", "RLinf-Pi0-ManiSkill-25Main-SFT", 4, 4),
        ("maniskill_ppo_openpi_pi05", "RLinf-Pi05-ManiSkill-25Main-SFT", 5, 4),
    ],
)
def test_flow_recipes_hold_what_is_published(name: str, path: str, update_epoch: int, num_steps: int) -> None:
    """320 envs x 80 steps in chunks of 5 are one batch of 5120; Flow-Noise over horizons of 8."""
    cfg = plan(name)
    flow = {"config_name": f"{'pi05' if 'pi05' in name else 'pi0'}_maniskill", "noise_method": "flow_noise"}
    flow |= {"joint_logprob": True, "action_horizon": 8, "action_chunk": 5, "num_steps": num_steps}
    expected = {
        "algorithm": {"update_epoch": update_epoch, "entropy_bonus": 0.005, "reward_type": "chunk_level"},
        "env": {"train": {"total_num_envs": 320, "max_steps_per_rollout_epoch": 80, "init_params": INIT}},
        "actor": {
            "micro_batch_size": 32,
            "global_batch_size": 5120,
            "model": {"model_path": f"/path/to/model/{path}", "num_action_chunks": 5, "action_dim": 7},
            "optim": {"lr": 7.91e-6, "value_lr": 1.55e-4, "adam_beta2": OPTIM["adam_beta2"]},
        },
    }
    assert_holds(cfg, expected)
    assert_holds(cfg.actor.model, {"openpi": flow})


def test_groups_train_on_fresh_ids_in_every_rollout() -> None:
    """`use_fixed_reset_state_ids: true` of the published file means that a group shares its id, not that ids stay."""
    published = ["env.train.use_fixed_reset_state_ids=true", "actor.model.size=compact"]
    cfg = load_config("maniskill_grpo_openvlaoft", published, purpose="plan", devices=[8])
    env = cfg.env.train
    ids = TrainIds(env, env_spec(env), seed=0)
    drawn = [[ids.pick(env_id, rollout) for env_id in range(env.total_num_envs)] for rollout in range(20)]
    assert all(len(set(rollout[first : first + 8])) == 1 for rollout in drawn for first in range(0, 256, 8))
    assert len({reset_id for rollout in drawn for reset_id in rollout}) > 0.99 * 20 * 256 / 8
