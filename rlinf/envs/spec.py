"""Find a simulator by name and turn an env block of the config into its options and spec. Torch-free."""

from __future__ import annotations

import difflib
import importlib
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlinf.config.schema import EnvConfig
from rlinf.envs.sim.base import EnvSpec, IdGrid, SetupError
from rlinf.errors import UserError

SIM_DIR = Path(__file__).parent / "sim"
_NOT_SIMULATORS = {"__init__", "base", "child"}


@cache
def available_simulators() -> tuple[str, ...]:
    """Every env_type: files and packages under envs/sim that define a Scene."""
    files = {p.stem: p for p in SIM_DIR.glob("*.py")} | {p.parent.name: p for p in SIM_DIR.glob("*/__init__.py")}
    return tuple(sorted(n for n, p in files.items() if n not in _NOT_SIMULATORS and "class Scene" in p.read_text()))


def find_simulator(env_type: str) -> types.ModuleType:
    """The module that implements `env_type`; it imports the simulator itself only inside `Scene`."""
    if env_type not in available_simulators():
        raise UserError(
            f"env_type={env_type!r} is not a simulator{_nearest(env_type, available_simulators())}; "
            f"available: {', '.join(available_simulators())}"
        )
    return importlib.import_module(f"rlinf.envs.sim.{env_type}")


def env_options(cfg: EnvConfig, where: str = "env.train") -> Any:
    """The simulator's `Options` from init_params and task_suite_name; `where` is the key path shown in errors."""
    options_cls = find_simulator(cfg.env_type).Options
    types_by_name = typing.get_type_hints(options_cls)
    names = [f.name for f in fields(options_cls)]
    values = dict(cfg.init_params)
    for key, value in values.items():
        path = f"{where}.init_params.{key}"
        if key not in names:
            raise UserError(
                f"{path} is not an option of {cfg.env_type!r}{_nearest(key, names)}; known: {', '.join(names)}"
            )
        if not _fits(value, types_by_name[key]):
            raise UserError(f"{path}={value!r} must be {_type_name(types_by_name[key])}")
    if cfg.task_suite_name is not None:
        values["task_suite_name"] = cfg.task_suite_name
    try:
        return options_cls(**values)
    except ValueError as error:
        key = "task_suite_name" if str(error).startswith("task_suite_name") else "init_params"
        raise UserError(f"{where}.{key}: {error}") from None


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
    """Refuse, before weights are loaded, what the simulator would refuse later and can tell from files alone."""
    module = find_simulator(cfg.env_type)
    if "check_setup" in vars(module):
        try:
            module.check_setup(env_options(cfg, where))
        except SetupError as error:
            raise UserError(f"simulator {cfg.env_type!r}: {error}") from None


def ids_of_task(spec: EnvSpec, split: str, task: str) -> Sequence[int]:
    """The reset ids of one task in `split` ("train", "demo" or "eval")."""
    if task not in spec.tasks:
        raise UserError(f"task {task!r} is not in suite {spec.suite!r}{_nearest(task, spec.tasks)}")
    ids = spec.reset_ids[split]
    if isinstance(ids, IdGrid):
        return ids.of_task(spec.tasks.index(task))
    if len(spec.tasks) == 1:
        return ids
    raise UserError(f"suite {spec.suite!r} does not say which {split} reset ids belong to which task")


def eval_trials(cfg: EnvConfig, spec: EnvSpec) -> list[int]:
    """The held-out reset ids an evaluation plays, once each, in order; a subset is spread evenly over the suite."""
    held_out = spec.reset_ids["eval"]
    wanted = cfg.num_trials
    if wanted == 0:
        episodes_per_rollout = max(1, cfg.max_steps_per_rollout_epoch // cfg.max_episode_steps)
        wanted = cfg.total_num_envs * episodes_per_rollout * cfg.rollout_epoch
    if wanted == -1 or wanted >= len(held_out):
        return list(held_out)
    return [held_out[i * len(held_out) // wanted] for i in range(wanted)]


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value may stand for the annotated type (an int is a fine float, a bool is not an int)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, a) for a in args)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (dict, list):
        return isinstance(value, origin)
    if origin is tuple:
        return isinstance(value, list | tuple)
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, args))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in args)
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))
