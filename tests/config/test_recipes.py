"""The recipes hold the published numbers, and the shell wrappers pass on arguments, logs and exit status."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from rlinf.compat.keys import is_below, no_effect_paths
from rlinf.config.compose import compose_config, resolve
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.typed import defaults_of

EMBODIMENT = Path(__file__).parents[2] / "examples/embodiment"
CONFIGS = EMBODIMENT / "config"
LOG = "/logs"

FSDP: dict[str, Any] = {
    "strategy": "fsdp",
    "sharding_strategy": "no_shard",
    "gradient_checkpointing": False,
    "cpu_offload": False,
    "offload_pin_memory": False,
    "reshard_after_forward": True,
    "enable_gradient_accumulation": True,
    "forward_prefetch": False,
    "limit_all_gathers": False,
    "backward_prefetch": None,
    "use_orig_params": False,
    "use_liger_kernel": False,
    "mixed_precision": {"param_dtype": None, "reduce_dtype": None, "buffer_dtype": None},
    "amp_autocast": {"enabled": False, "precision": "bf16"},
    "grad_scaler": {"enabled": False},
}
ALGORITHM: dict[str, Any] = {
    "normalize_advantages": True,
    "kl_penalty": "kl",
    "loss_agg_func": "token-mean",
    "kl_beta": 0.0,
    "entropy_bonus": 0,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "dual_clip": False,
    "value_clip": 0.2,
    "huber_delta": 10.0,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "group_size": 1,
    "reward_coef": 1.0,
    "reward_type": "chunk_level",
    "logprob_type": "chunk_level",
    "entropy_type": "token_level",
    "update_epoch": 4,
    "adv_type": "gae",
    "loss_type": "actor_critic",
    "filter_rewards": False,
    "rewards_lower_bound": 0.1,
    "rewards_upper_bound": 0.9,
}
RUNNER: dict[str, Any] = {
    "task_type": "embodied",
    "max_epochs": 1000,
    "max_steps": -1,
    "only_eval": False,
    "val_check_interval": -1,
    "save_interval": 50,
    "resume_dir": None,
    "ckpt_path": None,
    "logger": {
        "log_path": LOG,
        "project_name": "rlinf",
        "experiment_name": "metaworld_50_ppo_openpi",
        "logger_backends": ["tensorboard"],
    },
}
TRAIN: dict[str, Any] = {
    "env_type": "metaworld",
    "task_suite_name": "metaworld_50",
    "total_num_envs": 64,
    "auto_reset": False,
    "ignore_terminations": False,
    "max_steps_per_rollout_epoch": 100,
    "max_episode_steps": 100,
    "use_rel_reward": True,
    "reward_coef": 1.0,
    "is_eval": False,
    "seed": 0,
    "group_size": 1,
    "use_fixed_reset_state_ids": False,
    "use_ordered_reset_state_ids": False,
    "rollout_epoch": 8,
    "video_cfg": {"save_video": True, "info_on_video": True, "video_base_dir": f"{LOG}/video/train"},
}
EVAL: dict[str, Any] = TRAIN | {
    "total_num_envs": 500,
    "auto_reset": True,
    "ignore_terminations": True,
    "use_fixed_reset_state_ids": True,
    "rollout_epoch": 1,
    "video_cfg": {"save_video": True, "info_on_video": True, "video_base_dir": f"{LOG}/video/eval"},
}
OPENPI: dict[str, Any] = {
    "config_name": "pi0_metaworld",
    "num_images_in_input": 1,
    "noise_level": 0.5,
    "action_chunk": 5,
    "num_steps": 5,
    "train_expert_only": True,
    "action_env_dim": 4,
    "noise_method": "flow_sde",
    "add_value_head": True,
    "detach_critic_input": True,
    "use_dsrl": False,
}
MODEL: dict[str, Any] = {
    "model_type": "openpi",
    "model_path": "/path/to/model/RLinf-Pi0-MetaWorld-SFT",
    "precision": None,
    "num_action_chunks": 5,
    "action_dim": 4,
    "is_lora": False,
    "lora_rank": 32,
    "use_proprio": True,
    "num_steps": 5,
    "add_value_head": True,
    "openpi": OPENPI,
}
OPTIM: dict[str, Any] = {
    "lr": 1e-5,
    "value_lr": 1e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "critic_warmup_steps": 0,
}
PI0: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor,env,rollout": "all"}},
    "runner": RUNNER,
    "algorithm": ALGORITHM,
    "env": {"group_name": "EnvGroup", "train": TRAIN, "eval": EVAL},
    "rollout": {
        "group_name": "RolloutGroup",
        "backend": "huggingface",
        "recompute_logprobs": False,
        "enable_offload": False,
        "pipeline_stage_num": "auto",  # published: 1; two stages change no result, see rollout.pipeline_stage_num
        "model": {"model_path": MODEL["model_path"], "precision": None},
    },
    "actor": {
        "group_name": "ActorGroup",
        "training_backend": "fsdp",
        "micro_batch_size": 128,
        "global_batch_size": 2048,
        "seed": 42,
        "enable_offload": False,
        "model": MODEL,
        "optim": OPTIM,
        "fsdp_config": FSDP,
    },
    "reward": {"use_reward_model": False},
    "critic": {"use_critic_model": False},
}
PI05_PATH = "/path/to/model/RLinf-Pi05-MetaWorld-SFT"
PI05_OPENPI = {
    "config_name": "pi05_metaworld",
    "value_after_vlm": True,
    "value_vlm_mode": "mean_token",
    "detach_critic_input": None,
}
COSINE = {"lr": 5e-6, "lr_scheduler": "cosine", "total_training_steps": 1000, "lr_warmup_steps": -1, "num_cycles": 0.5}
PI05 = PI0 | {
    "runner": RUNNER | {"logger": RUNNER["logger"] | {"experiment_name": "metaworld_50_ppo_openpi_pi05"}},
    "rollout": {"model": {"model_path": PI05_PATH, "precision": None}},
    "actor": PI0["actor"]
    | {"model": MODEL | {"model_path": PI05_PATH, "openpi": OPENPI | PI05_OPENPI}, "optim": OPTIM | COSINE},
}
CALVIN_TRAIN = TRAIN | {
    "env_type": "calvin",
    "task_suite_name": "calvin_d",
    "max_steps_per_rollout_epoch": 480,
    "max_episode_steps": 480,
}
CALVIN_EVAL = CALVIN_TRAIN | {
    "total_num_envs": 50,
    "auto_reset": True,
    "ignore_terminations": True,
    "max_steps_per_rollout_epoch": 9600,
    "use_fixed_reset_state_ids": True,
    "use_ordered_reset_state_ids": True,
    "is_eval": True,
    "rollout_epoch": 1,
    "video_cfg": EVAL["video_cfg"],
}
CALVIN_RUNNER = RUNNER | {"save_interval": 100}
CALVIN_OPENPI = OPENPI | {"config_name": "pi0_calvin", "num_images_in_input": 2, "action_env_dim": 7}
CALVIN_PATHS = {name: f"/path/to/model/RLinf-{name}-CALVIN-ABC-D-SFT" for name in ("Pi0", "Pi05")}


def calvin(name: str, suite: str, model: str, openpi: dict[str, Any]) -> dict[str, Any]:
    """A CALVIN recipe of π0 or π0.5: scene D is evaluated, `suite` trained on."""
    path = CALVIN_PATHS[model]
    return PI0 | {
        "runner": CALVIN_RUNNER | {"logger": RUNNER["logger"] | {"experiment_name": name}},
        "env": {"train": CALVIN_TRAIN | {"task_suite_name": suite}, "eval": CALVIN_EVAL},
        "rollout": {"model": {"model_path": path, "precision": None}},
        "actor": PI0["actor"]
        | {
            "model": MODEL | {"model_path": path, "action_dim": 7, "openpi": CALVIN_OPENPI | openpi},
            "optim": OPTIM | {"lr": 5e-6},
        },
    }


CALVIN_PI05 = PI05_OPENPI | {"config_name": "pi05_calvin", "joint_logprob": False}
CALVIN = {
    "calvin_d_d_ppo_openpi": calvin("calvin_d_d_ppo_openpi", "calvin_d", "Pi0", {}),
    **{
        f"calvin_{scenes}_d_ppo_openpi_pi05": calvin(
            f"calvin_{scenes}_d_ppo_openpi_pi05", f"calvin_{scenes}", "Pi05", CALVIN_PI05
        )
        for scenes in ("d", "abc", "abcd")
    },
}
OOD = {"task_suite_name": "metaworld_45_ood", "total_num_envs": 100}
ML45 = PI0 | {
    "runner": RUNNER
    | {"max_epochs": 500, "val_check_interval": 10, "save_interval": -1}
    | {"logger": RUNNER["logger"] | {"experiment_name": "metaworld_45_ppo_openpi"}},
    "env": {
        "train": TRAIN | {"task_suite_name": "metaworld_45_ind"},
        "eval": EVAL | OOD | {"max_steps_per_rollout_epoch": 160, "max_episode_steps": 160},
    },
}
OFT = {
    "runner": RUNNER
    | {"save_interval": 25, "logger": RUNNER["logger"] | {"experiment_name": "metaworld_grpo_openvla_final"}},
    "algorithm": ALGORITHM
    | {"adv_type": "grpo", "loss_type": "actor", "group_size": 8, "update_epoch": 1, "clip_ratio_high": 0.28}
    | {"reward_type": "action_level", "logprob_type": "token_level", "reward_coef": 5.0}
    | {"filter_rewards": True, "rewards_lower_bound": 0.1, "rewards_upper_bound": 1.0},
    "env": {
        "train": TRAIN | {"group_size": 8, "rollout_epoch": 16, "reward_coef": 5.0},
        "eval": EVAL | {"reward_coef": 1.0, "total_num_envs": 16, "use_fixed_reset_state_ids": False},
    },
    "rollout": {"sampling_params": {"do_sample": True, "temperature_train": 1.6, "temperature_eval": 0.6, "top_k": -1}},
    "actor": {
        "micro_batch_size": 32,
        "global_batch_size": 12800,
        "model": {
            "model_type": "openvla_oft",
            "model_path": "/path/to/RLinf-OpenVLAOFT-MetaWorld-SFT",
            "num_action_chunks": 1,
            "action_dim": 7,
            "unnorm_key": "meta_world_strict",
            "max_prompt_length": 50,
            "is_lora": False,
            "add_value_head": False,
        },
        "optim": {"lr": 2e-5, "value_lr": 3e-3},
    },
}


def assert_holds(node: Any, expected: Any, path: str = "") -> None:
    """Every key of `expected` has its value in a config or tree."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            below = f"{path}.{key}".lstrip(".")
            if not any(is_below(below, ignored) for ignored, _ in no_effect_paths()):
                assert_holds(getattr(node, key) if is_dataclass(node) else node[key], value, below)
    else:
        assert node == expected, path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("metaworld_50_ppo_openpi", PI0),
        ("metaworld_50_ppo_openpi_pi05", PI05),
        ("metaworld_45_ppo_openpi", ML45),
        *CALVIN.items(),
    ],
)
def test_recipe_equals_the_published_tree(name: str, expected: dict[str, Any]) -> None:
    cfg = load_config(name, [f"runner.logger.log_path={LOG}"], config_dir=CONFIGS, purpose="plan", devices=[0])
    assert_holds(cfg, expected)


