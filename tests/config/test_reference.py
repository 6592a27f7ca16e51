"""docs/config.md is made from the sentences below the keys: every key has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

from rlinf.commands.key_reference import sentences
from rlinf.config.schema import Config
from rlinf.envs.spec import available_simulators, find_simulator
from rlinf.models.config import available_models, find_config
from rlinf.typed import hints


def blocks(cls: type) -> Iterator[type]:
    """A config class and those inside it."""
    yield cls
    for kind in hints(cls).values():
        if isinstance(kind, type) and is_dataclass(kind):
            yield from blocks(kind)


ROOTS = [
    Config,
    *map(find_config, available_models()),
    *(find_simulator(name).Options for name in available_simulators()),
]


@pytest.mark.parametrize("cls", sorted({b for root in ROOTS for b in blocks(root)}, key=str))
def test_every_key_has_a_sentence(cls: type) -> None:
    said = sentences(cls)
    assert [f.name for f in fields(cls) if not said.get(f.name)] == []
