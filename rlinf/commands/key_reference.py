"""docs/config.md: every key with type, default and the sentence that stands below it in the schema. Torch-free.

`python -m rlinf.commands.key_reference` prints the page.
"""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rlinf.config.schema import Config
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import available_simulators, find_simulator
from rlinf.models.config import ModelConfig, available_models, find_config
from rlinf.typed import hints

HEADER = """# Configuration

Printed by `python -m rlinf.commands.key_reference` (`make docs`); edit the docstrings in `rlinf/config/schema.py`.

A config is a YAML file under `examples/embodiment/config` (or any path), composed by Hydra from its `defaults`, with
`key=value` settings from the command line on top. A recipe holds only what differs from the defaults below. A key that
is not on this page is refused with the file that set it and the nearest key that exists; so is a value of another type
or outside of the range given here, with the nearest legal one. Both ends belong to a range, NaN and infinities to none.

Settings are YAML: `env.train.init_params.render=fast`, `collect.tasks=[reach-v3,push-v3]`, `~env.eval.video_cfg` to
take a key out, `model@actor.model=pi0_5` to pick another fragment. `${a.b}` refers to a key, `${.x}` to one in the same
block, `${..x}` to one in the block around it, `${oc.env:NAME}` to an environment variable. Old names of keys still
work, each with one warning: see [compat.md](compat.md#old-names-of-keys). Published keys that have no effect here are
left out, with one warning for each file that sets some: see [compat.md](compat.md#published-keys-without-effect).
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEADER, *_sections(Config, "")]
    for name in available_models():
        parts += [f"## `actor.model` with `model_type: {name}`\n", _table(find_config(name))]
        parts += _inner(find_config(name), "actor.model", 2)
    for name in available_simulators():
        options = find_simulator(name).Options
        parts += [f"## `env.{{train,eval}}.init_params` with `env_type: {name}`\n", _table(options)]
    return "\n".join(parts)


def sentences(cls: type) -> dict[str, str]:
    """Field -> the string literal below it in the source, the fields of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for line, below in zip(definition.body, [*definition.body[1:], ast.Pass()], strict=True):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_text(below):
                found[line.target.id] = " ".join(below.value.value.split())  # type: ignore[attr-defined]
    return found


def _sections(cls: type, path: str, level: int = 2) -> Iterator[str]:
    """A table for the plain keys of a block, then one section for each block inside it."""
    title = f"`{path}`" if path else "Top level"
    yield f"{'#' * level} {title}\n"
    if path and _described(cls):
        yield f"{cls.__doc__}\n"
    yield _table(cls)
    yield from _inner(cls, path, level)


def _inner(cls: type, path: str, level: int) -> Iterator[str]:
    for f in fields(cls):
        kind = hints(cls)[f.name]
        below = f"{path}.{f.name}" if path else f.name
        if kind is EnvConfig:
            if f.name == "train":  # env.eval has the same keys
                yield from _sections(kind, "env.{train,eval}", min(level + 1, 4))
        elif _is_config(kind) and kind is not ModelConfig:  # models have sections of their own
            yield from _sections(kind, below, min(level + bool(path), 4))


def _table(cls: type) -> str:
    """The keys of one block, without the blocks inside it."""
    kinds, said = hints(cls), sentences(cls)
    rows = [
        f"| `{f.name}` | {type_text(kinds[f.name])} | {_default(f)} | {_cell(said.get(f.name, ''))} |"
        for f in fields(cls)
        if not _is_config(kinds[f.name]) and not said.get(f.name, "").startswith("Test hook")
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]) if rows else ""


def _cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|")


def type_text(hint: Any) -> str:
    """An annotation as the tables of the docs show it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{type_text(args[0])}, {args[1]}"
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a) for a in args)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (list, tuple):
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return "block"
    return {type(None): "`null`", Any: "any"}.get(hint) or hint.__name__


def _default(f: Field[Any]) -> str:
    if f.default is MISSING and f.default_factory is MISSING:
        return "required"
    value = f.default if f.default_factory is MISSING else f.default_factory()
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _described(cls: type) -> bool:
    """Whether the class has a docstring of its own (a dataclass without one is given its signature)."""
    return bool(cls.__doc__) and not str(cls.__doc__).startswith(f"{cls.__name__}(")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    print(page(), end="")