def test_openvla_oft_recipe_equals_the_published_tree() -> None:
    composed = compose_config("metaworld_50_grpo_openvlaoft", [f"runner.logger.log_path={LOG}"], CONFIGS)
    assert_holds(resolve(composed, defaults_of(Config)), OFT)


def test_calvin_openvla_oft_recipe_equals_the_published_tree() -> None:
    composed = compose_config("calvin_abc_d_grpo_openvlaoft", [f"runner.logger.log_path={LOG}"], CONFIGS)
    train = CALVIN_TRAIN | {"task_suite_name": "calvin_abc", "group_size": 8, "rollout_epoch": 16, "reward_coef": 5.0}
    path = "/path/to/model/RLinf-OpenVLAOFT-CALVIN-SFT"
    expected = OFT | {
        "runner": OFT["runner"] | {"logger": RUNNER["logger"] | {"experiment_name": "calvin_abc_d_grpo_openvlaoft"}},
        "env": {"train": train, "eval": CALVIN_EVAL | {"reward_coef": 1.0}},
        "actor": OFT["actor"]
        | {"global_batch_size": 12288}
        | {"model": OFT["actor"]["model"] | {"model_path": path, "unnorm_key": "calvin_abc"}},
    }
    assert_holds(resolve(composed, defaults_of(Config)), expected)


