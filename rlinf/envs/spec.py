"""From an `env.train` or `env.eval` block to its simulator, the simulator's options and its spec. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from rlinf.simulators.contract import TASK_STRIDE, EnvSpec, IdGrid, JoinedIds, SetupError
from rlinf.typed import Origin, convert

ARM_POSE = 7  # columns of a policy of one arm: position, rotation, gripper
REQUIRED = ("Options", "spec", "Scene")  # what a simulator's module must offer
JOINED = (
    "suite",
    "tasks",
    "reset_ids",
    "task_groups",
    "min_episode_steps",
    "step_limits",
)  # in which listed suites may differ
MAX_WEIGHT = 1_000_000


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

    Of a list of names, those of the first. `where` is the key path of the block and `origin` the file that set a key,
    both for errors.
    """
    return next(iter(_options_by_name(cfg, where, origin).values()))


def suite_names(cfg: EnvConfig, where: str = "env.train") -> tuple[str, ...]:
    """The names in task_suite_name: several, one, or none where the simulator's default is played."""
    given = cfg.task_suite_name
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not given:
        raise UserError(f"{where}.task_suite_name=[] names nothing to play; list suites or tasks, or leave the key out")
    twice = [name for name in given if given.count(name) > 1]
    if twice:
        raise UserError(
            f"{where}.task_suite_name names {twice[0]} twice; {where}.task_weights gives a task a larger share"
        )
    return tuple(given)


def _options_by_name(cfg: EnvConfig, where: str, origin: Origin | None = None) -> dict[str, Any]:
    """The simulator's `Options` for each name of task_suite_name; under "" where the block names none."""
    cls, names = find_simulator(cfg.env_type).Options, suite_names(cfg, where)
    if "listed" in cfg.init_params:
        raise UserError(f"{where}.init_params.listed is not for configs: {where}.task_suite_name holds the list")
    options = convert(cls, cfg.init_params, f"{where}.init_params", origin)
    given = {key: value for key, value in _set_keys(cfg).items() if key in _fields(cls)}
    if "listed" in _fields(cls):
        given["listed"] = names if len(names) > 1 else ()
    made = {}
    for name in names or ("",):
        own = {**given, "task_suite_name": name} if name else given
        try:
            made[name] = replace(options, **own) if own else options
        except ValueError as error:
            key = next((key for key in own if str(error).startswith(key)), "init_params")
            raise UserError(f"{where}.{key}: {error}") from None
    return made


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
    """The shape of the configured suite, or of a list of them, without starting the simulator."""
    simulator = find_simulator(cfg.env_type)
    given = _options_by_name(cfg, where)
    try:
        specs = {name: simulator.spec(options) for name, options in given.items()}
    except ValueError as error:  # of a file that an option names
        raise UserError(f"{where}.{error}") from None
    spec = _joined(specs, where)
    if cfg.task_weights:
        _check_weights(cfg, spec, where)
        spec = replace(spec, balanced=True)
    if cfg.max_episode_steps < spec.min_episode_steps:
        raise UserError(
            f"{where}.max_episode_steps={cfg.max_episode_steps} must be at least {spec.min_episode_steps}: "
            f"an episode of {spec.suite} may last that long with these init_params"
        )
    return spec


def _joined(specs: Mapping[str, EnvSpec], where: str) -> EnvSpec:
    """One spec of several names' specs: all of their tasks, balanced; the spec of a single name as it is."""
    first, *others = specs.values()
    if not others:
        return first
    named_by: dict[str, str] = {}
    for name, spec in specs.items():
        for task in spec.tasks:
            if task in named_by:
                raise UserError(f"{where}.task_suite_name holds {task} twice: in {named_by[task]} and in {name}")
            named_by[task] = name
        for f in fields(EnvSpec):
            mine, its = vars(first)[f.name], vars(spec)[f.name]
            if f.name not in JOINED and mine != its:
                raise UserError(
                    f"{where}.task_suite_name: {name} cannot be played beside {first.suite}: {f.name} differs, {its} "
                    f"and {mine}"
                )
    reset_ids = {}
    for split in first.reset_ids:
        parts = tuple(ids_of_task(spec, split, task) for spec in specs.values() for task in spec.tasks)
        starts = [part[0] for part in parts if part]
        if len(set(starts)) < len(starts):
            raise UserError(f"{where}.task_suite_name={list(specs)}: names of this list play the same reset ids")
        reset_ids[split] = JoinedIds(parts, interleaved=split != "eval")
    return replace(
        first,
        suite="+".join(specs),
        tasks=tuple(named_by),
        reset_ids=reset_ids,
        task_groups={},  # those of one name say nothing about the others
        min_episode_steps=max(spec.min_episode_steps for spec in specs.values()),
        step_limits={task: limit for spec in specs.values() for task, limit in spec.step_limits.items()},
        balanced=True,
    )


