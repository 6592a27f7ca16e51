"""Plan: which worker runs in which process, node and accelerators, and which processes exchange tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from rlinf.data.layout import EnvLayout, Piece
from rlinf.placement.grammar import COMPONENTS, Slot

Mode = Literal["train", "eval"]


class WorkerId(NamedTuple):
    """One worker of a run."""

    role: str
    rank: int


@dataclass(frozen=True)
class ProcessSlot:
    """One process and the workers that live in it."""

    slot: Slot
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Plan:
    """Where every worker runs and which envs it handles; decided before anything starts."""

    env: tuple[Slot, ...]  # one per process rank
    rollout: tuple[Slot, ...]
    actor: tuple[Slot, ...]
    train_envs: EnvLayout
    eval_envs: EnvLayout
    offload: frozenset[str] = frozenset()  # components that free their accelerators while others work
    one_process: bool = True  # every worker is a thread of the running process; else Ray starts the processes
    actors_apart: bool = False  # actors have processes of their own, so that they learn while others roll out

    def slots(self, component: str) -> tuple[Slot, ...]:
        """The processes of a component, by rank."""
        return {"env": self.env, "rollout": self.rollout, "actor": self.actor}[component]

    @cached_property
    def processes(self) -> tuple[ProcessSlot, ...]:
        """Every process, by index: workers of equal rank in the same place share theirs, but for actors apart."""
        workers = [(slot, WorkerId(c, r)) for c in COMPONENTS for r, slot in enumerate(self.slots(c))]
        if self.one_process:
            return (ProcessSlot(self.actor[0], tuple(w for _, w in workers)),)
        found: dict[tuple[Slot, int, bool], list[WorkerId]] = {}
        for slot, worker in workers:
            apart = self.actors_apart and worker.role == "actor"
            found.setdefault((slot, worker.rank, apart), []).append(worker)
        return tuple(ProcessSlot(slot, tuple(members)) for (slot, _, _), members in found.items())

    def process_of(self, role: str, rank: int) -> int:
        """The index of the process a worker runs in."""
        return next(i for i, p in enumerate(self.processes) if WorkerId(role, rank) in p.workers)

    @cached_property
    def rollout_copies(self) -> tuple[int, ...]:
        """Rollout ranks without an actor in their process: they hold parameters of their own, which must be synced."""
        actors = {self.process_of("actor", rank) for rank in range(len(self.actor))}
        return tuple(r for r in range(len(self.rollout)) if self.process_of("rollout", r) not in actors)

    @cached_property
    def keeps_prefixes(self) -> bool:
        """Whether updates use prefixes that rollouts computed with frozen weights: each actor from its own process.

        All actors do or none: one that skips a computation would leave another waiting for it in a collective.
        """
        return len(self.rollout) == len(self.actor) and not self.rollout_copies

    @cached_property
    def process_groups(self) -> dict[str, tuple[int, ...]]:
        """Processes that exchange tensors directly: the actors, and actor 0 with every rollout it sends weights to."""
        actors = tuple(self.process_of("actor", rank) for rank in range(len(self.actor)))
        copies = tuple(self.process_of("rollout", rank) for rank in self.rollout_copies)
        return {"actor": actors, "sync": (actors[0], *copies)}

    def overlaps(self, a: str, b: str) -> bool:
        """Whether the components share an accelerator, or a node without any."""
        return bool(_places(self.slots(a)) & _places(self.slots(b)))

    @property
    def mode(self) -> Literal["shared", "hybrid", "separate"]:
        """shared: all components on the same accelerators; separate: no two on the same; hybrid: anything else."""
        places = [_places(self.slots(c)) for c in COMPONENTS]
        if places[0] == places[1] == places[2]:
            return "shared"
        return "separate" if len(set.union(*places)) == sum(map(len, places)) else "hybrid"

    @property
    def stages(self) -> int:
        """Pipeline stages: shares of the envs that are simulated in turn."""
        return self.train_envs.stages

    def envs(self, mode: Mode) -> EnvLayout:
        """The layout of the training or evaluation envs."""
        return self.train_envs if mode == "train" else self.eval_envs

    def num_envs(self, component: str, mode: Mode = "train") -> int:
        """Envs one rank of `component` handles in one stage; the most, where an evaluation spreads them unevenly."""
        return self.envs(mode).share(len(self.slots(component)))

    def env_ids(self, component: str, rank: int, stage: int, mode: Mode = "train") -> list[int]:
        """Global numbers of the envs a rank handles in a stage (data/layout.py draws them)."""
        return self.envs(mode).env_ids(len(self.slots(component)), rank, stage)

    def routes(self, src: str, dst: str, mode: Mode = "train", stage: int = 0) -> list[list[Piece]]:
        """For each rank of `dst`, the pieces of the batches of `src` ranks that make up its own in a stage."""
        return self.envs(mode).routes(len(self.slots(src)), len(self.slots(dst)), stage)

    @property
    def experience_routes(self) -> list[list[Piece]]:
        """For each actor rank, the pieces of the rollout ranks' experience, over all stages, that it learns from."""
        return self.train_envs.experience_routes(len(self.rollout), len(self.actor))


def _places(slots: Sequence[Slot]) -> set[tuple[int, int]]:
    """(node, accelerator) pairs; -1 stands for a node used without accelerators."""
    return {(s.node, d) for s in slots for d in s.devices or (-1,)}