OTHER_COMPACT = (
    *("calvin_d_d_ppo_compact", "calvin_d_d_ppo_fixtures_compact", "calvin_d_chains_compact"),
    *("calvin_d_d_ppo_later_compact", "calvin_d_d_ppo_pushes_compact", "calvin_d_d_ppo_fourteen_compact"),
    *("calvin_d_d_ppo_few_compact", "maniskill_ppo_compact", "maniskill_ppo_sixteen_compact", "maniskill_ood"),
    *("metaworld_grpo_openvlaoft_compact", "metaworld_ppo_openvla_compact"),
)


@pytest.mark.parametrize("name", ["metaworld_sft_compact", "calvin_d_d_sft_compact", "maniskill_sft_compact"])
def test_plain_imitation_recipes_go_to_the_end(name: str) -> None:
    """Unlike those that leave RL something to do, they never stop early."""
    sft = load_config(name, config_dir=CONFIGS, devices=[0], purpose="sft").sft
    weak = {"metaworld": "quickstart", "calvin": "calvin_d_d_ppo_compact", "maniskill": "maniskill_ppo_compact"}
    started = load_config(weak[name.split("_")[0]], config_dir=CONFIGS, devices=[0], purpose="sft").sft
    assert (sft.eval_interval, sft.stop_at_success, sft.stop_at_most, sft.lr_scheduler) == (0, None, None, "cosine")
    assert sft.steps > started.steps


