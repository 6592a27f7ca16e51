"""`rlinf seeds`: find episodes of a task that the simulator's own expert solves, and write their seeds to a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlinf.envs.config import EnvConfig
from rlinf.envs.fleet import Fleet
from rlinf.envs.routing import num_processes
from rlinf.envs.spec import available_simulators, check_setup, env_options, env_spec, find_simulator
from rlinf.errors import UserError, did_you_mean
from rlinf.progress import report
from rlinf.storage.atomic_folder import write_file
from rlinf.typed import convert

MAX_TRIES = 20  # seeds tried for each that is wanted


def env_block(simulator: str, task: str, settings: Sequence[str]) -> EnvConfig:
    """The env block that settings such as task_config.embodiment=[aloha-agilex] or python=PATH describe."""
    names = [name for name in available_simulators() if "seed_document" in vars(find_simulator(name))]
    if simulator not in names:
        hint = did_you_mean(simulator, names)
        raise UserError(f"{simulator!r} has no seeds to look for{hint}; these have: {', '.join(names)}")
    block: dict[str, Any] = {"env_type": simulator, "task_suite_name": task}
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, name = key.removeprefix("env.train.").split(".")
        if not equals:
            raise UserError(f"{setting!r} must be KEY=VALUE, where KEY is one of env.train: task_config.step_lim=400")
        inner = block
        for part in path:
            inner = inner.setdefault(part, {})
        try:
            inner[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{setting!r}: the value is not YAML") from None
    return convert(EnvConfig, block, "env.train")


def find_seeds(
    cfg: EnvConfig,
    *,
    splits: Sequence[str],
    count: int,
    output: Path,
    overwrite: bool = False,
    on_progress: Callable[[str], None] = print,
) -> dict[str, list[int]]:
    """Try seeds in their order until `count` of each split are solved; the file holds those found so far at any time.

    A file that is there keeps its other tasks; one that holds this task is replaced only where `overwrite` says so.
    """
    module, options = find_simulator(cfg.env_type), env_options(cfg)
    check_setup(cfg, "env.train")
    before = _read(output, module.seed_document(options, {}), cfg, overwrite=overwrite)
    found: dict[str, list[int]] = {split: [] for split in splits}

    def save() -> None:
        document = module.seed_document(options, found)
        document["tasks"] = {**before, **document["tasks"]}
        write_file(output, json.dumps(document, indent=1) + "\n")

    spec = env_spec(cfg)
    envs = range(num_processes(cfg, spec, 1 << 20))
    fleet = Fleet(cfg, spec, envs, options=options, chunk_size=1, playing=lambda _: "", load_ahead=False)
    try:
        fleet.start()
        for split in splits:
            candidates = itertools.islice(module.seed_candidates(split), MAX_TRIES * count)
            tried = _search(fleet, len(envs), candidates, found[split], count, save)
            on_progress(f"{split}: {len(found[split])} seeds solved of {tried} tried")
            if len(found[split]) < count:
                raise UserError(
                    f"the expert solved {len(found[split])} of {tried} seeds for {split}, --count asks for {count}; "
                    f"{output} holds those"
                )
    finally:
        fleet.close()
    return found


def _search(
    fleet: Fleet, processes: int, candidates: Iterable[int], found: list[int], count: int, save: Callable[[], None]
) -> int:
    """Try candidates, as many at once as there are processes; returns how many were tried."""
    tried, numbers = 0, iter(candidates)
    while len(found) < count and (wave := list(itertools.islice(numbers, processes))):
        report("looking for seeds", len(found), count)
        fleet.reset_failure_count()
        replies, _ = fleet.command("solves", {row: {"reset_id": seed} for row, seed in enumerate(wave)})
        tried += len(wave)
        solved = [seed for row, seed in enumerate(wave) if row in replies and replies[row]["solved"]]
        if solved:
            found += solved[: count - len(found)]
            save()
    report("looking for seeds", count, count)
    return tried


def _read(output: Path, document: Mapping[str, Any], cfg: EnvConfig, *, overwrite: bool) -> dict[str, Any]:
    """The tasks of a file that is there already; refuses one that must not be written to."""
    if not output.parent.is_dir():
        raise UserError(f"--output={output}: the folder {output.parent} does not exist")
    if not output.exists():
        return {}
    try:
        there = json.loads(output.read_text(encoding="utf-8"))
        same = all(there[key] == document[key] for key in ("format", "version", "assets"))
        tasks = dict(there["tasks"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--output={output} is there and is no file of seeds; choose another name") from None
    if not same:
        raise UserError(f"--output={output} was made with other assets; choose another name")
    if cfg.task_suite_name in tasks and not overwrite:
        raise UserError(
            f"--output={output} has seeds of {cfg.task_suite_name}; --overwrite replaces them, another file keeps both"
        )
    return tasks
