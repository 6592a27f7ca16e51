"""How the config of a run differs from the recipe it was started with, as that recipe is now."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf.config.check import Purpose
from rlinf.config.compose import ABSENT, compose_config, get, resolve
from rlinf.config.load import LOG_PATH, default_tree, typed_config
from rlinf.config.recipes import default_config_dir
from rlinf.errors import UserError
from rlinf.storage.redaction import redacted

OF_THE_RUN = (LOG_PATH, "runner.run_id")  # differ in every run and change nothing


@dataclass(frozen=True)
class Changes:
    """Dotted key -> value in the recipe and in the run, `ABSENT` where one has no such key."""

    recipe: str
    keys: dict[str, tuple[Any, Any]]


def read_changes(config: str, record: Mapping[str, Any]) -> Changes | None:
    """The difference between a config.yaml and the recipe that run.json names; None where that cannot be told."""
    recipe = recipe_of(record)
    try:
        run = yaml.safe_load(config)
        if recipe is None or not isinstance(run, dict) or not isinstance(run.get("runner"), dict):
            return None
        own = dict(_leaves(_recipe_tree(recipe, run, record)))
    except (OSError, UserError, yaml.YAMLError, RecursionError):
        return None
    theirs = dict(_leaves(run))
    keys = [*own, *(key for key in theirs if key not in own)]
    pairs = {key: (own.get(key, ABSENT), theirs.get(key, ABSENT)) for key in keys if key not in OF_THE_RUN}
    return Changes(Path(recipe).stem, {key: pair for key, pair in pairs.items() if pair[0] != pair[1]})


def differences(configs: Sequence[str | None]) -> dict[str, list[Any]]:
    """Dotted key -> its value in each config.yaml, for keys whose values differ; `ABSENT` where there is none."""
    trees = []
    for text in configs:
        try:
            tree = yaml.safe_load(text or "")
        except (yaml.YAMLError, RecursionError):
            tree = None
        trees.append(_without_folder(tree) if isinstance(tree, dict) else {})
    rows = {key: [tree.get(key, ABSENT) for tree in trees] for key in dict.fromkeys(k for tree in trees for k in tree)}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _without_folder(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config by dotted key, the run's own folder in them written `<log_path>`."""
    folder = get(tree, LOG_PATH)
    leaves = {key: value for key, value in _leaves(tree) if key not in OF_THE_RUN}
    if not isinstance(folder, str) or not folder:
        return leaves
    return {k: v.replace(folder, "<log_path>") if isinstance(v, str) else v for k, v in leaves.items()}


def recipe_of(record: Mapping[str, Any]) -> str | None:
    """Name or path of the config in the last command that `rlinf` was started with, else the name of the run."""
    starts = record.get("starts") or [{}]
    try:
        words = shlex.split(str(starts[-1].get("command") or ""))
    except (AttributeError, ValueError):
        words = []
    if words[:1] == ["rlinf"] and len(words) > 1:
        return next((word for word in words[2:] if not word.startswith("-") and "=" not in word), words[1])
    return str(record["name"]) if record.get("name") else None


def _recipe_tree(recipe: str, run: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without any override, its paths below the run's own folder, as config.yaml would write it."""
    started = Path(str((record.get("starts") or [{}])[-1].get("folder") or "."))
    name = str(started / recipe) if (started / recipe).is_file() else recipe
    log_path = get(run, LOG_PATH)
    moved = [] if log_path in (ABSENT, None) else [f"{LOG_PATH}={json.dumps(str(log_path))}"]
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the run has warned already
    try:
        composed = compose_config(name, moved, default_config_dir())
        purpose: Purpose = "eval" if get(run, "runner.only_eval") is True else "train"
        cfg = typed_config(composed, resolve(composed, default_tree(composed)), purpose)
    finally:
        logging.disable(before)
    return json.loads(json.dumps(redacted(asdict(cfg)), default=str))


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
