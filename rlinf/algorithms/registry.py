"""Advantage estimators and losses by the names that `adv_type` and `loss_type` give them. Torch-free.

Those of rlinf stand in the two tables below. One of your own is any function that Python can import, named by its
dotted path (`algorithm.adv_type: my_lab.estimators.leave_one_out`); `@traits(...)` above it says what it needs:

    @traits(compares_groups=True)
    def leave_one_out(steps: Steps, cfg: AlgorithmConfig, all_reduce) -> tuple[Tensor, Tensor | None]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.plugins import ADVANTAGE, LOSS, Kind, available, dotted_path, import_attribute

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What an estimator or a loss needs of the run around it; config checks and the actor read it."""

    uses_critic: bool = False
    """Reads the values of a critic: actor.model.add_value_head must be true."""
    compares_groups: bool = False
    """Compares the members of a group: group_size must be at least 2, and episodes must not restart by themselves."""
    clips_around_update_start: bool = False
    """Loss: clips the ratio to the policy the update starts from, not to the one that acted."""


def traits(**needs: bool) -> Callable[[Function], Function]:
    """Decorator: attach Traits to an estimator or loss outside of rlinf."""

    def attach(function: Function) -> Function:
        function.traits = Traits(**needs)  # type: ignore[attr-defined]
        return function

    return attach


@dataclass(frozen=True)
class Table:
    """Algorithms of one kind: rlinf's own with their traits, and where their functions lie."""

    kind: Kind
    module: str  # of rlinf's own functions, which are called like their names
    own: Mapping[str, Traits]

    def names(self) -> tuple[str, ...]:
        """Every name that needs no dotted path."""
        return available(self.kind, list(self.own))

    def traits(self, name: str) -> Traits:
        """What the algorithm needs; imports nothing for rlinf's own."""
        if name in self.own:
            return self.own[name]
        function = self.find(name)
        return vars(function).get("traits", Traits())

    def find(self, name: str) -> Function:
        """The function itself."""
        return import_attribute(self.kind, dotted_path(self.kind, name, {n: f"{self.module}.{n}" for n in self.own}))


ADVANTAGES = Table(
    ADVANTAGE,
    "rlinf.algorithms.advantages",
    {"gae": Traits(uses_critic=True), "grpo": Traits(compares_groups=True)},
)
LOSSES = Table(
    LOSS,
    "rlinf.algorithms.losses",
    {
        "actor": Traits(),
        "actor_critic": Traits(uses_critic=True),
        "decoupled_actor_critic": Traits(uses_critic=True, clips_around_update_start=True),
    },
)
