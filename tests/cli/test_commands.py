"""Commands from end to end: evaluating what a run saved, the wrapper scripts, plan and doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from rlinf.commands import doctor, jobs
from rlinf.commands.cli import app
from rlinf.config.load import load_config
from rlinf.errors import UserError
from tests.conftest import REPO
from tests.runs import make_runner, toy_config

SMALL = ("env.train.rollout_epoch=1", "algorithm.update_epoch=1", "env.eval.num_trials=16", "env.eval.num_processes=1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one training step whose critic and statistics are no longer at their start."""
    folder = tmp_path_factory.mktemp("trained")
    runner = make_runner(toy_config(folder, *SMALL, "runner.max_epochs=1", "runner.save_interval=1"))
    try:
        runner.train()
    finally:
        runner.close()
    return folder / "toy_ppo_compact" / "checkpoints" / "global_step_1"


def evaluate(folder: Path, *overrides: str, name: str = "toy_ppo_compact") -> dict[str, Any]:
    """What an evaluation wrote."""
    own = [f"runner.logger.log_path={folder}", *SMALL, *overrides]
    jobs.evaluate(load_config(name, own, purpose="eval"))
    (file,) = (folder / "eval").glob("*/result.json")
    return {"folder": file.parent.name, **json.loads(file.read_text())}


def test_a_checkpoint_is_evaluated_by_its_folder_its_policy_or_its_weights(saved, tmp_path):
    policy = saved / "actor" / "model"
    pickled = tmp_path / "full_weights.pt"
    torch.save(load_file(policy / "model.safetensors"), pickled)
    want = evaluate(tmp_path / "model_path", f"actor.model.model_path={policy}")
    assert len(want["episodes"]) == 16
    assert want["folder"] == "step_0"

    by_step = evaluate(tmp_path / "step", f"runner.ckpt_path={saved}")
    assert by_step["folder"] == "step_1"
    by_policy = evaluate(tmp_path / "policy", f"runner.ckpt_path={policy}")
    by_config = evaluate(tmp_path / "run", f"runner.ckpt_path={saved}", name=str(saved.parents[2] / "config.yaml"))
    by_file = evaluate(tmp_path / "file", f"runner.ckpt_path={policy / 'model.safetensors'}")
    by_pickle = evaluate(tmp_path / "pickle", f"runner.ckpt_path={pickled}")
    for got in (by_step, by_policy, by_config, by_file, by_pickle):
        assert got["episodes"] == want["episodes"]
    untrained = evaluate(tmp_path / "untrained", "runner.eval_random=true")
    assert untrained["episodes"] != want["episodes"]


def test_best_plays_checkpoints_and_never_the_expert(saved, tmp_path):
    own = ["env.eval.num_trials=2", "env.eval.num_processes=1", "runner.logger.logger_backends=[]"]
    own = ["eval", "toy_ppo_compact", f"runner.logger.log_path={tmp_path / 'run'}", *own]
    refused = CliRunner().invoke(
        app, [*own, f"runner.ckpt_path={saved.parents[2]}", "runner.eval_expert=true", "--best"]
    )
    assert isinstance(refused.exception, UserError)
    assert str(refused.exception).startswith("--best chooses a checkpoint, but runner.eval_expert=true")
    assert "selection" not in refused.stdout
    assert not (tmp_path / "run").exists()
    best = CliRunner().invoke(app, [*own, f"runner.ckpt_path={saved.parents[2]}", "--best", "--selection-trials=3"])
    assert "selection: 4 trials instead of 3: whole rounds of all tasks\n" in best.stdout
    assert f"\ncheckpoint  {saved}\n" in best.stdout
    expert = CliRunner().invoke(app, [*own, f"runner.ckpt_path={saved}", "runner.eval_expert=true"])
    assert "\nsuccess     2/2" in expert.stdout
    assert "\ncheckpoint" not in expert.stdout


