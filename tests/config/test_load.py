"""Composition, overrides, old names, types, and where errors say a key came from."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.compat import keys as aliases
from rlinf.config.derived import micro_batch_size
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.errors import UserError

CONFIGS = Path(__file__).parents[2] / "examples/embodiment/config"


def load(*overrides: str, name: str = "toy_ppo_compact", purpose: str = "train") -> Config:
    return load_config(name, list(overrides), config_dir=CONFIGS, purpose=purpose, devices=[0])


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    """A config file that starts from the toy recipe."""
    file = folder / name
    file.write_text(f"defaults:\n  - toy_ppo_compact\n  - _self_\n{text}")
    return str(file)


def test_loading_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from rlinf.config.load import load_config; from rlinf.commands.plan_text import describe_plan;"
        "from rlinf.config.derived import make_plan;"
        "cfg = load_config('metaworld_50_ppo_openpi', [], purpose='plan', devices=[8]);"
        "describe_plan(cfg, make_plan(cfg, [8]));"
        "print([m for m in ('torch', 'ray', 'mujoco', 'metaworld') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=CONFIGS.parents[2], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_overrides_of_every_form() -> None:
    cfg = load(
        "runner.max_epochs=7",
        "+runner.keep_checkpoints=2",  # in the schema, in no file
        "actor.optim.lr=1e-5",
        "algorithm.target_kl=null",
        "runner.logger.logger_backends=[tensorboard, wandb]",
        "env.train.init_params={image_size: 48}",
        "runner.logger.log_path=some dir/a b",
        "~env.eval.num_trials",
    )
    assert (cfg.runner.max_epochs, cfg.runner.keep_checkpoints, cfg.actor.optim.lr) == (7, 2, 1e-5)
    assert cfg.algorithm.target_kl is None
    assert cfg.runner.logger.logger_backends == ["tensorboard", "wandb"]
    assert cfg.env.train.init_params["image_size"] == 48
    assert cfg.env.train.video_cfg.video_base_dir == "some dir/a b/video/train"
    assert cfg.env.eval.num_trials == 0


def test_interpolations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_NAME", "from-env")
    path = write(
        tmp_path,
        """
runner:
  logger: {experiment_name: "${oc.env:RUN_NAME}"}
algorithm: {huber_delta: "${algorithm.value_clip}"}  # a default of the schema
actor: {model: {openpi: {action_horizon: "${..num_action_chunks}"}}}
""",
    )
    cfg = load(name=path)
    assert cfg.runner.logger.experiment_name == "from-env"
    assert cfg.algorithm.huber_delta == 0.2
    assert cfg.actor.model.openpi.action_horizon == 2


def test_fragments_are_picked_by_override() -> None:
    assert load("model@actor.model=pi0_5").actor.model.openpi.config_name == "pi05_metaworld"


def test_fragments_of_the_old_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A YAML of the published layout elsewhere on disk: env/NAME@package, old folders, its own search path."""
    monkeypatch.delenv("EMBODIED_PATH", raising=False)
    file = tmp_path / "old.yaml"
    file.write_text(
        """
defaults:
  - env/train: toy
  - env/toy@env.eval
  - model/pi0@actor.model
  - training_backend/fsdp@actor.fsdp_config
  - weight_syncer/patch_syncer@weight_syncer
  - override hydra/job_logging: stdout
hydra:
  run: {dir: .}
  output_subdir: null
  searchpath: ["file://${oc.env:EMBODIED_PATH}/config/"]
env: {train: {total_num_envs: 16}}
actor:
  micro_batch_size: 32
  global_batch_size: 64
  model: {size: compact, num_action_chunks: 2, action_dim: 2, openpi: {state_dim: 2}}
"""
    )
    cfg = load(name=str(file))
    assert (cfg.env.train.env_type, cfg.env.eval.env_type) == ("toy", "toy")
    assert cfg.actor.fsdp_config.strategy == "fsdp"


@pytest.mark.parametrize("name", ["metaworld_50_ppo_OpenPI", "metaworld_50_ppo_openpi.yaml"])
def test_names_in_other_spellings(name: str) -> None:
    assert load("actor.model.size=compact", name=name).runner.logger.experiment_name == "metaworld_50_ppo_openpi"


def test_unknown_config_name() -> None:
    with pytest.raises(UserError, match=r"config 'toy_ppo_compct' not found in .*; did you mean toy_ppo_compact, "):
        load(name="toy_ppo_compct")