@pytest.mark.parametrize("name", ["toy_ppo_compact", "toy_grpo_compact", "quickstart", *OTHER_COMPACT])
def test_small_recipes_load(name: str) -> None:
    cfg = load_config(name, ["runner.eval_random=true"], config_dir=CONFIGS, devices=[0])
    assert (cfg.actor.model.size, cfg.runner.logger.experiment_name) == ("compact", name)


@pytest.mark.parametrize("name", ["metaworld_50_ppo_light", "maniskill_ppo_light", "maniskill_ppo_openvla_light"])
def test_recipes_for_one_gpu_load(name: str) -> None:
    cfg = load_config(name, ["runner.eval_random=true"], config_dir=CONFIGS, devices=[0])
    assert (cfg.actor.model.size, cfg.actor.model.precision, cfg.actor.model.is_lora) == ("light", "fp32", False)
    assert cfg.env.eval.max_episode_steps >= cfg.env.train.max_episode_steps


def run_wrapper(folder: Path, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the wrappers whose `rlinf` prints its arguments and exits with status 3."""
    scripts = folder / "examples/embodiment"
    binary = folder / ".venv/bin/rlinf"
    if not scripts.exists():
        scripts.mkdir(parents=True)
        binary.parent.mkdir(parents=True)
        for file in EMBODIMENT.glob("*.sh"):
            shutil.copy(file, scripts)
        binary.write_text(
            '#!/bin/sh\nfor a in "$@"; do echo "arg: $a"; done\necho "platform: $ROBOT_PLATFORM"\nexit 3\n'
        )
        binary.chmod(0o755)
    env |= {"VIRTUAL_ENV": str(folder / ".venv")}  # the tests may run in an active environment, which has an rlinf too
    return subprocess.run(
        ["bash", str(scripts / script), *args], env=os.environ | env, capture_output=True, text=True, check=False
    )


def arguments(out: str) -> list[str]:
    return [line.removeprefix("arg: ") for line in out.splitlines() if line.startswith("arg: ")]


@pytest.mark.parametrize(("script", "command"), [("run_embodiment.sh", "train"), ("eval_embodiment.sh", "eval")])
def test_wrapper_passes_everything_on(tmp_path: Path, script: str, command: str) -> None:
    done = run_wrapper(tmp_path, script, "my_config", "ALOHA", "a.b=c d", "~x.y", STEPS="5", SAVE_INTER="-2", NODES="2")
    assert done.returncode == 3
    (log_dir,) = (tmp_path / "logs").iterdir()
    assert log_dir.name.endswith("-my_config")
    assert arguments(done.stdout) == [
        command,
        "my_config",
        f"runner.logger.log_path={log_dir}",
        *(["runner.logger.table_interval=1"] if command == "train" else []),
        "runner.max_steps=5",
        "cluster.num_nodes=2",
        "a.b=c d",
        "~x.y",
    ]
    log = (log_dir / script.replace(".sh", ".log")).read_text()
    assert "platform: ALOHA" in log
    assert "arg: a.b=c d" in log


def test_wrapper_defaults(tmp_path: Path) -> None:
    done = run_wrapper(tmp_path, "run_embodiment.sh", "a.b=1", LOG_DIR=str(tmp_path / "here"))
    assert arguments(done.stdout) == [
        "train",
        "metaworld_50_ppo_openpi",
        f"runner.logger.log_path={tmp_path}/here",
        "runner.logger.table_interval=1",
        "a.b=1",
    ]
    assert done.stdout.endswith("platform: \n")  # none is made up: the simulator knows its robot
