"""Four steps in a row equal two steps, kill -9 at a random moment, resume, and on to four: bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf.models.policy import find_policy
from rlinf.storage.step_checkpoint import Manifest
from tests.inside import worker
from tests.runs import children, make_runner, toy_config, wait_gone

OVERRIDES = ["runner.max_epochs=4", "runner.save_interval=1", "env.train.auto_reset=true", "runner.resume_dir=auto"]


def lines(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "run" and not k.startswith(("time/", "system/"))} for row in rows]


def checkpoint(folder: Path, step: int = 4) -> Path:
    return folder / "toy_ppo_compact" / "checkpoints" / f"global_step_{step}" / "actor"


def train(folder: Path) -> list[str]:
    """The command line of the run; every run uses it, so that all have the same number of threads."""
    own = [f"runner.logger.log_path={folder}", "runner.logger.logger_backends=[]"]
    return [sys.executable, "-m", "rlinf", "train", "toy_ppo_compact", *own, *OVERRIDES]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert subprocess.run(train(folder), stdout=subprocess.DEVNULL, check=False).returncode == 0
    return folder


def test_kill_and_resume_equals_an_uninterrupted_run(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    command = train(folder)
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    while not checkpoint(folder, 2).exists() and first.poll() is None:
        time.sleep(0.005)
    time.sleep(random.random() * 0.5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert checkpoint(folder, 2).exists(), first.stderr.read().decode()
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0

    assert lines(folder) == lines(uninterrupted)
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        a, b = load_file(checkpoint(folder) / name), load_file(checkpoint(uninterrupted) / name)
        assert a.keys() == b.keys()
        assert all(a[k].equal(b[k]) for k in a)


def test_sigterm_to_every_process_saves_the_running_step(tmp_path):
    """As clusters send it."""
    command = [sys.executable, "-m", "rlinf", "train", "toy_ppo_compact", "runner.max_epochs=1000"]
    command += [f"runner.logger.log_path={tmp_path}", "runner.logger.logger_backends=[]", "env.train.auto_reset=true"]
    command += ["env.train.total_num_envs=4", "env.train.rollout_epoch=1", "env.train.num_processes=2"]
    command += ["env.train.max_episode_steps=12", "algorithm.update_epoch=40"]  # most of the time is the update's
    command += ["actor.micro_batch_size=16", "actor.global_batch_size=16"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
        assert run.poll() is None
        time.sleep(0.02)
    simulators = children(run.pid)
    assert len(simulators) == 2
    for pid in (*simulators, run.pid):
        os.kill(pid, signal.SIGTERM)
    assert run.wait() == 143
    (saved,) = (tmp_path / "toy_ppo_compact" / "checkpoints").glob("global_step_*")
    assert Manifest.read(saved).step == len(lines(tmp_path))
    assert wait_gone(simulators)


def test_resume_restores_the_normalisation_statistics(tmp_path):
    """A run that began from an imitation policy resumes without it: the checkpoint alone must suffice."""
    policy = find_policy("openpi").build(toy_config(tmp_path).actor.model, torch.device("cpu"), seed=0)
    policy.fit_statistics(torch.randn(64, 2) + 3.0, 0.2 * torch.randn(64, 2) - 0.5)
    policy.save_pretrained(tmp_path / "sft")

    def steps(folder: str, total: int, *overrides: str) -> list[float]:
        cfg = toy_config(
            tmp_path / folder,
            "runner.save_interval=1",
            f"runner.max_epochs={total}",
            "runner.resume_dir=auto",
            *overrides,
        )
        runner = make_runner(cfg)
        try:
            runner.train()
            return [p.detach().double().sum().item() for p in worker(runner, "rollout").policy.parameters()]
        finally:
            runner.close()

    start = f"actor.model.model_path={tmp_path / 'sft'}"
    whole = steps("whole", 2, start)
    steps("parts", 1, start)
    assert steps("parts", 2) == whole
