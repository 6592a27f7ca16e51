"""Plain dict -> frozen dataclass, strictly: unknown keys and wrong types are refused with their full key path."""

from __future__ import annotations

import difflib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from numbers import Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from rlinf.errors import UserError, did_you_mean

Origin = Callable[[str], str]  # key path -> the file (or the command line) that set it


@dataclass(frozen=True)
class Within:
    """The range of a number, ends included, for annotations: `steps: Annotated[int, Within(1, 1000)]`."""

    low: float
    high: float = 10**9  # more of anything that is counted is a slip of the finger
    also: tuple[float, ...] = ()  # values outside of the range that mean something else, such as -1 for never

    def holds(self, value: float) -> bool:
        """Whether a number may be the key's value."""
        return self.low <= value <= self.high or value in self.also

    def nearest(self, value: float) -> float:
        """The number closest to `value` that the rule allows."""
        return min((min(max(value, self.low), self.high), *self.also), key=lambda legal: abs(legal - value))

    def __str__(self) -> str:
        text = f"from {plain_number(self.low)} to {plain_number(self.high)}"
        return " or ".join([text, *map(plain_number, self.also)])


def plain_number(value: float) -> str:
    """A number as people write it: 1e9, 0.25, 4096."""
    return f"{value:.9g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


Count = Annotated[int, Within(1)]
ZeroOrMore = Annotated[int, Within(0)]
CountOrNever = Annotated[int, Within(1, also=(-1,))]
Seed = Annotated[int, Within(0, 2**31 - 1)]
Share = Annotated[float, Within(0, 1)]
Weight = Annotated[float, Within(0, 1e6)]  # of a term in a sum
Pixels = Annotated[int, Within(16, 4096)]  # side of a camera image


@cache
def hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of a dataclass."""
    return get_type_hints(cls, include_extras=True)


def convert(
    cls: type,
    tree: Mapping[str, Any],
    path: str,
    origin: Origin | None = None,
    all_keys: frozenset[str] = frozenset(),
) -> Any:
    """An instance of dataclass `cls` from `tree`; values that are already instances pass as they are.

    `path` is the key path of the block; `origin` names the source of a key, where that is known. Both are for errors,
    as is `all_keys`, in which the nearest name of an unknown key is looked for.
    """
    known = {f.name for f in fields(cls)}
    for key in tree:
        if key not in known:
            raise unknown_key(_join(path, key), known, origin, all_keys)
    values = {
        f.name: _value(hints(cls)[f.name], tree[f.name], f, _join(path, f.name), origin, all_keys)
        for f in fields(cls)
        if f.name in tree
    }
    missing = [f.name for f in fields(cls) if f.name not in values and not _has_default(f)]
    if missing:
        raise UserError(f"{_join(path, missing[0])} is required")
    try:
        return cls(**values)
    except ValueError as error:  # a rule of the class itself
        raise UserError(f"{_source(path, origin)}{path}: {error}") from error


def check_fields(block: Any, path: str) -> None:
    """Refuse values of a dataclass made by hand that `convert` would refuse."""
    convert(type(block), vars(block), path)


class UnknownKeyError(UserError):
    """A key that nobody reads; `path` is its path, `siblings` are the keys of its block, `source` names its file."""

    def __init__(self, path: str, siblings: set[str], source: str, hint: str) -> None:
        super().__init__(f"{source}unknown key {path}; {hint}")
        self.path, self.siblings, self.source = path, siblings, source


def unknown_key(path: str, siblings: set[str], origin: Origin | None, all_keys: frozenset[str]) -> UnknownKeyError:
    """The error for a key nobody reads, with the nearest key that exists."""
    parent, _, name = path.rpartition(".")
    near = [_join(parent, s) for s in difflib.get_close_matches(name, sorted(siblings), 1)]
    near = near or sorted(k for k in all_keys if k.rpartition(".")[2] == name)[:1]
    near = near or difflib.get_close_matches(path, sorted(all_keys), 1)
    hint = f"did you mean {near[0]}?" if near else f"keys there: {', '.join(sorted(siblings))}"
    return UnknownKeyError(path, siblings, _source(path, origin), hint)


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of `cls` and of the dataclasses inside it as a tree, without required keys and free-form dicts."""
    tree: dict[str, Any] = {}
    for f in fields(cls):
        inner = hints(cls)[f.name]
        if _is_config(inner):
            tree[f.name] = defaults_of(inner)
        elif _has_default(f) and get_origin(inner) is not dict:
            tree[f.name] = f.default if f.default_factory is MISSING else f.default_factory()
    return tree


def block_paths(cls: type, path: str = "") -> Iterator[str]:
    """The key path of every block below `cls`, outer ones first."""
    for f in fields(cls):
        inner = hints(cls)[f.name]
        if _is_config(inner):
            yield _join(path, f.name)
            yield from block_paths(inner, _join(path, f.name))
        elif get_origin(inner) is dict:
            yield _join(path, f.name)


