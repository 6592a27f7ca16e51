"""What a person gets wrong, through the real command line: the exact line, its exit status, never a traceback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.commands import cli
from rlinf.errors import install_line
from tests.conftest import REPO
from tests.runs import hide_gl

TOY = "examples/embodiment/config/toy_ppo_compact.yaml"
TWO_ENV_RANKS = 'cluster.component_placement={"actor,rollout": "0", env: "0:0-1"}'
QUIET = "runner.logger.logger_backends=[]"


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The line that begins with `error:`; there is exactly one, and no traceback anywhere."""
        assert "Traceback" not in self.out + self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line.removeprefix("error: ")


def call(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Outcome:
    """`rlinf ARGUMENTS` in this process."""
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, "argv", ["rlinf", *arguments])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert isinstance(stop.value.code, int)
    return Outcome(stop.value.code, *capfd.readouterr())


def rlinf(*arguments: str, **environment: str) -> Outcome:
    """`rlinf ARGUMENTS` as a user starts it."""
    command = [sys.executable, "-m", "rlinf", *arguments]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=env, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


TABLE = {
    "unknown command": (["trian", "toy_ppo_compact"], "No such command 'trian'. Did you mean 'train'?"),
    "missing argument": (["train"], "Missing argument 'CONFIG'."),
    "unknown option": (["train", "toy_ppo_compact", "--foo"], "No such option: --foo"),
    "unknown config": (
        ["train", "toy_ppo_compat"],
        "config 'toy_ppo_compat' not found in examples/embodiment/config; did you mean toy_ppo_compact, "
        "toy_grpo_compact, toy_ppo_openvla_compact?",
    ),
    "not an override": (
        ["train", "toy_ppo_compact", "runner.max_epochs"],
        "command line: 'runner.max_epochs' is not an override; write key=value, for example runner.max_steps=10, or "
        "~key to remove a key",
    ),
    "unknown key": (
        ["train", "toy_ppo_compact", "runner.max_epoch=3"],
        "command line: unknown key runner.max_epoch; did you mean runner.max_epochs?",
    ),
    "unknown simulator option": (
        ["train", "toy_ppo_compact", "env.train.init_params.image_sise=3"],
        "command line: unknown key env.train.init_params.image_sise; did you mean env.train.init_params.image_size?",
    ),
    "wrong type": (
        ["train", "toy_ppo_compact", "actor.optim.lr=fast"],
        "command line: actor.optim.lr='fast' must be a number from 0 to 10; default is 1e-05",
    ),
    "wrong choice": (
        ["train", "toy_ppo_compact", "actor.model.openpi.noise_method=flow_sd"],
        "command line: actor.model.openpi.noise_method='flow_sd' must be 'flow_sde' or 'flow_noise' or 'flow_cps' or "
        "'flow_ode' (did you mean 'flow_sde'?)",
    ),
    "12 envs, 2 ranks, 4 stages": (
        ["train", "toy_ppo_compact", TWO_ENV_RANKS, "env.train.total_num_envs=12", "rollout.pipeline_stage_num=4"],
        "env.train.total_num_envs=12 must divide by env ranks x stages = 2 x 4 = 8; nearest are 8 and 16",
    ),
    "chunk does not divide": (
        ["train", "toy_ppo_compact", "env.train.max_steps_per_rollout_epoch=9"],
        "env.train.max_steps_per_rollout_epoch=9 must divide by actor.model.num_action_chunks=2; nearest are 8 and 10",
    ),
    "global batch does not divide": (
        ["train", "toy_ppo_compact", "actor.global_batch_size=96"],
        "actor.global_batch_size=96 must divide the rollout of 128 samples (chunks x envs x rollout_epoch = "
        "4 x 16 x 2); nearest are 64 and 128",
    ),
    "GRPO with group 1": (
        ["train", "toy_grpo_compact", "algorithm.group_size=1"],
        "algorithm.group_size=1 must be at least 2 for adv_type grpo, which compares group members",
    ),
    "placeholder of a model path": (
        ["train", "metaworld_50_ppo_openpi"],
        "actor.model.model_path='/path/to/model/RLinf-Pi0-MetaWorld-SFT' is a placeholder; set it to the folder of the "
        "downloaded checkpoint",
    ),
    "no model path": (
        ["eval", "metaworld_50_ppo_openpi", "actor.model.model_path=null"],
        "actor.model.model_path is not set; size base needs a checkpoint folder (actor.model.size=compact starts "
        "without one)",
    ),
    "model path that does not exist": (
        ["train", "toy_ppo_compact", "actor.model.model_path=/no/such/policy"],
        "actor.model.model_path='/no/such/policy' does not exist",
    ),
    "checkpoint that does not exist": (
        ["eval", "toy_ppo_compact", "runner.ckpt_path=/no/such/global_step_3"],
        "runner.ckpt_path=/no/such/global_step_3 does not exist; expected the folder of a run, of its checkpoint "
        "global_step_N or of a policy",
    ),
    "resuming an evaluation": (
        ["train", "toy_ppo_compact", "runner.only_eval=true", "runner.resume_dir=auto"],
        "runner.resume_dir=auto continues a training run; evaluate a checkpoint with "
        "runner.ckpt_path=<...>/global_step_N",
    ),
    "two image sizes": (
        ["train", "metaworld_50_ppo_openpi", "env.train.init_params={image_size: 64, camera_heights: 480}"],
        "command line: env.train.init_params: image_size=64 and camera_heights=480 must be equal: they name one square "
        "image",
    ),
    "LoRA target that does not exist": (
        ["train", "toy_ppo_compact", "actor.model.is_lora=true", "actor.model.lora_targets=[action_in_prj]"],
        "actor.model.lora_targets: action_in_prj names no layer of this model (did you mean 'action_in_proj'?); endings"
        ": action_in_proj, action_out_proj, action_time_mlp_in, action_time_mlp_out, down_proj, fc1, fc2, gate_proj, "
        "k_proj, linear, o_proj, out_proj, patch_embedding, q_proj, state_proj, up_proj, v_proj",
    ),
    "export of nothing": (
        ["export", "/no/such/global_step_3", "out"],
        "CHECKPOINT=/no/such/global_step_3 does not exist; expected the folder of a run, of its checkpoint "
        "global_step_N or of a policy",
    ),
    "not a run folder": (
        ["report", "/no/such/run"],
        "/no/such/run is not a folder; a report is made of run folders, which hold metrics.jsonl",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_one_line_and_status_2(case, monkeypatch, capfd):
    arguments, line = TABLE[case]
    outcome = call(arguments, monkeypatch, capfd)
    assert outcome.error == line
    assert outcome.status == 2


@pytest.mark.parametrize("case", ["unknown command", "wrong type", "GRPO with group 1"])
def test_the_same_in_a_process_of_its_own(case):
    arguments, line = TABLE[case]
    outcome = rlinf(*arguments)
    assert (outcome.status, outcome.error, outcome.out) == (2, line, "")


def test_rlinf_alone_shows_its_help(monkeypatch, capfd):
    outcome = call([], monkeypatch, capfd)
    assert outcome.status == 2
    assert outcome.err == ""
    assert all(name in outcome.out for name in ("train", "eval", "sft", "collect", "plan", "doctor", "Exit status:"))
    assert "(train and sft save the running step first" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("runner: {max_epoch: 3}", "unknown key runner.max_epoch; did you mean runner.max_epochs?"),
        ("env: {train: {total_envs: 3}}", "unknown key env.train.total_envs; did you mean env.train.total_num_envs?"),
        ("algorithm: {gamma: high}", "algorithm.gamma='high' must be a number from 0 to 1; default is 0.99"),
        (
            "runner: [1, 2]",
            "In 'mine': ConfigTypeError raised while composing config: Cannot merge DictConfig with ListConfig",
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_file(text, line, tmp_path, monkeypatch, capfd):
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [toy_ppo_compact, _self_]\n{text}\n")
    outcome = call(["train", str(file)], monkeypatch, capfd)
    assert outcome.error == f"{file}: {line}"
    assert outcome.status == 2


def test_a_file_that_is_no_yaml(tmp_path, monkeypatch, capfd):
    file = tmp_path / "mine.yaml"
    file.write_text("runner: {max_epochs: 3\nenv: [")
    outcome = call(["plan", str(file)], monkeypatch, capfd)
    assert outcome.error.startswith(f"{file}: ")
    assert outcome.status == 2


# ---------------------------------------------------------------- refused before anything heavy starts
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["runner.logger.log_path={file}/run"], "runner.logger.log_path={file}/run cannot be written: Not a directory"),
        (
            ["runner.resume_dir={folder}/global_step_9"],
            "runner.resume_dir={folder}/global_step_9 does not exist; there: none",
        ),
        (
            ["runner.logger.logger_backends=[wandb]"],
            "runner.logger.logger_backends asks for wandb, which is not installed: "
            f"{install_line('wandb')}, or take wandb out of the list",
        ),
    ],
)
def test_refused_before_a_worker_starts(overrides, line, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("rlinf.metrics.loggers.find_spec", lambda name: None if name == "wandb" else name)
    monkeypatch.setattr("rlinf.runner.make_cluster", lambda *_: pytest.fail("the cluster was started"))
    (tmp_path / "file").touch()
    names = {"file": tmp_path / "file", "folder": tmp_path}
    own = [f"runner.logger.log_path={tmp_path}", QUIET, *(o.format(**names) for o in overrides)]
    outcome = call(["train", "toy_ppo_compact", *own], monkeypatch, capfd)
    assert outcome.error == line.format(**names)
    assert outcome.status == 2


def test_demonstrations_of_another_robot(tmp_path, monkeypatch, capfd):
    demos = tmp_path / "demos"
    few = [f"collect.output={demos}", "collect.episodes_per_task=1"]
    assert call(["collect", "toy_ppo_compact", *few], monkeypatch, capfd).status == 0
    wide = ["actor.model.size=compact", f"sft.dataset={demos}", f"sft.output={tmp_path}/policy"]
    outcome = call(["sft", "metaworld_50_grpo_openvlaoft", *wide], monkeypatch, capfd)
    assert outcome.error == (
        f"actor.model.action_dim=7 must be 2, the action columns of sft.dataset={demos}; set actor.model.action_dim=2"
    )
    assert outcome.status == 2


# ---------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with both checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    outcome = rlinf("train", "toy_ppo_compact", *small(folder), "runner.max_epochs=2", "runner.save_interval=1")
    assert outcome.status == 0, outcome.err
    return folder


def small(folder: Path) -> list[str]:
    return [f"runner.logger.log_path={folder}", QUIET, "env.train.rollout_epoch=1", "algorithm.update_epoch=1"]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "toy_ppo_compact" / "checkpoints" / f"global_step_{step}"


@pytest.fixture
def corrupt(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run whose newest checkpoint has one flipped byte."""
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(trained), str(folder)], check=True)
    file = checkpoint(folder, 2) / "actor/model/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return folder


WRONG_SUM = "actor/model/model.safetensors is corrupt, its checksum differs from manifest.json"


@pytest.mark.parametrize("key", ["resume_dir", "ckpt_path"])
def test_a_corrupt_checkpoint_is_refused_by_name(key, corrupt, monkeypatch, capfd):
    bad = checkpoint(corrupt, 2)
    outcome = call(["train", "toy_ppo_compact", *small(corrupt), f"runner.{key}={bad}"], monkeypatch, capfd)
    assert outcome.error == f"checkpoint {bad}: {WRONG_SUM}"
    assert outcome.status == 2


def test_auto_falls_back_to_the_one_before_with_a_warning(corrupt, monkeypatch, capfd, caplog):
    arguments = ["train", "toy_ppo_compact", *small(corrupt), "runner.resume_dir=auto", "runner.max_epochs=2"]
    outcome = call(arguments, monkeypatch, capfd)
    assert outcome.status == 0
    assert f"warning: checkpoint {checkpoint(corrupt, 2)}: {WRONG_SUM}; trying the one before it" in outcome.out
    assert re.findall(r"^success .* step (\d+)/2 ", outcome.out, re.M) == ["2"]  # step 1 was there


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "rollout.pipeline_stage_num=2",
            "the checkpoint was made with 16 envs per env rank and stage, not 8; keep env.train.total_num_envs and "
            "rollout.pipeline_stage_num, or start from runner.ckpt_path",
        ),
        (
            "actor.model.openpi.train_expert_only=true",
            "the checkpoint's optimiser trained net.paligemma_with_expert.paligemma.model.language_model.embed_tokens."
            "weight, which this configuration does not; resume with the run's own settings, or start from "
            "runner.ckpt_path",
        ),
        ("actor.model.openpi.action_horizon=4", "says action_horizon=2, this configuration needs 4"),
    ],
)
def test_resuming_with_other_settings(override, line, trained, tmp_path, monkeypatch, capfd):
    resume = [f"runner.resume_dir={checkpoint(trained, 2)}", "runner.max_epochs=3", override]
    outcome = call(["train", "toy_ppo_compact", *small(tmp_path), *resume], monkeypatch, capfd)
    assert outcome.error.endswith(line)
    assert outcome.status == 2


# ---------------------------------------------------------------- failures of a running job
@pytest.mark.parametrize("command", ["train", "eval"])
def test_an_action_that_is_not_finite_names_env_and_step(command, trained, tmp_path, monkeypatch, capfd):
    policy = tmp_path / "policy"
    subprocess.run(["cp", "-r", str(checkpoint(trained, 2) / "actor/model"), str(policy)], check=True)
    weights = load_file(policy / "model.safetensors")
    save_file({k: torch.full_like(v, torch.nan) for k, v in weights.items()}, policy / "model.safetensors")
    arguments = [command, "toy_ppo_compact", *small(tmp_path / "run"), f"actor.model.model_path={policy}"]
    outcome = call(arguments, monkeypatch, capfd)
    wanted = r"action of env 0 is not finite: nan in column 0 \(x\) at step 0 of reset id \d+"
    assert re.fullmatch(wanted, outcome.error)
    assert outcome.status == 2


@pytest.mark.parametrize("fault", ["crash", "raise"])
def test_a_dead_simulator_stops_the_run_with_status_3(fault, tmp_path, monkeypatch, capfd):
    params = f"{{fault: {fault}, fault_at: step, fault_times: 99, fault_file: {tmp_path}/faults}}"
    arguments = ["env.train.max_restarts=1", "env.train.num_processes=1", f"env.train.init_params={params}"]
    outcome = call(["train", "toy_ppo_compact", *small(tmp_path / "run"), *arguments], monkeypatch, capfd)
    what = {
        "crash": r"simulator 'toy' process 0 \(envs 0-15\) died \(exit status -9\)",
        "raise": "RuntimeError: toy fault on request",
    }[fault]
    culprit = r"simulator 'toy' of envs 0-15 failed while playing env \d+ task reach-(red|blue) reset id \d+"
    assert re.fullmatch(rf"{culprit}.*: {what}", outcome.error)
    assert outcome.err.endswith("\ngiven up after 1 restarts in one step (max_restarts)\n")
    assert outcome.status == 3


def test_a_dead_simulator_in_an_evaluation(tmp_path, monkeypatch, capfd):
    params = f"{{fault: raise, fault_at: reset, fault_times: 99, fault_file: {tmp_path}/faults}}"
    overrides = ["--random", "env.eval.num_processes=1", f"env.eval.init_params={params}"]
    outcome = call(["eval", "toy_ppo_compact", *small(tmp_path / "run"), *overrides], monkeypatch, capfd)
    assert outcome.error.startswith("simulator 'toy' of envs 0-15 failed while playing env ")
    assert outcome.status == 3
    assert not (tmp_path / "run" / "eval").exists()


def infinite_advantages(steps, cfg, all_reduce):
    """An estimator that no update survives."""
    return torch.full_like(steps.rewards, torch.inf), None


def test_training_that_diverges_ends_with_status_4(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "diverging", SimpleNamespace(infinite_advantages=infinite_advantages))
    overrides = ["actor.max_nonfinite_steps=1", "algorithm.adv_type=diverging.infinite_advantages"]
    overrides += ["algorithm.loss_type=actor"]
    outcome = call(["train", "toy_ppo_compact", *small(tmp_path / "run"), *overrides], monkeypatch, capfd)
    assert outcome.error == (
        "the gradient was not finite for 1 optimiser steps in a row (actor.max_nonfinite_steps); "
        "lower actor.optim.lr or look at the rewards and values in metrics.jsonl"
    )
    assert outcome.status == 4


def test_a_missing_gl_library_names_the_apt_line(tmp_path):
    hide_gl(tmp_path)
    arguments = ["eval", "quickstart", "--random", f"runner.logger.log_path={tmp_path}"]
    outcome = rlinf(*arguments, PYTHONPATH=str(tmp_path), MUJOCO_GL="")
    assert outcome.error == (
        "simulator 'metaworld': no headless OpenGL library was found; install one with: apt-get install -y libosmesa6 "
        "(or: apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri)"
    )
    assert outcome.status == 2


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("pyarrow", "datasets", ["collect", "toy_ppo_compact", "collect.output={}/demos"]),
        ("peft", "lora", ["train", "toy_ppo_compact", "actor.model.is_lora=true", "runner.logger.log_path={}"]),
    ],
)
def test_a_missing_extra_names_the_install_line(package, extra, arguments, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module {package}', name='{package}')")
    outcome = rlinf(*(a.format(tmp_path) for a in arguments), PYTHONPATH=str(tmp_path))
    line = f"the Python package {package} is not installed: {install_line(extra)}"
    assert (outcome.status, outcome.error) == (2, line)


def test_demonstrations_that_cannot_be_written(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "demos"
    outcome = call(["collect", "toy_ppo_compact", f"collect.output={output}"], monkeypatch, capfd)
    assert (outcome.status, outcome.error) == (2, f"collect.output={output} cannot be written: Not a directory")
