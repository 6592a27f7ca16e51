"""Small real runs for tests: the pixel toy and a compact π0, through the same Runner as everything else."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.metrics.run_log import RunLog
from rlinf.runner import Runner

FEW_MANISKILL = [  # a ManiSkill recipe as small as it goes: two envs, two episodes each
    "actor.model.size=compact",
    "actor.model.precision=fp32",
    "runner.max_epochs=1",
    "runner.val_check_interval=-1",
    "runner.logger.logger_backends=[]",
    "algorithm.update_epoch=1",
    "env.train.total_num_envs=2",
    "env.train.max_episode_steps=10",
    "env.train.max_steps_per_rollout_epoch=20",
    "env.train.num_processes=1",
    "env.train.init_params.sim_backend=cpu",
    "env.train.init_params.sensor_configs.shader_pack=minimal",
    "env.train.init_params.image_size=64",
    "actor.micro_batch_size=8",
    "actor.global_batch_size=8",
]


def toy_config(folder: Path, *overrides: str, name: str = "toy_ppo_compact") -> Config:
    """A toy recipe that writes below `folder`."""
    own = [f"runner.logger.log_path={folder}", "runner.logger.logger_backends=[]"]
    return load_config(name, [*own, *overrides])


def make_runner(cfg: Config) -> Runner:
    return Runner(cfg, make_plan(cfg, [0]), watch=RunLog(cfg))


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie nobody reaps does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def wait_gone(pids: list[int]) -> bool:
    """Whether all of them end within half a minute."""
    for _ in range(300):
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.1)
    return False


def hide_gl(folder: Path) -> None:
    """A sitecustomize.py for PYTHONPATH: a Python that starts with it finds no OpenGL library."""
    (folder / "sitecustomize.py").write_text(
        "import ctypes\n"
        "class CDLL(ctypes.CDLL):\n"
        "    def __init__(self, name, *args, **kwargs):\n"
        "        if 'EGL' in str(name) or 'OSMesa' in str(name):\n"
        "            raise OSError(name)\n"
        "        super().__init__(name, *args, **kwargs)\n"
        "ctypes.CDLL = CDLL\n"
    )


def leaked(before: set[str]) -> set[str]:
    """Names in shared memory that are new and name no living process: those are of tests that run beside this one."""
    new = set(os.listdir("/dev/shm")) - before
    return {n for n in new if not any(Path(f"/proc/{pid}").exists() for pid in re.findall(r"\d{2,}", n))}