def test_training_starts_from_ckpt_path(saved, tmp_path):
    cfg = toy_config(tmp_path, f"runner.ckpt_path={saved}")
    assert cfg.actor.model.model_path == str(saved / "actor" / "model")
    runner = make_runner(cfg)
    try:
        runner.cluster.get(runner.actor.call("save", tmp_path))
    finally:
        runner.close()
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path, saved / "actor"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"w": [1, 2]}, "is not a table of named tensors"),
        (b"not a pickle", "cannot be read as plain tensors"),
        ({"net.extra": torch.zeros(2)}, "holds 1 tensors this model does not have: net.extra"),
    ],
)
def test_a_pt_file_that_is_something_else(content, message, tmp_path):
    file = tmp_path / "weights.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "run", f"runner.ckpt_path={file}")


# ---------------------------------------------------------------- wrapper scripts
def script(name: str, log_dir: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "LOG_DIR": str(log_dir), "OMP_NUM_THREADS": "1"} | environment
    command = ["bash", str(REPO / "examples/embodiment" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=log_dir.parent, check=False)


def test_the_wrapper_scripts_train_and_evaluate(tmp_path):
    train = script("run_embodiment.sh", tmp_path / "run", "toy_ppo_compact", *SMALL, STEPS="1", SAVE_INTER="1")
    assert train.returncode == 0, train.stdout + train.stderr
    log = (tmp_path / "run" / "run_embodiment.log").read_text()
    assert "Global Step:  1/1" in log
    assert log in train.stdout
    saved = tmp_path / "run" / "toy_ppo_compact" / "checkpoints" / "global_step_1"
    assert saved.is_dir()

    evaluation = script("eval_embodiment.sh", tmp_path / "eval", "toy_ppo_compact", *SMALL, f"runner.ckpt_path={saved}")
    assert evaluation.returncode == 0, evaluation.stdout + evaluation.stderr
    assert "evaluation at step 1: success " in (tmp_path / "eval" / "eval_embodiment.log").read_text()


def test_the_wrapper_scripts_pass_the_exit_status_on(tmp_path):
    failed = script("run_embodiment.sh", tmp_path / "run", "toy_ppo_compact", "runner.max_epoch=1")
    assert failed.returncode == 2
    line = "error: command line: unknown key runner.max_epoch; did you mean runner.max_epochs?\n"
    assert (tmp_path / "run" / "run_embodiment.log").read_text() == line
    params = f"{{fault: raise, fault_times: 99, fault_file: {tmp_path}/faults}}"
    random = ["--random", f"env.eval.init_params={params}"]
    failed = script("eval_embodiment.sh", tmp_path / "eval", "toy_ppo_compact", *random)
    assert failed.returncode == 3


def test_train_with_only_eval_is_an_evaluation(tmp_path):
    settings = ["runner.only_eval=true", "runner.eval_random=true"]
    done = script("run_embodiment.sh", tmp_path / "run", "toy_ppo_compact", *SMALL, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluation at step 0: success " in done.stdout
    assert "Global Step" not in done.stdout
    assert [p.name for p in (tmp_path / "run" / "eval").iterdir()] == ["step_0"]


# ---------------------------------------------------------------- doctor
def test_doctor_draws_a_frame_of_every_installed_simulator(capsys):
    assert doctor.run_checks(print)
    out = capsys.readouterr().out
    for line in (
        "ok    python: ",
        "ok    machine: ",
        "ok    files: ",
        "ok    torch: ",
        "ok    simulator toy: drew 64 x 64",
    ):
        assert line in out


def test_doctor_tells_a_missing_package_from_a_broken_one(monkeypatch, tmp_path):
    (tmp_path / "mujoco.py").write_text("raise ModuleNotFoundError(\"No module named 'mujoco'\", name='mujoco')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "available_simulators", lambda: ("metaworld",))
    lines: list[str] = []
    assert doctor.run_checks(lines.append)
    assert lines[-1].startswith("--    simulator metaworld: simulator 'metaworld' needs the Python package 'mujoco'")
    (tmp_path / "mujoco.py").write_text("raise OSError('libGL is broken')")
    assert not doctor.run_checks(lines.append)
    assert lines[-1].startswith("FAIL  simulator metaworld: ")
    assert "OSError: libGL is broken" in lines[-1]
