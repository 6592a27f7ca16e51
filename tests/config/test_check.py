"""One line per impossible config: key, value, rule, nearest values that work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.commands.plan_text import describe_plan
from rlinf.config.check import Purpose, check_fit
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.envs.config import EnvConfig
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, RunSettings, find_config

CONFIGS = Path(__file__).parents[2] / "examples/embodiment/config"
TWO_ENV_RANKS = "cluster.component_placement={env: 0:0-1, rollout: 0, actor: 0}"
TWO_ROLLOUT_RANKS = "cluster.component_placement={env: 0, rollout: 0:0-1, actor: 0}"
EVAL = "runner.val_check_interval=1"
GRPO = ("algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=4")
PLAIN = "~env.train.init_params"  # of the toy
SEVEN = ("actor.model.action_dim=7", "runner.val_check_interval=-1")

TABLE = [
    (
        ["env.train.total_num_envs=12", "rollout.pipeline_stage_num=4", TWO_ENV_RANKS],
        "env.train.total_num_envs=12 must divide by env ranks x stages = 2 x 4 = 8; nearest are 8 and 16",
    ),
    (
        ["env.train.total_num_envs=5", "rollout.pipeline_stage_num=2"],
        "env.train.total_num_envs=5 must divide by env ranks x stages = 1 x 2 = 2; nearest are 4 and 6",
    ),
    (
        ["env.train.total_num_envs=15", TWO_ROLLOUT_RANKS],
        "env.train.total_num_envs=15 must divide by rollout ranks x stages = 2 x 1 = 2; nearest are 14 and 16",
    ),
    (
        ["env.train.total_num_envs=0"],
        "command line: env.train.total_num_envs=0 must be an integer from 1 to 1000000; nearest is 1",
    ),
    (
        ["rollout.pipeline_stage_num=0"],
        "command line: rollout.pipeline_stage_num=0 must be 'auto' or an integer from 1 to 1024; nearest is 1",
    ),
    (
        ["env.train.total_num_envs=12", "rollout.pipeline_stage_num=2", *GRPO],
        "env.train.total_num_envs=12 gives 6 envs per env rank and stage, which must divide by group_size=4; "
        "nearest are 8 and 16",
    ),
    (
        ["env.train.max_steps_per_rollout_epoch=9"],
        "env.train.max_steps_per_rollout_epoch=9 must divide by actor.model.num_action_chunks=2; nearest are 8 and 10",
    ),
    (
        ["env.train.max_episode_steps=1"],
        "env.train.max_episode_steps=1 must divide by actor.model.num_action_chunks=2; nearest is 2",
    ),
    (
        ["actor.global_batch_size=37", "env.train.total_num_envs=37"],
        "actor.global_batch_size=37 gives 37 samples per actor rank, which fill no micro batches of 32 or a little "
        "less; nearest is 8",
    ),
    (
        ["actor.global_batch_size=96"],
        "actor.global_batch_size=96 must divide the rollout of 128 samples (chunks x envs x rollout_epoch = "
        "4 x 16 x 2); nearest are 64 and 128",
    ),
    (
        ["actor.micro_batch_size=0"],
        "command line: actor.micro_batch_size=0 must be an integer from 1 to 1000000; nearest is 1",
    ),
    (
        ["runner.save_interval=0"],
        "command line: runner.save_interval=0 must be an integer from 1 to 1e9 or -1; nearest is 1",
    ),
    (
        ["runner.val_check_interval=-2"],
        "command line: runner.val_check_interval=-2 must be an integer from 1 to 1e9 or -1; nearest is -1",
    ),
    (["runner.max_epochs=0"], "command line: runner.max_epochs=0 must be an integer from 1 to 1e9; nearest is 1"),
    (
        ["runner.weight_sync_interval=0"],
        "command line: runner.weight_sync_interval=0 must be an integer from 1 to 1000000; nearest is 1",
    ),
    (
        ["cluster.virtual_devices=-1"],
        "command line: cluster.virtual_devices=-1 must be an integer from 0 to 128; nearest is 0",
    ),
    (
        ["cluster.torch_threads=-1"],
        "command line: cluster.torch_threads=-1 must be an integer from 0 to 4096; nearest is 0",
    ),
    (
        ["algorithm.adv_type=grpo", "algorithm.loss_type=actor"],
        "algorithm.group_size=1 must be at least 2 for adv_type grpo, which compares group members",
    ),
    (
        ["algorithm.group_size=4", "env.train.group_size=2"],
        "algorithm.group_size=4 must equal env.train.group_size=2",
    ),
    (
        [*GRPO, "env.train.auto_reset=true"],
        "env.train.auto_reset=True must be false for adv_type grpo: a group plays one episode each",
    ),
    (
        ["actor.model.add_value_head=false"],
        "actor.model.add_value_head=False must be true for algorithm.loss_type=actor_critic, which needs a critic",
    ),
    (
        ["actor.model.add_value_head=false", "algorithm.loss_type=actor"],
        "actor.model.add_value_head=False must be true for algorithm.adv_type=gae, which needs a critic",
    ),
    (
        ["algorithm.adv_type=gea"],
        "algorithm.adv_type='gea' is unknown (did you mean 'gae'?); available: gae, grpo, or the dotted path "
        "of your own (my_lab.my_module)",
    ),
    (
        ["algorithm.kl_beta=0.1"],
        "command line: algorithm.kl_beta=0.1 must be 0, or left out: there is no reference policy",
    ),
    (
        ["algorithm.update_epoch=0"],
        "command line: algorithm.update_epoch=0 must be an integer from 1 to 1000000; nearest is 1",
    ),
    (
        ["actor.model.openpi.noise_method=flow_ode"],
        "actor.model.openpi.noise_method=flow_ode gives no log-probs and cannot be trained by RL",
    ),
    (
        ["actor.model.openpi.noise_level=0"],
        "actor.model.openpi.noise_level=0.0 gives no log-probs and cannot be trained by RL",
    ),
    (
        ["actor.model.openpi.noise_anneal=true", "actor.model.openpi.noise_params=[0.7,0,10]"],
        "actor.model.openpi.noise_params=[0.7, 0.0, 10.0] gives no log-probs and cannot be trained by RL",
    ),
    (
        ["actor.model.size=small", "actor.model.precision=bf16"],
        "actor.model.precision=bf16 needs a GPU, and this run has none for its policy; set actor.model.precision=fp32",
    ),
    (["actor.model.action_dim=4"], "actor.model.action_dim=4 must be 2 for env.train (toy_2)"),
    (
        ["actor.model.openpi.num_images_in_input=2"],
        "actor.model.openpi.num_images_in_input=2 must be at most 1, the cameras of env.train (toy_2)",
    ),
    (
        ["actor.model.num_images_in_input=3", "actor.model.openpi.num_images_in_input=null"],
        "actor.model.num_images_in_input=3 must be at most 1, the cameras of env.train (toy_2)",
    ),
    (
        ["actor.model.openpi.state_dim=4"],
        "actor.model.openpi.state_dim=4 must be at most 2, the state columns of env.train (toy_2)",
    ),
    (
        ["runner.logger.logger_backends=[tensorbord]"],
        "command line: runner.logger.logger_backends=['tensorbord'] must be a list, each item 'tensorboard' or 'wandb' "
        "or 'swanlab'",
    ),
    (
        ["env.train.init_params.use_multiple_plates=true"],
        "command line: env.train.init_params.use_multiple_plates=True must be False, or left out: "
        "id: MultiPlate-v1 has two plates",
    ),
    (
        ["reward.use_reward_model=true"],
        "command line: reward.use_reward_model=True must be False, or left out: rewards come from the simulator",
    ),
    (
        ["actor.model.precision=fp8"],
        "command line: actor.model.precision='fp8' must be 'fp32' or '32' or 'bf16' or 'bf16-mixed' or null",
    ),
    (["actor.model.model_path=/no/such/folder"], "actor.model.model_path='/no/such/folder' does not exist"),
    (
        ["actor.model.size=base"],
        "actor.model.model_path is not set; size base needs a checkpoint folder "
        "(actor.model.size=compact starts without one)",
    ),
    (
        ["actor.model.size=base", "actor.model.model_path=/path/to/model"],
        "actor.model.model_path='/path/to/model' is a placeholder; set it to the folder of the downloaded checkpoint",
    ),
    (
        [EVAL, "env.eval.num_trials=100000"],
        "env.eval.num_trials=100000 must be -1 (all), 0 (derived) or at most 1000, the held-out ids of the suite",
    ),
    (
        [EVAL, "env.eval.task_suite_name=[toy_red,toy_blue]", "env.eval.num_trials=7"],
        "env.eval.num_trials=7 must divide by 2, the tasks of the list, which are played equally often; nearest are 6 "
        "and 8",
    ),
    (
        ["env.train.task_suite_name=3"],
        "command line: env.train.task_suite_name=3 must be a string or a list, each item a string or null",
    ),
    (
        ["env.train.task_suite_name=[toy_red,toy_2]"],
        "env.train.task_suite_name holds reach-red twice: in toy_red and in toy_2",
    ),
    (
        ["env.train.task_weights={reach-green: 2}"],
        "env.train.task_weights.reach-green: toy_2 has no such task (did you mean 'reach-red'?)",
    ),
    (
        ["env.train.task_weights={reach-red: 2}", "env.train.use_ordered_reset_state_ids=true"],
        "env.train.task_weights needs env.train.use_ordered_reset_state_ids=false: ids in order take every task in "
        "turn",
    ),
    (
        [
            "env.train.env_type=maniskill",
            "env.train.task_suite_name=[PutOnPlateInScene25Main-v3,Carrot-v1]",
            *SEVEN,
            PLAIN,
        ],
        "env.train.task_suite_name: Carrot-v1 has no reset ids of its own to learn from (train) with these settings; "
        "what is only held out belongs in env.eval",
    ),
    (
        [
            "env.train.env_type=calvin",
            "env.train.task_suite_name=calvin_d",
            "env.train.task_weights={open_drawer: 2}",
            *SEVEN,
            PLAIN,
        ],
        "env.train.task_weights: rotate_red_block_left has no reset ids of its own to learn from (train) with these "
        "settings; what is only held out belongs in env.eval",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), TABLE)
def test_one_line_per_mistake(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        load_config("toy_ppo_compact", overrides, config_dir=CONFIGS, devices=[0])
    assert str(error.value) == line


@pytest.mark.parametrize(
    "overrides",
    [
        [EVAL, "env.eval.total_num_envs=15", "rollout.pipeline_stage_num=2", TWO_ENV_RANKS],  # spreads unevenly
        ["runner.val_check_interval=2", "runner.save_interval=3"],
        ["env.train.total_num_envs=32", "rollout.pipeline_stage_num=4", TWO_ENV_RANKS],
        [*GRPO, "actor.model.add_value_head=false", "env.train.ignore_terminations=true"],
        ["actor.model.size=small", "actor.model.model_path=/path/to/model"],
        ["actor.model.precision=bf16"],  # compact is fp32 all the same
        ["actor.model.openpi.noise_level=0", "runner.only_eval=true", "runner.eval_random=true"],
        ["actor.model.openpi.noise_level=0", "actor.model.openpi.noise_method=flow_noise"],
    ],
)
def test_allowed(overrides: list[str]) -> None:
    load_config("toy_ppo_compact", overrides, config_dir=CONFIGS, devices=[0])


@pytest.mark.parametrize("purpose", ["train", "eval", "sft"])
def test_bf16_needs_a_gpu(purpose: Purpose, tmp_path: Path) -> None:
    """Published sizes are bf16 by default; the plan may still be made on a machine without a GPU."""
    base = [f"actor.model.model_path={tmp_path}"]
    rule = r"actor.model.precision=null, which is bf16 for size base, needs a GPU"
    with pytest.raises(UserError, match=rule):
        load_config("metaworld_50_ppo_openpi", base, config_dir=CONFIGS, purpose=purpose, devices=[0])
    load_config("metaworld_50_ppo_openpi", base, config_dir=CONFIGS, purpose="plan", devices=[0])
    load_config("metaworld_50_ppo_openpi", base, config_dir=CONFIGS, purpose=purpose, devices=[1])
    fp32 = [*base, "actor.model.precision=fp32"]
    load_config("metaworld_50_ppo_openpi", fp32, config_dir=CONFIGS, purpose=purpose, devices=[0])


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_every_recipe_runs_compact_without_a_gpu(name: str) -> None:
    settings = ["actor.model.size=compact", 'cluster.component_placement={"actor,env,rollout": all}']
    settings += ["runner.eval_random=true"]  # of recipes that only evaluate
    purpose = "sft" if "_sft" in name else "train"
    cfg = load_config(name, settings, config_dir=CONFIGS, devices=[0], purpose=purpose)
    assert cfg.actor.model.stored_precision == "fp32"


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "policy").mkdir()
    load_config("toy_ppo_compact", ["actor.model.model_path=~/policy"], config_dir=CONFIGS, devices=[0])


def test_weights_of_a_file_are_not_called_random(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_config("toy_ppo_compact", config_dir=CONFIGS, devices=[0])
    assert "starts from random weights" in caplog.text
    caplog.clear()
    (tmp_path / "x.safetensors").touch()
    load_config("toy_ppo_compact", [f"runner.ckpt_path={tmp_path}/x.safetensors"], config_dir=CONFIGS, devices=[0])
    assert "starts from random weights" not in caplog.text


@pytest.mark.parametrize("purpose", ["plan", "collect"])
def test_weights_are_not_asked_for_where_none_are_read(purpose: str) -> None:
    load_config("metaworld_50_ppo_openpi", config_dir=CONFIGS, purpose=purpose, devices=[0])


@pytest.mark.parametrize(
    ("suite", "action_dim", "fits"),
    [("metaworld_50", 4, True), ("metaworld_50", 7, True), ("metaworld_50", 6, False), ("toy_2", 7, False)],
)
def test_seven_columns_fit_an_arm_without_rotation(suite: str, action_dim: int, fits: bool) -> None:
    cfg = load_config("toy_ppo_compact", config_dir=CONFIGS, devices=[0])
    env = EnvConfig(env_type=suite.partition("_")[0], task_suite_name=suite)
    policy = replace(cfg.actor.model.spec(), action_dim=action_dim)
    if fits:
        check_fit("env.train", env, policy)
    else:
        with pytest.raises(UserError, match=rf"actor.model.action_dim={action_dim} must be"):
            check_fit("env.train", env, policy)


def test_the_model_learns_what_other_blocks_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    more = ["rollout.sampling_params.temperature_train=1.6", "actor.fsdp_config.gradient_checkpointing=true"]

    def for_run(self: ModelConfig, run: RunSettings) -> ModelConfig:
        told.append((run.critic_state_dim, run.temperature_train, run.gradient_checkpointing))
        return self

    monkeypatch.setattr(find_config("openpi"), "for_run", for_run)
    load_config("toy_ppo_compact", more, config_dir=CONFIGS, devices=[0])
    assert told == [(5, 1.6, True)]


def test_plan_text_states_the_arithmetic_of_the_published_recipe() -> None:
    cfg = load_config("metaworld_50_ppo_openpi", config_dir=CONFIGS, purpose="plan", devices=[8])
    text = describe_plan(cfg, make_plan(cfg, [8]))
    for line in (
        "devices (shared, 8 processes)",
        "  node 0 gpu 7          p7: env[7] rollout[7] actor[7]",
        "  envs                  64 = 8 ranks x 2 stages x 4",
        "  samples per step      10240 = 20 chunks x 64 envs x 8 rollouts; 51200 actions",
        "  global batch          2048 = 8 ranks x 2 micro batches x 128",
        "  optimiser steps       20 per training step = 5 batches x 4 update epochs",
        "  replay arena          193 MB per rollout rank (1280 samples x 151 kB)",
    ):
        assert line in text.splitlines()


def test_micro_batches_shrink_to_what_a_rank_has(caplog: pytest.LogCaptureFixture) -> None:
    """The ManiSkill guide's two nodes of eight: 640 samples over 16 ranks are half a micro batch each."""
    block = ["cluster.num_nodes=2", "cluster.component_placement={env: 0-7, rollout: 8-15, actor: 0-15}"]
    cfg = load_config("maniskill_ppo_openvla", block, config_dir=CONFIGS, purpose="plan", devices=[8, 8])
    line = "actor.micro_batch_size=80 -> 40: global_batch_size=640 gives 40 samples to each of 16 actor ranks"
    assert line in caplog.messages
    text = describe_plan(cfg, make_plan(cfg, [8, 8]))
    assert "  global batch          640 = 16 ranks x 1 micro batch x 40" in text.splitlines()
    caplog.clear()
    load_config("maniskill_ppo_openvla", config_dir=CONFIGS, purpose="plan", devices=[8])
    assert "micro_batch_size" not in caplog.text


