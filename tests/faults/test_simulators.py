"""Simulators that die, hang, raise or are not installed: the run goes on, or stops with a line that says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.demos.player import DemoJob, DemoPlayer
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.envs.vec import VecEnv
from rlinf.errors import SimulatorError, UserError
from tests.runs import hide_gl, is_alive, wait_gone

CHUNK = 4
Make = Callable[..., VecEnv]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    open_envs: list[VecEnv] = []

    def build(
        num_envs: int = 4, *, mode: Any = "train", fault: dict[str, Any] | None = None, **settings: Any
    ) -> VecEnv:
        params = {"fault_file": str(tmp_path / "faults"), **fault} if fault else {}
        defaults = {"total_num_envs": num_envs, "max_episode_steps": 12, "num_processes": 2, "init_params": params}
        cfg = EnvConfig(**{"env_type": "toy"} | defaults | settings)
        spec = env_spec(cfg)
        trials = eval_trials(cfg, spec) if mode == "eval" else None
        env = VecEnv(cfg, spec, env_ids=range(num_envs), mode=mode, chunk_size=CHUNK, seed=0, trials=trials)
        open_envs.append(env)
        return env

    yield build
    for env in open_envs:
        env.close()


def idle(env: VecEnv) -> torch.Tensor:
    return torch.zeros(env.num_envs, CHUNK, env.spec.action_dim)


def test_a_simulator_that_dies_while_its_state_is_saved_begins_anew(make: Make) -> None:
    env, other = make(auto_reset=True), make(auto_reset=True)
    env.reset()
    env.chunk_step(idle(env))
    assert not env.began_anew()
    os.kill(env._fleet.pids()[0], signal.SIGKILL)
    state = env.state()
    assert [e["elapsed"] for e in state["episodes"]] == [0, 0, CHUNK, CHUNK]
    assert [e["number"] for e in state["episodes"]] == [1, 1, 0, 0]
    assert (env.began_anew(), env.began_anew()) == (True, False)
    resumed = other.load_state(state)
    assert resumed.obs.images.equal(env.start().obs.images)
    assert env.chunk_step(idle(env)).rewards.equal(other.chunk_step(idle(other)).rewards)


def test_a_killed_simulator_restarts_and_its_steps_are_masked(make: Make) -> None:
    env = make()
    before = env.reset()
    env.chunk_step(idle(env))
    os.kill(env._fleet.pids()[0], signal.SIGKILL)
    step = env.chunk_step(idle(env))
    assert step.lost.tolist() == [True, True, False, False]
    assert step.valid.tolist() == [[False] * CHUNK] * 2 + [[True] * CHUNK] * 2
    assert env.num_restarts == 1
    assert not torch.equal(step.obs.images[0], before.obs.images[0])  # a fresh episode, from the next id
    after = [env.chunk_step(idle(env)) for _ in range(3)]
    assert not any(s.lost.any() for s in after)
    ends = [s.truncated.any(1).tolist() for s in after]
    assert ends[0] == [False, False, True, True]  # the survivors end on time
    assert ends[2] == [True, True, False, False]  # the restarted ones two chunks later
    assert [r.env_id for r in env.drain_episodes()] == [2, 3, 0, 1]


def test_a_hung_simulator_meets_its_deadline_while_the_others_step(make: Make) -> None:
    env = make(fault={"fault": "hang"}, step_deadline_s=0.5)
    env.reset()
    step = env.chunk_step(idle(env))
    assert sorted(step.lost.tolist()) == [False, False, True, True]
    assert step.valid.any(1).tolist() == (~step.lost).tolist()
    assert env.chunk_step(idle(env)).valid.all()


@pytest.mark.parametrize(("fault", "lost"), [("crash", 2), ("raise", 1), ("nan", 1)])
def test_a_fault_costs_no_more_than_it_must(make: Make, fault: str, lost: int) -> None:
    env = make(fault={"fault": fault})
    env.reset()
    step = env.chunk_step(idle(env))
    assert int(step.lost.sum()) == lost  # a dead process loses its scenes, a raising scene only itself
    assert int(step.valid.all(1).sum()) == 4 - lost
    assert env.chunk_step(idle(env)).valid.all()


@pytest.mark.parametrize("fault", ["raise", "crash"])
def test_three_failing_resets_are_survived_and_groups_stay_equal(make: Make, fault: str) -> None:
    env = make(fault={"fault": fault, "fault_at": "reset", "fault_times": 3}, group_size=2, num_processes=1)
    step = env.reset()
    assert env.num_restarts == 3
    assert torch.equal(step.obs.images[[0, 2]], step.obs.images[[1, 3]])
    assert env.chunk_step(idle(env)).valid.all()


def test_a_simulator_that_never_recovers_stops_the_run_by_name(make: Make) -> None:
    env = make(1, fault={"fault": "raise", "fault_at": "reset", "fault_times": 99}, max_restarts=2)
    with pytest.raises(SimulatorError) as error:
        env.reset()
    text = str(error.value)
    first_line = text.splitlines()[0]
    assert first_line.startswith("simulator 'toy' of envs 0-0 failed while playing env 0 task (starting) reset id ")
    assert "RuntimeError: toy fault on request" in text
    assert text.endswith("given up after 2 restarts in one step (max_restarts)")


def test_a_lost_trial_is_played_again(make: Make) -> None:
    env = make(2, mode="eval", num_trials=4, fault={"fault": "crash"})
    env.reset()
    while not env.done:
        env.chunk_step(idle(env))
    records = env.drain_episodes()
    assert env.num_restarts == 1
    assert sorted(r.reset_id for r in records) == sorted(eval_trials(env.cfg, env.spec))


def test_the_last_words_of_a_dead_simulator_are_shown(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'the driver went away'); os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SimulatorError, match=r"died \(exit status 3\); it printed:\nthe driver went away$"):
        make(1).reset()


def test_demonstrations_of_a_dead_simulator_stop_with_the_same_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'the driver went away'); os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cfg = EnvConfig(env_type="toy", num_processes=1)
    with DemoPlayer(cfg, env_spec(cfg)) as player, pytest.raises(SimulatorError, match=r"the driver went away$"):
        list(player.play([DemoJob(reset_id=100_000, max_steps=1)]))


@pytest.mark.parametrize("fault", ["crash", "raise"])
def test_a_demonstration_whose_simulator_dies_is_played_again(tmp_path: Path, fault: str) -> None:
    jobs = [DemoJob(reset_id, max_steps=40, noise_std=0.6, noise_seed=reset_id) for reset_id in range(100_000, 100_005)]
    played = []
    for params in ({}, {"fault": fault, "fault_times": 2, "fault_file": str(tmp_path / "faults")}):
        cfg = EnvConfig(env_type="toy", num_processes=2, init_params=params)
        with DemoPlayer(cfg, env_spec(cfg)) as player:
            played.append(list(player.play(jobs)))
            assert player.num_restarts == (2 if params else 0)
    for calm, faulty in zip(*played, strict=True):
        assert (calm.job, calm.task, calm.description, calm.success) == (
            faulty.job,
            faulty.task,
            faulty.description,
            True,
        )
        for name in ("images", "states", "labels", "actions", "critic_state"):
            assert np.array_equal(getattr(calm, name), getattr(faulty, name)), name


def test_a_missing_package_names_itself_and_the_cure(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mujoco.py").write_text("raise ModuleNotFoundError(\"No module named 'mujoco'\", name='mujoco')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError) as error:
        make(1, env_type="metaworld").reset()
    assert "simulator 'metaworld' needs the Python package 'mujoco'" in str(error.value)
    assert str(error.value).endswith("pip install -r requirements/envs/metaworld.txt")


@pytest.mark.parametrize(
    ("gl", "cure"),
    [
        ("auto", "apt-get install -y libosmesa6 (or: apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri)"),
        ("osmesa", "gl=osmesa, but libOSMesa is missing; install it with: apt-get install -y libosmesa6"),
    ],
)
def test_a_missing_gl_library_names_the_apt_line(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gl: str, cure: str
) -> None:
    hide_gl(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with pytest.raises(UserError) as error:
        make(1, env_type="metaworld", init_params={"gl": gl}).reset()
    assert str(error.value).endswith(cure)


def test_a_wrong_interpreter_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match="python='/no/such/python' of simulator 'toy' is not an executable file"):
        make(1, python="/no/such/python").reset()


def test_nothing_is_left_after_close(make: Make) -> None:
    env = make()
    env.reset()
    pids, files = env._fleet.pids(), len(os.listdir("/proc/self/fd"))
    assert all(map(is_alive, pids))
    env.close()
    assert not any(map(is_alive, pids))
    assert len(os.listdir("/proc/self/fd")) < files


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Not even a child that hangs inside its simulator."""
    code = (
        "import torch\n"
        "from rlinf.config.schema import EnvConfig\n"
        "from rlinf.envs.spec import env_spec\n"
        "from rlinf.envs.vec import VecEnv\n"
        f"params = {{'fault': 'hang', 'fault_file': {str(tmp_path / 'faults')!r}}}\n"
        "cfg = EnvConfig(env_type='toy', total_num_envs=2, num_processes=2, init_params=params)\n"
        "env = VecEnv(cfg, env_spec(cfg), env_ids=[0, 1], mode='train', chunk_size=1, seed=0)\n"
        "env.reset()\n"
        "print(*env._fleet.pids(), flush=True)\n"
        "env.chunk_step(torch.zeros(2, 1, 2))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    while not (tmp_path / "faults.0").exists():  # one child hangs, the other waits for its next command
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_gone(pids)


def test_restarts_count_anew_every_step(make: Make) -> None:
    env = make(1, max_restarts=1)
    env.reset()
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        env.begin_step()
        os.kill(env._fleet.pids()[0], signal.SIGKILL)
        assert env.chunk_step(idle(env)).lost.all()
    assert env.num_restarts == 3
    assert len(os.listdir("/proc/self/fd")) <= files
    env.reset(new_step=False)  # a further rollout epoch of the same step
    os.kill(env._fleet.pids()[0], signal.SIGKILL)
    with pytest.raises(SimulatorError, match="given up after 1 restarts"):
        env.chunk_step(idle(env))
