"""From an `env.train` or `env.eval` block to its simulator, the simulator's options and its spec. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import rlinf.simulators
from rlinf.envs.config import EnvConfig, SimulatorKeys
from rlinf.errors import UserError, did_you_mean
from rlinf.models.config import PolicySpec
from rlinf.plugins import SIMULATOR, available, dotted_path, import_plugin
from rlinf.simulators.contract import TASK_STRIDE, EnvSpec, IdGrid, SetupError
from rlinf.typed import Origin, convert

ARM_POSE = 7  # columns of a policy of one arm: position, rotation, gripper
REQUIRED = ("Options", "spec", "Scene")  # what a simulator's module must offer


@cache
def own_simulators() -> dict[str, str]:
    """Modules of rlinf's own simulators by env_type: every folder of rlinf/simulators is one."""
    folder = Path(rlinf.simulators.__path__[0])
    return {p.parent.name: f"rlinf.simulators.{p.parent.name}" for p in sorted(folder.glob("*/__init__.py"))}


def available_simulators() -> tuple[str, ...]:
    """Every env_type that needs no dotted path."""
    return available(SIMULATOR, list(own_simulators()))


def find_simulator(env_type: str) -> ModuleType:
    """Import the module that implements `env_type`; the simulator itself is imported only when a scene is made."""
    module = import_plugin(SIMULATOR, dotted_path(SIMULATOR, env_type, own_simulators()))
    lacking = [name for name in REQUIRED if name not in vars(module)]
    if lacking:
        raise UserError(f"env_type={env_type}: module {module.__name__} lacks {', '.join(lacking)}")
    return module


def env_options(cfg: EnvConfig, where: str = "env.train", origin: Origin | None = None) -> Any:
    """The simulator's `Options` from init_params, task_suite_name and those of SimulatorKeys that it reads.

    `where` is the key path of the block and `origin` the file that set a key, both for errors.
    """
    cls = find_simulator(cfg.env_type).Options
    options = convert(cls, cfg.init_params, f"{where}.init_params", origin)
    given = {key: value for key, value in _set_keys(cfg).items() if key in _fields(cls)}
    if cfg.task_suite_name is not None:
        given["task_suite_name"] = cfg.task_suite_name
    try:
        return replace(options, **given) if given else options
    except ValueError as error:
        key = next((key for key in given if str(error).startswith(key)), "init_params")
        raise UserError(f"{where}.{key}: {error}") from None


def unread_keys(cfg: EnvConfig, where: str) -> Iterator[str]:
    """One line for every key of the block that is set and that the chosen simulator does not read."""
    read = _fields(find_simulator(cfg.env_type).Options)
    for key, value in _set_keys(cfg).items():
        if key not in read:
            readers = [name for name in own_simulators() if key in _fields(find_simulator(name).Options)]
            who = f"read by {', '.join(readers)}" if readers else "no simulator of rlinf reads it"
            yield f"{where}.{key}={value!r} has no effect on env_type={cfg.env_type}; {who}"


def _set_keys(cfg: EnvConfig) -> dict[str, Any]:
    """Those of SimulatorKeys that differ from their default."""
    return {key: vars(cfg)[key] for key, default in vars(SimulatorKeys()).items() if vars(cfg)[key] != default}


def _fields(cls: type) -> set[str]:
    """Names of a dataclass's fields."""
    return {f.name for f in fields(cls)}


def env_spec(cfg: EnvConfig, where: str = "env.train") -> EnvSpec:
    """The shape of the configured suite, without starting the simulator."""
    spec = find_simulator(cfg.env_type).spec(env_options(cfg, where))
    if cfg.max_episode_steps < spec.min_episode_steps:
        raise UserError(
            f"{where}.max_episode_steps={cfg.max_episode_steps} must be at least {spec.min_episode_steps}: "
            f"an episode of {spec.suite} may last that long with these init_params"
        )
    return spec


def check_setup(cfg: EnvConfig, where: str) -> None:
    """Raise UserError where files of the simulator are missing; called before weights are loaded."""
    module = find_simulator(cfg.env_type)
    if "check_setup" in vars(module):
        try:
            module.check_setup(env_options(cfg, where))
        except SetupError as error:
            raise UserError(f"simulator {cfg.env_type!r}: {error}") from None


def drops_rotation(env: EnvSpec, policy: PolicySpec) -> bool:
    """Whether only position and gripper of the policy's actions reach the simulator, which takes no rotation."""
    return env.gripper != "none" and env.action_dim < policy.action_dim == ARM_POSE


def ids_of_task(spec: EnvSpec, split: str, task: str) -> Sequence[int]:
    """The reset ids of one task in `split` ("train", "demo" or "eval")."""
    if task not in spec.tasks:
        raise UserError(f"task {task!r} is not in suite {spec.suite!r}{did_you_mean(task, spec.tasks)}")
    ids = spec.reset_ids[split]
    if isinstance(ids, IdGrid):
        return ids.of_task(spec.tasks.index(task))
    if len(spec.tasks) == 1:
        return ids
    raise UserError(f"suite {spec.suite!r} does not say which {split} reset ids belong to which task")


def task_of(spec: EnvSpec, split: str, reset_id: int) -> str:
    """The task that a reset id of `split` belongs to; the suite's name where only the simulator knows it."""
    ids = spec.reset_ids[split]
    if len(spec.tasks) > 1 and isinstance(ids, IdGrid):
        return spec.tasks[ids.tasks.index(reset_id // TASK_STRIDE)]
    return spec.tasks[0] if len(spec.tasks) == 1 else spec.suite


def eval_trials(cfg: EnvConfig, spec: EnvSpec) -> list[int]:
    """The held-out reset ids an evaluation plays, once each, in order; a subset is spread evenly over the suite."""
    held_out, wanted = spec.reset_ids["eval"], num_trials(cfg, spec)
    return [held_out[i * len(held_out) // wanted] for i in range(wanted)]


def num_trials(cfg: EnvConfig, spec: EnvSpec) -> int:
    """How many trials an evaluation plays: as many as asked for, or as there are."""
    held_out, wanted = len(spec.reset_ids["eval"]), cfg.num_trials
    if wanted == 0:
        episodes_per_rollout = max(1, cfg.max_steps_per_rollout_epoch // cfg.max_episode_steps)
        wanted = cfg.total_num_envs * episodes_per_rollout * cfg.rollout_epoch
    return held_out if wanted == -1 else min(wanted, held_out)