def test_batches_that_ranks_cannot_share_are_refused() -> None:
    settings = ["actor.global_batch_size=636", "cluster.component_placement={'actor,env,rollout': 0-7}"]
    with pytest.raises(UserError) as error:
        load_config("maniskill_ppo_openvla", settings, config_dir=CONFIGS, purpose="plan", devices=[8])
    line = "actor.global_batch_size=636 must divide by actor ranks = 8; nearest are 512 and 640"
    assert str(error.value) == line


def test_plan_text_of_an_evaluation() -> None:
    cfg = load_config("toy_ppo_compact", ["runner.only_eval=true"], config_dir=CONFIGS, purpose="plan", devices=[0])
    text = describe_plan(cfg, make_plan(cfg, [0]))
    assert "  evaluation            32 trials in 16 envs" in text.splitlines()
    assert "optimiser" not in text


def test_critic_warm_up_without_a_critic_is_refused() -> None:
    with pytest.raises(UserError, match=r"critic_warmup_steps=5 must be 0 for algorithm.loss_type=actor"):
        load_config("toy_grpo_compact", ["actor.optim.critic_warmup_steps=5"], devices=[0])


def test_rollouts_that_cut_episodes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    load_config("toy_ppo_compact", ["env.train.max_episode_steps=16"], devices=[0])
    assert "env.train.max_steps_per_rollout_epoch=8 ends rollouts before max_episode_steps=16" in caplog.text
    caplog.clear()
    load_config("toy_ppo_compact", ["env.train.max_episode_steps=16", "env.train.auto_reset=true"], devices=[0])
    assert "ends rollouts before" not in caplog.text


