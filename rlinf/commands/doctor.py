"""`rlinf doctor`: what this machine has, what it lacks, and the line that mends it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import available_simulators, env_spec, find_simulator
from rlinf.errors import NotInstalledError, SimulatorError, UserError, install_line
from rlinf.simulators.contract import AbsentError, SetupError
from rlinf.simulators.maniskill.assets import carrot_folder

logger = logging.getLogger(__name__)
Check = tuple[str, Callable[[], str]]
MIN_FREE_GB = 2.0
CHEAP = {"image_size": 64, "render": "fast"}  # used where a simulator has such options


def run_checks(say: Callable[[str], None]) -> bool:
    """Print one line per check; False if anything needed is missing."""
    healthy = True
    for name, check in checks():
        try:
            say(f"ok    {name}: {check()}")
        except NotInstalledError as absent:
            say(f"--    {name}: {absent}")
        except (UserError, SimulatorError) as problem:
            healthy = False
            say(f"FAIL  {name}: {problem}")
    return healthy


def run_recipe(
    recipe: str,
    overrides: Sequence[str],
    dataset: str | None,
    policy: Path | None,
    episodes: int,
    say: Callable[[str], None],
) -> bool:
    """Print one line per check of a recipe's action path; False where it would not do what the expert did."""
    from rlinf.config.load import load_config
    from rlinf.storage.step_checkpoint import newest_of_run, verify_ckpt_path

    key = "runner.ckpt_path" if policy is None else "--policy"
    if policy is not None and (newest := newest_of_run(str(policy), key=key)) is not None:
        logger.warning("--policy=%s is a run folder; taking its newest step, %s", policy, newest)
        policy = newest
    given = [] if policy is None else [f"runner.ckpt_path={policy}"]
    cfg = load_config(recipe, [*overrides, *given], purpose="doctor")
    if cfg.runner.ckpt_path is not None:
        verify_ckpt_path(cfg.runner.ckpt_path, key=key)
    from rlinf.commands.action_path import check_recipe
    from rlinf.metrics.console import showing_progress

    with showing_progress():
        return check_recipe(cfg, dataset=dataset, episodes=episodes, say=say)


def checks() -> list[Check]:
    """Every check, cheap ones first."""
    machine = [
        ("python", _python),
        ("machine", _machine),
        ("files", _files),
        ("torch", _torch),
        ("packages", _packages),
        ("vulkan", _vulkan),
    ]
    return machine + [(f"simulator {name}", lambda name=name: _frame(name)) for name in available_simulators()]


def _python() -> str:
    return f"{platform.python_version()} in {sys.prefix}"


def _machine() -> str:
    page, cores = os.sysconf("SC_PAGE_SIZE"), len(os.sched_getaffinity(0))
    free, total = (os.sysconf(name) * page / 1e9 for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    if total < MIN_FREE_GB:
        raise UserError(f"{total:.1f} GB of memory is too little; {MIN_FREE_GB:g} GB is the least")
    return f"{cores} cores, {total:.1f} GB memory, {free:.1f} GB of it unused"


def _files() -> str:
    """Runs write below the working folder and share memory with simulators."""
    for folder in (".", tempfile.gettempdir()):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 20))
        except OSError as error:
            raise UserError(f"cannot write to {os.path.abspath(folder)}: {error.strerror}") from error
    free = shutil.disk_usage(".").free / 1e9
    if free < MIN_FREE_GB:
        raise UserError(f"{free:.1f} GB of disk is left here; {MIN_FREE_GB:g} GB is the least")
    return f"{os.getcwd()} is writable, {free:.0f} GB free"


def _torch() -> str:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if float(product[0, 0]) != 8.0:
        raise UserError("torch multiplies matrices wrongly on this machine")
    return f"{torch.__version__} on {device}"


def _packages() -> str:
    wanted = ("tensorboard", "pyarrow", "av", "wandb", "swanlab", "ray")
    there = [n for n in wanted if importlib.util.find_spec(n) is not None]
    absent = [n for n in wanted if n not in there]
    return f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}"


def _vulkan() -> str:
    """Which driver SAPIEN draws with; in a process of its own, as broken drivers crash."""
    if importlib.util.find_spec("sapien") is None:
        raise NotInstalledError(f"only ManiSkill needs it in this environment: {install_line('maniskill')}")
    draw = [] if _has_assets() else ["draw"]  # with assets, the simulator's own check draws
    command = [sys.executable, "-W", "ignore", "-m", "rlinf.simulators.vulkan", *draw]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise UserError(f"SAPIEN cannot draw: {last}; `bash requirements/vulkan.sh` installs a driver that it takes")
    report = json.loads(done.stdout.splitlines()[-1])
    if "problem" in report:
        raise UserError(report["problem"])
    if report.get("contrast", 255.0) < 1.0:
        raise UserError(f"{report['driver']} draws a blank frame")
    return report["driver"] + ("; drew a frame" if draw else "")


def _has_assets() -> bool:
    """Whether there is something for ManiSkill to draw."""
    try:
        carrot_folder()
    except SetupError as problem:
        return not isinstance(problem, AbsentError)
    return True


def _frame(simulator: str) -> str:
    """Start one simulator process and look at the frame it draws."""
    from rlinf.envs.vec import VecEnv

    module = find_simulator(simulator)
    options = {f.name for f in fields(module.Options)}
    params = {k: v for k, v in CHEAP.items() if k in options}
    task = module.smallest_task() if "smallest_task" in vars(module) else {}
    cfg = EnvConfig(env_type=simulator, total_num_envs=1, num_processes=1, init_params=params, task_config=task)
    env = VecEnv(cfg, env_spec(cfg), env_ids=[0], mode="train", chunk_size=5, seed=0)
    try:
        step = env.reset()
    finally:
        env.close()
    image = step.obs.images[0].float()
    if float(image.std()) < 1.0:
        raise UserError("the rendered frame is blank; check the GL or Vulkan driver, or set MUJOCO_GL=osmesa")
    height, width, _ = image.shape
    return f"drew {width} x {height} (mean {float(image.mean()):.0f}), told {step.obs.task_descriptions[0]!r}"
