"""The table of what `compat: rlinf-0.4` restores names the code that does it, all of it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module

import pytest

from rlinf.commands.compat_page import module_and_name
from rlinf.compat.restored import RESTORED
from rlinf.envs.spec import available_simulators, find_simulator

SWITCHES = [switch for row in RESTORED for switch in row.switches]


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_switch_exists(switch: str) -> None:
    module, name = module_and_name(switch)
    found = import_module(module)
    for part in name.split("."):
        found = found.__annotations__[part] if part in vars(found).get("__annotations__", {}) else getattr(found, part)


@pytest.mark.parametrize("module", ["formulas", "policies", "envs"])
def test_nothing_published_is_missing(module: str) -> None:
    """Classes and functions called Published... have a row of their own, or are part of one that has."""
    content = import_module(f"rlinf.compat.{module}")
    named = {switch.split(".")[3] for switch in SWITCHES if switch.startswith(f"rlinf.compat.{module}.")}
    own = {
        n for n, x in vars(content).items() if n.lower().startswith("published") and x.__module__ == content.__name__
    }
    classes = [vars(content)[n] for n in named if inspect.isclass(vars(content)[n])]
    used = {
        n for n in own if any(issubclass(c, vars(content)[n]) for c in classes if inspect.isclass(vars(content)[n]))
    }
    parts = {"PublishedBatch", "PublishedOpenVla"}  # they only carry PublishedAverager and PublishedTopK to their users
    assert own - named - used - parts == set()


@pytest.mark.parametrize("env_type", available_simulators())
def test_a_simulator_with_a_switch_has_a_row(env_type: str) -> None:
    has_switch = "compat" in {field.name for field in fields(find_simulator(env_type).Options)}
    assert has_switch == any(switch.startswith(f"rlinf.simulators.{env_type}.") for switch in SWITCHES)