def test_the_quickstart_checks_its_evaluation_before_it_starts() -> None:
    with pytest.raises(UserError, match=r"env\.eval\.num_trials=100000 must be"):
        load_config("quickstart", ["env.eval.num_trials=100000"], purpose="quickstart", devices=[0])
    load_config("quickstart", [], purpose="quickstart", devices=[0])


@pytest.mark.parametrize(
    ("purpose", "setting"),
    [
        ("sft", "sft.log_interval=0"),
        ("sft", "sft.batch_size=0"),
        ("collect", "collect.episodes_per_task=0"),
        ("quickstart", "collect.max_attempts=-1"),
        ("quickstart", "env.eval.video_cfg.max_envs=0"),
    ],
)
def test_counts_that_must_be_positive(purpose: Purpose, setting: str) -> None:
    with pytest.raises(
        UserError, match=f"^command line: {re.escape(setting)} must be an integer from 1 to .*; nearest is 1$"
    ):
        load_config("quickstart", [setting], purpose=purpose, devices=[0])


def test_state_loss_is_a_weight() -> None:
    with pytest.raises(
        UserError, match=r"^command line: sft.state_loss=-1.0 must be a number from 0 to 1000000; nearest is 0$"
    ):
        load_config("quickstart", ["sft.state_loss=-1.0"], purpose="sft", devices=[0])