def test_placement_overrides_replace() -> None:
    assert load("cluster.component_placement={env: 0, rollout: 0, actor: 0}").cluster.component_placement == {
        "env": 0,
        "rollout": 0,
        "actor": 0,
    }
    cfg = load('cluster.component_placement={"actor,env,rollout": 0}', "cluster.component_placement.env=0:0-1")
    assert cfg.cluster.component_placement == {"actor": 0, "env": "0:0-1", "rollout": 0}
    cfg = load("~cluster", "cluster.component_placement.env=0:0-1")  # nothing is placed: the default is split
    assert cfg.cluster.component_placement == {"actor": "all", "env": "0:0-1", "rollout": "all"}


def test_a_placement_given_later_replaces(tmp_path: Path) -> None:
    """In a config that inherits one, at the end of a config that has one, or both."""
    block = "cluster:\n  component_placement: {env: 0, rollout: 0, actor: 0}\n"
    want = {"env": 0, "rollout": 0, "actor": 0}
    inheriting = write(tmp_path, block)
    assert load(name=inheriting).cluster.component_placement == want
    recipe = (CONFIGS / "toy_ppo_compact.yaml").read_text()
    pasted = tmp_path / "pasted.yaml"
    pasted.write_text(f"{recipe}\n{block}rollout:\n  pipeline_stage_num: 2\nrollout: {{enable_offload: true}}\n")
    cfg = load(name=str(pasted))
    assert cfg.cluster.component_placement == want
    assert cfg.cluster.torch_threads == 1  # the rest of the block stays
    assert (cfg.rollout.pipeline_stage_num, cfg.rollout.enable_offload) == (2, True)
    cfg = load("cluster.component_placement.env=0:0-1", name=str(pasted))
    assert cfg.cluster.component_placement == want | {"env": "0:0-1"}


def test_mistakes_in_pasted_blocks_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "runner: {max_epochs: 3}\nrunner: {max_epoch: 4}\n")
    with pytest.raises(UserError) as error:
        load(name=path)
    assert str(error.value) == f"{path}: unknown key runner.max_epoch; did you mean runner.max_epochs?"


