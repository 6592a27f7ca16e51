"""Find simulators, models and algorithms by name: rlinf's own, those of installed packages, and any dotted path.

A name in a config is looked up in this order:

    env_type: toy                   one of rlinf's own
    env_type: kitchen               an entry point of an installed package, in the group `rlinf.simulators`
    env_type: my_lab.envs.kitchen   a dotted path, which Python can import or which starts in the working folder

Nothing is imported before it is asked for, and torch never by this file.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rlinf.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Kind:
    """One kind of thing that users may bring themselves."""

    key: str  # that names it in a config
    group: str  # of entry points


SIMULATOR = Kind("env_type", "rlinf.simulators")
MODEL = Kind("model_type", "rlinf.models")
ADVANTAGE = Kind("adv_type", "rlinf.advantages")
LOSS = Kind("loss_type", "rlinf.losses")


@cache
def installed(kind: Kind) -> dict[str, str]:
    """Entry points of installed packages: name -> dotted path."""
    return {entry.name: entry.value.replace(":", ".") for entry in entry_points(group=kind.group)}


def available(kind: Kind, own: Sequence[str]) -> tuple[str, ...]:
    """Every name that needs no dotted path: rlinf's `own` and those of installed packages."""
    return tuple(sorted({*own, *installed(kind)}))


def dotted_path(kind: Kind, name: str, own: Mapping[str, str]) -> str:
    """The dotted path that `name` stands for; `own` holds those of rlinf itself by name."""
    if name in own:
        return own[name]
    if name in installed(kind):
        return installed(kind)[name]
    if "." in name:
        return name
    known = available(kind, list(own))
    raise UserError(
        f"{kind.key}={name!r} is unknown{did_you_mean(name, known)}; available: {', '.join(known)}, or the dotted path "
        "of your own (my_lab.my_module)"
    )


def import_plugin(kind: Kind, path: str) -> ModuleType:
    """Import a module by its dotted path; what cannot be found is a mistake of the config, what fails is shown."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that nothing of the working folder hides an installed package
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise UserError(f"{kind.key}={path}: it needs the Python package {error.name}, which is missing") from error
        raise UserError(
            f"{kind.key}={path}: Python finds no module {error.name}; install its package, or start rlinf in the "
            "folder that holds it"
        ) from None


def import_attribute(kind: Kind, path: str) -> Any:
    """Import `package.module.name`."""
    module, _, name = path.rpartition(".")
    found = import_plugin(kind, module)
    if name not in vars(found):
        public = [n for n in vars(found) if not n.startswith("_")]
        raise UserError(f"{kind.key}={path}: module {module} has no {name}{did_you_mean(name, public)}")
    return vars(found)[name]


def source_folder(module: ModuleType) -> str | None:
    """The folder from which a plugin's top package was imported, for other interpreters; None for installed ones.

    The packages beside an installed plugin belong to this interpreter and must not be seen by another.
    """
    file = Path(str(module.__file__)).resolve()
    folder = file.parents[module.__name__.count(".") + (file.name == "__init__.py")]
    return None if folder in {Path(p).resolve() for p in sysconfig.get_paths().values()} else str(folder)