@pytest.mark.parametrize(("purpose", "split"), [("train", "train"), ("collect", "demo")])
@pytest.mark.parametrize("settings", [("id=PutOnPlateInScene25Main-v3", "obj_set=test"), ("id=ood",)])
def test_nothing_is_learnt_from_held_out_ids(purpose: Purpose, split: str, settings: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=rf"^env.train.init_params: suite .* none to learn from \({split}\)"):
        load_config("maniskill_ppo_compact", [f"env.train.init_params.{s}" for s in settings], purpose=purpose)


def test_a_mistake_that_the_evaluation_inherits_is_named_where_it_was_made() -> None:
    with pytest.raises(UserError, match=r"command line: env.train.init_params: control_mode='x'"):
        load_config("maniskill_ppo_compact", ["env.train.init_params.control_mode=x"])


def test_virtual_devices_are_no_gpus() -> None:
    settings = ["actor.model.size=small", "actor.model.precision=bf16", "cluster.virtual_devices=1"]
    with pytest.raises(UserError, match=r"actor\.model\.precision=bf16 needs a GPU"):
        load_config("toy_ppo_compact", settings, purpose="train")


@pytest.mark.parametrize("setting", ["max_staleness=1", "weight_sync_interval=4"])
@pytest.mark.parametrize("loss", ["actor", "actor_critic", "decoupled_actor_critic"])
def test_a_loss_that_ignores_the_age_of_experience_is_warned_about(setting: str, loss: str, caplog) -> None:
    apart = "cluster.component_placement={actor: 0, 'env,rollout': 1}"
    load_config("toy_ppo_compact", [f"runner.{setting}", f"algorithm.loss_type={loss}", apart], devices=[2])
    said = f"runner.{setting} learns from experience of older weights, for which algorithm.loss_type={loss} does not"
    assert (said in caplog.text) == (loss != "decoupled_actor_critic")
    caplog.clear()  # rollouts that share the actor's weights have no copies that age
    if setting.startswith("weight_sync"):
        load_config("toy_ppo_compact", [f"runner.{setting}", f"algorithm.loss_type={loss}"], devices=[2])
        assert "older weights" not in caplog.text


