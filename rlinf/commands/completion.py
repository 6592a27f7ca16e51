"""What the shell offers after Tab: recipe names with their sentences, keys, and the values of keys that are choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Recipes whose name begins with what is typed."""
    from rlinf.config.recipes import default_config_dir, recipe_sentences

    return [item for item in recipe_sentences(default_config_dir()).items() if item[0].startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """`key=` for every key that begins with what is typed; behind the sign, the values the key may have."""
    key, equals, typed = incomplete.partition("=")
    if not equals:
        return sorted({f"{name}=" for name, _ in _keys() if name.startswith(incomplete)})
    values = [value for name, hint in _keys() if name == key for value in _values(hint)]
    return [f"{key}={value}" for value in dict.fromkeys(values) if value.startswith(typed)]


def _keys() -> Iterator[tuple[str, Any]]:
    """Every key that takes a value, with its annotation: of the schema and of rlinf's own models."""
    from rlinf.config.schema import Config
    from rlinf.models.config import find_config, own_models
    from rlinf.typed import leaves

    yield from leaves(Config)
    for name in own_models():
        yield from leaves(find_config(name), "actor.model")


def _values(hint: Any) -> list[str]:
    """The values of a choice, as one types them."""
    from rlinf.typed import choices

    return ["true", "false"] if hint is bool else [str(value) for value in choices(hint)]