def test_a_video_block_without_its_parents_is_that_of_training(tmp_path: Path) -> None:
    path = write(tmp_path, "video_cfg:\n  save_video: True\n  video_base_dir: ${runner.logger.log_path}/video/train\n")
    cfg = load(name=path)
    assert (cfg.env.train.video_cfg.save_video, cfg.env.eval.video_cfg.save_video) == (True, False)
    assert cfg.env.train.video_cfg.video_base_dir == f"logs/<time>-{Path(path).stem}/video/train"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "env: {train: {total_num_env: 4}}",
            "unknown key env.train.total_num_env; did you mean env.train.total_num_envs?",
        ),
        ("runner: {lr: 1}", "unknown key runner.lr; did you mean actor.optim.lr?"),
        ("runer: {max_epochs: 1}", "unknown key runer; did you mean runner?"),
        (
            "actor: {model: {openpi: {noise_levl: 1}}}",
            "unknown key actor.model.openpi.noise_levl; did you mean actor.model.openpi.noise_level?",
        ),
        (
            "rollout: {model: {modle_path: x}}",
            "unknown key rollout.model.modle_path; did you mean rollout.model.model_path?",
        ),
        (
            "env: {eval: {init_params: {imagesize: 4}}}",
            "unknown key env.eval.init_params.imagesize; did you mean env.eval.init_params.image_size?",
        ),
        ("actor: {optim: {lr: fast}}", "actor.optim.lr='fast' must be a number from 0 to 10; default is 1e-05"),
        ("runner: {max_epochs: 1.5}", "runner.max_epochs=1.5 must be an integer from 1 to 1e9; nearest is 2"),
        ("runner: {only_eval: 1}", "runner.only_eval=1 must be true or false; default is false"),
        ("runner: {max_epochs: true}", "runner.max_epochs=True must be an integer from 1 to 1e9; default is 1000"),
        ("env: {train: {video_cfg: 3}}", "env.train.video_cfg=3 must be a block of keys"),
        (
            "runner: {logger: {logger_backends: wandb}}",
            "runner.logger.logger_backends='wandb' must be a list, each item 'tensorboard' or 'wandb' or 'swanlab'",
        ),
        ("runner: {resume_dir: 3}", "runner.resume_dir=3 must be a string or null"),
        (
            "algorithm: {reward_type: chunk_levl}",
            "algorithm.reward_type='chunk_levl' must be 'chunk_level' or 'action_level' (did you mean 'chunk_level'?)",
        ),
        ("compat: rlinf-0.3", "compat='rlinf-0.3' must be 'rlinf-0.4' or null (did you mean 'rlinf-0.4'?)"),
        (
            "env: {train: {init_params: {image_size: big}}}",
            "env.train.init_params.image_size='big' must be an integer from 8 to 4096; default is 32",
        ),
        (
            "actor: {model: {model_type: openvla_2}}",
            "actor.model.model_type='openvla_2' is unknown (did you mean 'openvla'?); available: openpi, openvla, "
            "openvla_oft, or the dotted path of your own (my_lab.my_module)",
        ),
    ],
)
def test_errors_name_the_file_the_key_and_the_remedy(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load(name=path)
    assert str(error.value) == f"{path}: {line}"


def test_errors_name_the_command_line() -> None:
    with pytest.raises(UserError) as error:
        load("runner.max_epoch=3")
    assert str(error.value) == "command line: unknown key runner.max_epoch; did you mean runner.max_epochs?"


def test_errors_name_the_fragment(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/bad.yaml").write_text("env_type: toy\nmax_episode_step: 8\n")
    (tmp_path / "mine.yaml").write_text("defaults:\n  - toy_ppo_compact\n  - override env@env.train: bad\n  - _self_\n")
    with pytest.raises(UserError) as error:
        load(name=str(tmp_path / "mine.yaml"))
    assert str(error.value) == (
        f"{tmp_path}/env/bad.yaml: unknown key env.train.max_episode_step; did you mean env.train.max_episode_steps?"
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "runner.max_epochs",
            "'runner.max_epochs' is not an override; write key=value, for example runner.max_steps=10, or "
            "~key to remove a key",
        ),
        ("~runner.nothing", "'~runner.nothing': there is no key runner.nothing to remove"),
    ],
)
def test_bad_overrides(override: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        load(override)
    assert str(error.value) == f"command line: {line}"


@pytest.mark.parametrize("override", ["runner.max_epochs=[1", "runner.max_epochs=${nope.x}", "nothing@actor.model=pi0"])
def test_broken_yaml_and_references_are_one_line(override: str) -> None:
    with pytest.raises(UserError) as error:
        load(override)
    assert "\n" not in str(error.value)


def test_unset_environment_variable_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    path = write(tmp_path, 'runner: {ckpt_path: "${oc.env:NOT_THERE}"}')
    with pytest.raises(UserError, match=rf"^{path}: runner.ckpt_path: .*NOT_THERE"):
        load(name=path)


def test_old_names_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    aliases._warned.clear()
    path = write(
        tmp_path,
        """
runner: {eval_policy_path: null, seq_length: 4096, max_prompt_length: 30}
algorithm:
  rollout_epoch: 4
  eval_rollout_epoch: 3
  n_chunk_steps: 4
  sampling_params: {temperature_train: 1.6}
  length_params: {max_new_token: 7}
env: {enable_offload: true, eval: {rollout_epoch: "${algorithm.eval_rollout_epoch}"}}
rollout: {generation_backend: huggingface, unnorm_key: libero_10}
actor: {model: {OpenPI: {noise_level: 0.3}}}
""",
    )
    with caplog.at_level(logging.WARNING):
        cfg = load(name=path)
        load(name=path)
    assert (cfg.env.train.rollout_epoch, cfg.env.eval.rollout_epoch) == (4, 3)
    assert cfg.env.train.enable_offload
    assert cfg.env.eval.enable_offload
    assert cfg.rollout.sampling_params.temperature_train == 1.6
    assert cfg.actor.model.openpi.noise_level == 0.3
    assert cfg.actor.model.openpi.state_dim == 2  # the fragment's block is merged, not replaced
    messages = [r.getMessage() for r in caplog.records if r.name == "rlinf.compat.keys"]
    assert messages.count("algorithm.rollout_epoch is now env.train.rollout_epoch") == 1
    assert "env.enable_offload is now env.train.enable_offload and env.eval.enable_offload" in messages
    assert [m for m in messages if "no effect here" in m] == [
        f"{path}: no effect here, as docs/compat.md explains: algorithm.n_chunk_steps, algorithm.length_params, "
        "runner.seq_length, runner.max_prompt_length, rollout.unnorm_key, rollout.generation_backend"
    ]


def test_old_names_on_the_command_line_win_over_files() -> None:
    cfg = load("algorithm.rollout_epoch=4", "actor.model.OpenPI.noise_level=0.2")
    assert (cfg.env.train.rollout_epoch, cfg.actor.model.openpi.noise_level) == (4, 0.2)


def test_old_and_new_name_in_one_file_must_agree(tmp_path: Path) -> None:
    path = write(tmp_path, "algorithm: {rollout_epoch: 4}\nenv: {train: {rollout_epoch: 2}}")
    with pytest.raises(UserError) as error:
        load(name=path)
    assert str(error.value) == (
        f"{path}: algorithm.rollout_epoch=4 is the old name of env.train.rollout_epoch=2; "
        "keep only env.train.rollout_epoch"
    )


def test_evaluation_takes_the_rollout_model() -> None:
    evaluation = load("runner.eval_random=true", "rollout.model.precision=fp32", purpose="eval")
    assert evaluation.actor.model.precision == "fp32"
    assert load("rollout.model.precision=fp32").actor.model.precision is None
    evaluation = load("runner.only_eval=true", "runner.eval_random=true", "rollout.model.precision=fp32")
    assert evaluation.actor.model.precision == "fp32"


def test_evaluation_only_config_without_an_actor(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(
        """
defaults: [env@env.eval: toy, model@rollout.model: pi0, _self_]
runner: {task_type: embodied_eval, eval_random: true}
rollout: {model: {size: compact, num_action_chunks: 2, action_dim: 2, openpi: {state_dim: 2}}}
"""
    )
    cfg = load(name=str(file))
    assert cfg.runner.only_eval
    assert (cfg.actor.model.size, cfg.actor.model.action_dim) == ("compact", 2)


def test_placeholder_of_a_small_size_means_random_weights(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cfg = load("actor.model.size=compact", name="metaworld_50_ppo_openpi")
    assert cfg.actor.model.model_path is None
    assert "actor.model.model_path is not set: the policy starts from random weights" in caplog.messages


@pytest.mark.parametrize("text", ["- a\n- b\n", "? [a, b]\n: 1\n"])
def test_what_is_no_config_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"mine"):
        load_config(str(file))


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_no_traceback(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with contextlib.suppress(UserError):
        load_config(str(file), purpose="plan", devices=[0])


def test_training_plays_whole_chunks_where_evaluations_may_cut_them() -> None:
    cfg = load_config("calvin_d_d_ppo_openpi", purpose="plan", devices=[8])
    assert cfg.env.train.init_params["whole_chunks"] is True
    assert "whole_chunks" not in cfg.env.eval.init_params


def test_an_evaluation_may_have_more_ranks_than_a_batch_has_samples() -> None:
    batch = ["actor.global_batch_size=2", "actor.micro_batch_size=2"]
    cfg = load_config("toy_ppo_compact", [*batch, "runner.eval_random=true"], purpose="eval")
    assert micro_batch_size(cfg, 4) == 1


BOMB = "a: &a [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (BOMB, r"its aliases \(&name, \*name\) expand to 1.23e\+09 values; 100000 are the most"),
        ("runner: &run {logger: *run}", r"its aliases \(&name, \*name\) expand without end; 100000 are the most"),
        ("defaults: [mine]", "its `defaults` lead back to a file they start from, or its blocks are nested too deeply"),
        (
            "runner: " + "{a: " * 3000 + "1" + "}" * 3000,
            "its `defaults` lead back .*, or its blocks are nested too deep",
        ),
    ],
)
def test_a_file_without_end_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"mine.yaml: {line}"):
        load_config(str(file))


def test_a_value_without_end_is_one_line() -> None:
    for value in ("[" * 500, "&a [*a]"):
        with pytest.raises(UserError, match=r"^command line: .*(nested too deeply|expand without end)"):
            load_config("toy_ppo_compact", [f"collect.tasks={value}"])


def test_the_home_folder_in_paths_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["runner.logger.log_path=~/runs", "collect.output=~/demos", "sft.output=~/policy"]
    cfg = load_config("toy_ppo_compact", paths, devices=[0])
    video = cfg.env.eval.video_cfg.video_base_dir
    assert (cfg.runner.logger.log_path, video) == ("/home/me/runs", "/home/me/runs/video/eval")
    assert (cfg.collect.output, cfg.sft.output) == ("/home/me/demos", "/home/me/policy")
