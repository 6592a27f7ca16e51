"""`rlinf doctor`: what this machine has, what it lacks, and the line that mends it."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable

from rlinf.config.schema import EnvConfig
from rlinf.errors import UserError

Check = tuple[str, Callable[[], str]]


def run_checks(say: Callable[[str], None]) -> bool:
    """Print one line per check; False if anything needed is missing."""
    healthy = True
    for name, check in checks():
        try:
            say(f"ok    {name}: {check()}")
        except UserError as problem:
            healthy = False
            say(f"FAIL  {name}: {problem}")
    return healthy


def checks() -> list[Check]:
    """Every check, cheap ones first."""
    return [("python", _python), ("torch", _torch), ("extras", _extras), ("metaworld frame", _metaworld_frame)]


def _python() -> str:
    return platform.python_version()


def _torch() -> str:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if float(product[0, 0]) != 8.0:
        raise UserError("torch multiplies matrices wrongly on this machine")
    return f"{torch.__version__} on {device}"


def _extras() -> str:
    wanted = ("tensorboard", "pyarrow", "av", "metaworld", "wandb", "swanlab", "ray")
    there = [n for n in wanted if importlib.util.find_spec(n) is not None]
    lacking = [n for n in wanted if n not in there]
    return f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(lacking) or 'none'}"


def _metaworld_frame() -> str:
    """Start one simulator process and look at the frame it draws."""
    if importlib.util.find_spec("metaworld") is None:
        raise UserError('MetaWorld is not installed; pip install -c constraints.txt -e ".[metaworld]"')
    from rlinf.envs.spec import env_spec
    from rlinf.envs.vec import VecEnv

    cfg = EnvConfig(
        env_type="metaworld",
        task_suite_name="reach-v3",
        total_num_envs=1,
        num_processes=1,
        init_params={"image_size": 64, "render": "fast"},
    )
    env = VecEnv(cfg, env_spec(cfg), num_envs=1, first_env=0, mode="train", chunk_size=5, seed=0)
    try:
        image = env.reset().obs.images[0].float()
    finally:
        env.close()
    if float(image.std()) < 1.0:
        raise UserError("the rendered frame is blank; check the GL driver or set MUJOCO_GL=osmesa")
    return f"{tuple(image.shape)}, mean {float(image.mean()):.0f}, std {float(image.std()):.0f}"