def leaves(cls: type, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below `cls` that takes a value rather than a block, with its annotation."""
    for f in fields(cls):
        inner = hints(cls)[f.name]
        if _is_config(inner):
            yield from leaves(inner, _join(path, f.name))
        else:
            yield _join(path, f.name), inner


def key_paths(cls: type, path: str = "") -> Iterator[str]:
    """Every key path below `cls`."""
    for f in fields(cls):
        yield _join(path, f.name)
        if _is_config(hints(cls)[f.name]):
            yield from key_paths(hints(cls)[f.name], _join(path, f.name))


def check_value(hint: Any, value: Any, path: str, origin: Origin | None = None) -> None:
    """Refuse a value that an annotation does not allow, for keys that no dataclass declares."""
    if _fit(hint, value) is _NO:
        raise _refusal(hint, value, path, origin)


def _value(hint: Any, value: Any, of: Field[Any], path: str, origin: Origin | None, all_keys: frozenset[str]) -> Any:
    if _is_config(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return convert(hint, value, path, origin, all_keys)
    else:
        fitted = _fit(hint, value)
        if fitted is not _NO:
            return fitted
    raise _refusal(hint, value, path, origin, of.default)


def _refusal(hint: Any, value: Any, path: str, origin: Origin | None, default: Any = None) -> UserError:
    end = _nearest(hint, value, default)
    return UserError(f"{_source(path, origin)}{path}={_short(value)} must be {_name(hint)}{end}")


_NO = object()  # "does not fit"; None is a legal value


def _fit(hint: Any, value: Any) -> Any:
    """`value` as the annotated type, or _NO."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        fitted = _fit(args[0], value)
        return fitted if fitted is not _NO and all(bound.holds(fitted) for bound in args[1:]) else _NO
    if origin in (Union, types.UnionType):
        return next((fit for arg in args if (fit := _fit(arg, value)) is not _NO), _NO)
    if origin is Literal:
        return value if any(value == a and type(value) is type(a) for a in args) else _NO
    if origin is list or origin is tuple:
        if not isinstance(value, (list, tuple)):
            return _NO
        kinds = args[:1] * len(value) if origin is list or args[-1] is Ellipsis else args
        items = [_fit(kind, item) for kind, item in zip(kinds, value, strict=False)]
        return _NO if len(kinds) != len(value) or any(item is _NO for item in items) else origin(items)
    if origin is dict:
        if not isinstance(value, Mapping):
            return _NO
        fitted = {key: _fit(args[1], item) for key, item in value.items()}
        return _NO if any(item is _NO for item in fitted.values()) else fitted
    if hint is float:
        return float(value) if _is_finite(value) else _NO
    if hint is int:
        return int(value) if _is_finite(value) and value == int(value) else _NO  # 1e3 reads well for a count
    return value if isinstance(value, hint) else _NO


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _nearest(hint: Any, value: Any, default: Any) -> str:
    """The nearest value that a key may have, or its default, as the end of an error."""
    near = did_you_mean(value, [c for c in choices(hint) if isinstance(c, str)]) if isinstance(value, str) else ""
    rule = next(_rules(hint), None)
    if rule is not None and isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        kind, within = rule
        nearest = within.nearest(min(max(value, -sys.float_info.max), sys.float_info.max))
        return f"; nearest is {round(nearest) if kind is int else plain_number(nearest)}"
    if not near and isinstance(default, (int, float, str)) and default != "":
        return f"; default is {str(default).lower() if isinstance(default, bool) else default}"
    return near


def _rules(hint: Any) -> Iterator[tuple[type, Within]]:
    """The ranges that an annotation of a single number holds, each with the type it is for."""
    if get_origin(hint) is Annotated:
        kind, *bounds = get_args(hint)
        yield from ((kind, bound) for bound in bounds if isinstance(bound, Within))
    elif get_origin(hint) in (Union, types.UnionType):
        for arg in get_args(hint):
            yield from _rules(arg)


def _short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}..."


def choices(hint: Any) -> tuple[Any, ...]:
    """The literal values an annotation allows, if it names any."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (
        tuple(c for arg in get_args(hint) for c in choices(arg)) if get_origin(hint) not in (dict, list, tuple) else ()
    )


def _name(hint: Any) -> str:
    """An annotation in a person's words."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if origin is Annotated:
        return " ".join([_name(args[0]), *map(str, args[1:])])
    if origin in (Union, types.UnionType):
        return " or ".join(_name(arg) for arg in args)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin is list or origin is tuple:
        return f"a list, each item {_name(args[0])}"
    if origin is dict and args[1] is not Any:
        return f"a block of keys, each value {_name(args[1])}"
    if origin is dict or _is_config(hint):
        return "a block of keys"
    names = {int: "an integer", float: "a number", Real: "a number", bool: "true or false", str: "a string"}
    return names.get(hint, str(hint))


def _is_config(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _has_default(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _source(path: str, origin: Origin | None) -> str:
    """`file: ` before a message, where the file is known."""
    return "" if origin is None else f"{origin(path)}: "
