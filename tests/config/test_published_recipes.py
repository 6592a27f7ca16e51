"""Shipped recipes against the published ones, key by key; and published files load as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf.compat.keys import expanded, is_below, no_effect_paths, rename_path
from rlinf.compat.recipes import DIFFERENCES
from rlinf.config.compose import ABSENT, compose_config, get, resolve
from rlinf.config.load import default_tree, load_config, typed_config
from rlinf.config.schema import Config
from rlinf.envs.spec import env_spec
from tests.published import PLACEMENT, nested, published_recipes

CONFIGS = Path(__file__).parents[2] / "examples/embodiment/config"
FILES = sorted((Path(__file__).parent / "published").glob("*.yaml"))
PUBLISHED = published_recipes()
ALIKE = [n for n in PUBLISHED if n.startswith("robotwin_") and "grpo" in n and "place_empty_cup" not in n]
EACH = [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in PUBLISHED]
needs_values = pytest.mark.skipif(
    not PUBLISHED, reason="no published values (spec/recipes.json beside the golden vectors)"
)


def config(name_or_path: str) -> Config:
    """A config with its types, before any arithmetic is checked."""
    composed = compose_config(name_or_path, [], CONFIGS)
    return typed_config(composed, resolve(composed, default_tree(composed)), "plan")


def differences(name: str) -> Iterator[tuple[str, Any, Any]]:
    """Keys of a published recipe that have another value here: key, published, ours."""
    cfg = config(name)
    ours = asdict(cfg)
    ignored = [path for path, _ in no_effect_paths()]
    places = {c.strip(): v for key, v in cfg.cluster.component_placement.items() for c in key.split(",")}
    for key, value in PUBLISHED[name].items():
        if key.startswith(PLACEMENT):
            for component in key.removeprefix(PLACEMENT).split(","):
                if str(places[component.strip()]) != str(value):
                    yield key, value, places[component.strip()]
        elif not any(is_below(key, path) for path in ignored):
            for path in rename_path(key):
                here = get(ours, path)
                if here is ABSENT and ".init_params." in path:
                    continue  # what simulators derive from these blocks is compared as a whole
                if here != value and not (isinstance(value, float) and here == pytest.approx(value, rel=1e-12)):
                    yield path, value, "no such key" if here is ABSENT else here


def explained(name: str, key: str) -> bool:
    """Whether the table of deliberate differences has a row for it."""
    return any(fnmatchcase(name, row.recipes) and key in expanded(row.key) for row in DIFFERENCES)


@needs_values
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_values(name: str) -> None:
    found = [f"{key}: published {a!r}, ours {b!r}" for key, a, b in differences(name) if not explained(name, key)]
    assert found == []


@needs_values
def test_every_row_of_the_table_is_needed() -> None:
    found = {(name, key) for name in PUBLISHED for key, _, _ in differences(name)}
    for row in DIFFERENCES:
        assert any(fnmatchcase(name, row.recipes) and key in expanded(row.key) for name, key in found), row.key
    assert len(PUBLISHED) == 28


@needs_values
@pytest.mark.parametrize("name", EACH)
def test_a_published_file_loads_unchanged(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.yaml"
    values = dict(PUBLISHED[name])
    if "env.train.enable_offload" in values:  # of the env's fragment, which the old name in the file itself overrules
        values.pop("env.enable_offload", None)
    file.write_text(yaml.safe_dump(nested(values)), encoding="utf-8")
    theirs, ours = load_config(str(file), config_dir=CONFIGS, purpose="plan", devices=[8]), config(name)
    for mode in ("train", "eval"):
        assert env_spec(getattr(theirs.env, mode)) == env_spec(getattr(ours.env, mode))
    assert theirs.actor.model.spec() == ours.actor.model.spec()
    assert theirs.actor.optim == ours.actor.optim
    assert theirs.actor.fsdp_config == ours.actor.fsdp_config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_in_the_published_dialect_loads_unchanged(file: Path) -> None:
    """Fragments by folder, old keys and keys without effect, beside our own recipe of the same values."""
    cfg = load_config(str(file), config_dir=CONFIGS, purpose="plan", devices=[8])
    assert cfg.runner.logger.experiment_name
    theirs, ours = asdict(cfg), asdict(config(file.stem))
    for tree in (theirs, ours):
        tree["runner"]["logger"].pop("log_path")
        tree["rollout"].pop("pipeline_stage_num")  # in the table of differences
        tree["algorithm"].pop("dual_clip")  # in no published file; the asynchronous recipes used it all the same
        tree["cluster"].pop("component_placement")  # compared above, component by component
        for mode in ("train", "eval"):
            tree["env"][mode]["video_cfg"].pop("video_base_dir")
            tree["env"][mode].pop("init_params")
            tree["env"][mode].pop("num_trials")  # ours play every held-out trial once
    assert theirs == ours


def test_there_is_a_file_of_every_dialect() -> None:
    assert len(FILES) == 7