def _check_weights(cfg: EnvConfig, spec: EnvSpec, where: str) -> None:
    """Refuse weights of tasks that are not played, and those that are no share."""
    for task, weight in cfg.task_weights.items():
        if task not in spec.tasks:
            near = did_you_mean(task, spec.tasks) or f"; its tasks: {', '.join(spec.tasks)}"
            raise UserError(f"{where}.task_weights.{task}: {spec.suite} has no such task{near}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= MAX_WEIGHT:
            raise UserError(f"{where}.task_weights.{task}={weight!r} must be a number above 0, at most {MAX_WEIGHT}")


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
    if isinstance(ids, (IdGrid, JoinedIds)):
        return ids.of_task(spec.tasks.index(task))
    if len(spec.tasks) == 1:
        return ids
    raise UserError(f"suite {spec.suite!r} does not say which {split} reset ids belong to which task")


def task_of(spec: EnvSpec, split: str, reset_id: int) -> str:
    """The task that a reset id of `split` belongs to; the suite's name where only the simulator knows it."""
    ids = spec.reset_ids[split]
    if len(spec.tasks) > 1 and isinstance(ids, IdGrid) and reset_id // TASK_STRIDE in ids.tasks:
        return spec.tasks[ids.tasks.index(reset_id // TASK_STRIDE)]
    return spec.tasks[0] if len(spec.tasks) == 1 else spec.suite


def eval_trials(cfg: EnvConfig, spec: EnvSpec) -> list[int]:
    """The held-out reset ids an evaluation plays, once each, in order; a subset is spread evenly over the suite."""
    if cfg.reset_ids:
        return list(cfg.reset_ids)
    held_out, wanted = spec.reset_ids["eval"], num_trials(cfg, spec)
    return [held_out[i * len(held_out) // wanted] for i in range(wanted)]


def selection_ids(spec: EnvSpec, count: int, seed: int, *, whole_rounds: bool = False) -> list[int]:
    """Reset ids to choose a policy by: training layouts, which no evaluation reports; others for another seed.

    None is repeated: where there are fewer than `count`, all are taken. With `whole_rounds`, `count` is rounded up so
    that every task is played equally often.
    """
    ids = spec.reset_ids["train"]
    if not ids:
        raise UserError(f"suite {spec.suite!r} is for evaluations alone: it has no training layouts to choose by")
    if whole_rounds:
        count += -count % _round_length(ids)
    count = min(count, len(ids))
    return [ids[(seed * count + i) % len(ids)] for i in range(count)]


def _round_length(ids: Sequence[int]) -> int:
    """How many training ids it takes until every task has had one; 1 where only the simulator knows their tasks."""
    if isinstance(ids, JoinedIds):
        return len(ids.parts)
    return len(ids.tasks) if isinstance(ids, IdGrid) else 1


def num_trials(cfg: EnvConfig, spec: EnvSpec) -> int:
    """How many trials an evaluation plays: as many as asked for, or as there are."""
    if cfg.reset_ids:
        return len(cfg.reset_ids)
    held_out, wanted = len(spec.reset_ids["eval"]), cfg.num_trials
    if wanted == 0:
        episodes_per_rollout = max(1, cfg.max_steps_per_rollout_epoch // cfg.max_episode_steps)
        wanted = cfg.total_num_envs * episodes_per_rollout * cfg.rollout_epoch
        if spec.balanced:  # the same number of each task
            wanted += -wanted % len(spec.tasks)
    return held_out if wanted == -1 else min(wanted, held_out)