def test_a_ratio_per_chunk_needs_an_advantage_per_chunk() -> None:
    settings = ["algorithm.reward_type=action_level", "algorithm.logprob_type=chunk_level"]
    with pytest.raises(
        UserError,
        match=r"^algorithm\.logprob_type=chunk_level must be action_level or token_level with "
        r"algorithm\.reward_type=action_level, which has 2 advantages a chunk; or set "
        r"algorithm\.reward_type=chunk_level$",
    ):
        load_config("toy_grpo_compact", settings)
    assert load_config("toy_grpo_compact", [settings[0], "algorithm.logprob_type=action_level"])


def test_staleness_bounds_the_age_of_weights_alone() -> None:
    settings = ["runner.max_staleness=1", "runner.weight_sync_interval=2"]
    apart = "cluster.component_placement={actor: 0, 'env,rollout': 1}"
    with pytest.raises(UserError, match=r"^runner\.weight_sync_interval=2 must be 1 with runner\.max_staleness=1"):
        load_config("toy_ppo_compact", [*settings, apart], devices=[2])


def test_keys_that_the_simulator_does_not_read_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """One line each with key, value and who reads it."""
    unread = {
        "env.train.task_config": "{embodiment: aloha}",
        "env.train.center_crop": "true",
        "env.train.assets_path": "/data",
        "env.eval.seeds_path": "seeds.json",
        "env.eval.use_custom_reward": "true",
    }
    overrides = [f"{key}={value}" for key, value in unread.items()]
    load_config("metaworld_50_ppo_openpi", overrides, purpose="plan", devices=[1])
    lines = [r.getMessage() for r in caplog.records if "has no effect on env_type=metaworld; " in r.getMessage()]
    assert [line.split("=")[0] for line in lines] == [
        "env.train.center_crop",
        "env.train.assets_path",
        "env.train.task_config",
        "env.eval.use_custom_reward",
        "env.eval.seeds_path",
    ]
    assert "env.train.task_config={'embodiment': 'aloha'} has no effect" in caplog.text
    caplog.clear()
    load_config("metaworld_50_ppo_openpi", ["env.train.center_crop=false"], purpose="plan", devices=[1])
    assert "has no effect on" not in caplog.text


def test_random_weights_and_a_policy_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--random \(runner.eval_random=true\) evaluates random weights, but .*; leave"
    ):
        load_config(
            "toy_ppo_compact",
            ["runner.eval_random=true", f"actor.model.model_path={tmp_path}"],
            config_dir=CONFIGS,
            purpose="eval",
        )
