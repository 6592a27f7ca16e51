"""Advantage estimators and losses, found by the names that `adv_type` and `loss_type` give them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from rlinf.errors import UserError

Function = Callable[..., Any]


class Registry:
    """A decorator that remembers what it decorates.

    Example: `@advantage("gae")` above a function; later `advantage.find("gae")`.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, Function] = {}

    def __call__(self, name: str) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            if name in self._functions:
                raise ValueError(f"{self.key} {name!r} is already registered")
            self._functions[name] = function
            return function

        return register

    def find(self, name: str) -> Function:
        """The function called `name`."""
        if name not in self._functions:
            nearest = difflib.get_close_matches(name, self._functions, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise UserError(f"{self.key}: unknown {name!r}, available: {', '.join(self.names())}{hint}")
        return self._functions[name]

    def names(self) -> list[str]:
        """Every registered name."""
        return sorted(self._functions)


advantage = Registry("algorithm.adv_type")
loss = Registry("algorithm.loss_type")
