"""The placement grammar -> `Plan`: which process of which component runs on which node and accelerators. Torch-free.

`cluster.component_placement` maps component lists to places, e.g. `{"actor,rollout": 0-7, env: "0-3:0-7"}`:

    key    components separated by commas, blanks allowed: actor, env, rollout
    value  parts joined by commas, each `resources[:processes]`; both sides are `n`, `a-b` or, for resources, `all`
           `4-7`      one process on each of the accelerators 4 to 7
           `0-3:0-7`  eight processes on four accelerators, two on each
           `0-7:0-3`  four processes with two accelerators each
    or     `{node_group: LABEL, placement: VALUE}`, where resources count within the labelled nodes of
           `cluster.node_groups`; the label `node` places by node, without accelerators

Resources are accelerators, numbered through all nodes; where no node has any, they are the nodes themselves.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlinf.config.schema import Config
from rlinf.errors import UserError

KEY = "cluster.component_placement"
COMPONENTS = ("env", "rollout", "actor")
SEXAGESIMAL = 60  # YAML 1.1 takes 1:30 for a time of 90 seconds
Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class Slot:
    """Where one process runs."""

    node: int
    devices: tuple[int, ...]  # accelerator ids local to the node; empty on the CPU


class Resident(NamedTuple):
    """One worker of a process."""

    role: str
    rank: int


@dataclass(frozen=True)
class ProcessSlot:
    """One process and the workers that live in it."""

    slot: Slot
    workers: tuple[Resident, ...]


@dataclass(frozen=True)
class Plan:
    """Everything about where and how many; decided before anything starts."""

    env: tuple[Slot, ...]  # one per process rank
    rollout: tuple[Slot, ...]
    actor: tuple[Slot, ...]
    stages: int
    offload: frozenset[str]  # components that leave their accelerators while others work
    envs_per_stage: int  # training envs of one stage, over all ranks
    eval_envs_per_stage: int
    group_size: int
    one_process: bool = True  # every worker is a thread of the running process; else Ray starts the processes

    def slots(self, component: str) -> tuple[Slot, ...]:
        """The processes of a component, by rank."""
        return {"env": self.env, "rollout": self.rollout, "actor": self.actor}[component]

    @cached_property
    def processes(self) -> tuple[ProcessSlot, ...]:
        """Every process, by index: workers of equal rank in the same place share theirs."""
        workers = [(slot, Resident(c, r)) for c in COMPONENTS for r, slot in enumerate(self.slots(c))]
        if self.one_process:
            return (ProcessSlot(self.actor[0], tuple(w for _, w in workers)),)
        found: dict[tuple[Slot, int], list[Resident]] = {}
        for slot, worker in workers:
            found.setdefault((slot, worker.rank), []).append(worker)
        return tuple(ProcessSlot(slot, tuple(members)) for (slot, _), members in found.items())

    def process_of(self, role: str, rank: int) -> int:
        """The index of the process a worker lives in."""
        return next(i for i, p in enumerate(self.processes) if Resident(role, rank) in p.workers)

    @cached_property
    def rollout_copies(self) -> tuple[int, ...]:
        """Rollout ranks without an actor in their process: they hold parameters of their own, which must be synced."""
        actors = {self.process_of("actor", rank) for rank in range(len(self.actor))}
        return tuple(r for r in range(len(self.rollout)) if self.process_of("rollout", r) not in actors)

    @cached_property
    def keeps_prefixes(self) -> bool:
        """Whether updates use what rollouts computed of frozen weights: all actors read their own process's, or none.

        One that did while another did not would wait for it in a collective.
        """
        return len(self.rollout) == len(self.actor) and not self.rollout_copies

    @cached_property
    def teams(self) -> dict[str, tuple[int, ...]]:
        """Processes that talk directly: the actors, and actor 0 with every rollout it sends weights to."""
        actors = tuple(self.process_of("actor", rank) for rank in range(len(self.actor)))
        copies = tuple(self.process_of("rollout", rank) for rank in self.rollout_copies)
        return {"actor": actors, "sync": (actors[0], *copies)}

    def overlaps(self, a: str, b: str) -> bool:
        """Whether the components meet on some accelerator (on some node where there are none)."""
        return bool(_places(self.slots(a)) & _places(self.slots(b)))

    @property
    def mode(self) -> Literal["shared", "hybrid", "separate"]:
        """All components on the same accelerators, on pairwise different ones, or something between."""
        places = [_places(self.slots(c)) for c in COMPONENTS]
        if places[0] == places[1] == places[2]:
            return "shared"
        return "separate" if len(set.union(*places)) == sum(map(len, places)) else "hybrid"

    def num_envs(self, component: str, mode: Mode = "train") -> int:
        """Envs one rank of `component` handles in one stage."""
        return self._stage_envs(mode) // len(self.slots(component))

    def env_ids(self, component: str, rank: int, stage: int, mode: Mode = "train") -> list[int]:
        """Global numbers of the envs a rank handles in a stage. Groups of envs are dealt to the stages in turn, so that
        ranges of numbers belong to ranks whatever the number of stages."""
        share, group = self.num_envs(component, mode), self.group_size if mode == "train" else 1
        places = range(rank * share, (rank + 1) * share)  # within the stage
        return [(p // group * self.stages + stage) * group + p % group for p in places]

    def routes(self, src: str, dst: str, mode: Mode = "train") -> list[list[tuple[int, int, int]]]:
        """Per dst rank, the pieces (src rank, first row, end row) of one stage's batch, in global env order."""
        have, want = self.num_envs(src, mode), self.num_envs(dst, mode)
        return [
            [
                (s, max(first - s * have, 0), min(first + want - s * have, have))
                for s in range(first // have, (first + want - 1) // have + 1)
            ]
            for first in range(0, len(self.slots(dst)) * want, want)
        ]

    def _stage_envs(self, mode: Mode) -> int:
        return self.envs_per_stage if mode == "train" else self.eval_envs_per_stage


def visible_accelerators() -> int:
    """GPUs this process may use, counted without torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([d for d in listed.split(",") if d.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def make_plan(cfg: Config, devices: Sequence[int] | None = None) -> Plan:
    """Place every component; `devices` is the accelerators per node, by default those of this machine on every node."""
    if devices is None:
        devices = [cfg.cluster.virtual_devices or visible_accelerators()] * cfg.cluster.num_nodes
    if len(devices) != cfg.cluster.num_nodes:
        raise UserError(f"cluster.num_nodes={cfg.cluster.num_nodes}, but {len(devices)} nodes are present")
    slots = place_components(cfg.cluster.component_placement, devices, cfg.cluster.node_groups)
    plan = Plan(
        env=slots["env"],
        rollout=slots["rollout"],
        actor=slots["actor"],
        stages=cfg.rollout.pipeline_stage_num,
        offload=frozenset(),
        envs_per_stage=cfg.env.train.total_num_envs // cfg.rollout.pipeline_stage_num,
        eval_envs_per_stage=cfg.env.eval.total_num_envs // cfg.rollout.pipeline_stage_num,
        group_size=cfg.env.train.group_size,
        one_process=_one_process(cfg, slots),
    )
    wanted = {
        "env": cfg.env.train.enable_offload,
        "rollout": cfg.rollout.enable_offload,
        "actor": cfg.actor.enable_offload,
    }
    offload = frozenset(a for a in COMPONENTS if wanted[a] and any(plan.overlaps(a, b) for b in COMPONENTS if b != a))
    in_turn = cfg.runner.max_staleness == 0  # else all components work at the same time
    return replace(plan, offload=offload if in_turn else frozenset())


def place_components(
    placement: Mapping[str, Any], devices: Sequence[int], node_groups: Sequence[Mapping[str, Any]] = ()
) -> dict[str, tuple[Slot, ...]]:
    """The process slots of every component."""
    groups = _node_groups(node_groups, len(devices))
    slots: dict[str, tuple[Slot, ...]] = {}
    for key, value in placement.items():
        for component in (name.strip() for name in str(key).split(",")):
            if component not in COMPONENTS:
                near = difflib.get_close_matches(component, COMPONENTS, 1) or COMPONENTS
                raise UserError(f"{KEY}: unknown component {component!r} in {key!r}; did you mean {' or '.join(near)}?")
            if component in slots:
                raise UserError(f"{KEY}: component {component!r} is placed twice")
            slots[component] = _place(key, value, devices, groups)
    for component in COMPONENTS:
        if component not in slots:
            raise UserError(f"{KEY}: component {component!r} is not placed; placed are: {', '.join(slots) or 'none'}")
    return slots


def _one_process(cfg: Config, slots: Mapping[str, tuple[Slot, ...]]) -> bool:
    """Whether threads of one process on one accelerator can carry the plan out, and are wanted."""
    used = {(s.node, device) for c in COMPONENTS for s in slots[c] for device in s.devices}
    enough = len(slots["actor"]) == 1 and cfg.cluster.num_nodes == 1 and len(used) <= 1
    if cfg.cluster.backend == "local" and not enough:
        raise UserError(
            f"cluster.backend=local runs one actor rank on one accelerator, but {KEY} names {len(slots['actor'])} "
            f"actor ranks, {len(used)} accelerators and cluster.num_nodes={cfg.cluster.num_nodes}; use auto or ray"
        )
    return enough and cfg.cluster.backend != "ray"


class _Part(NamedTuple):
    resources: range
    processes: range


def _place(key: str, value: Any, devices: Sequence[int], groups: Mapping[str, tuple[int, ...]]) -> tuple[Slot, ...]:
    """The slots of one `key: value` entry, one per process rank."""
    where = f"{KEY}: {key}={value!r}"
    nodes, text, by_node = tuple(range(len(devices))), value, False
    if isinstance(value, Mapping):
        if set(value) != {"node_group", "placement"}:
            raise UserError(f"{where}: expected the keys node_group and placement, got {', '.join(map(str, value))}")
        nodes, by_node = _group_nodes(where, value["node_group"], groups)
        text = value["placement"]
    pool = [Slot(n, ()) for n in nodes]
    if not by_node and any(devices[n] for n in nodes):
        pool = [Slot(n, (d,)) for n in nodes for d in range(devices[n])]
    if isinstance(text, int) and text >= max(SEXAGESIMAL, len(pool)):
        meant = f"{text // SEXAGESIMAL}:{text % SEXAGESIMAL}"
        raise UserError(f"{where}: YAML reads {meant} as the number {text}; if you mean {meant}, write it in quotes")
    slots: list[Slot] = []
    for part in _parse(where, str(text), pool):
        slots += _spread(where, part, pool)
    return tuple(slots)


def _parse(where: str, text: str, pool: Sequence[Slot]) -> Iterator[_Part]:
    """The parts of a placement string; resources ascend, process ranks go on from 0 without a gap."""
    last_resource, next_process = -1, 0
    for part in text.split(","):
        left, colon, right = (piece.strip() for piece in part.partition(":"))
        resources = range(len(pool)) if left == "all" else _range(where, left)
        if resources.stop > len(pool):
            raise UserError(f"{where}: {_absent(resources, pool)}")
        processes = _range(where, right) if colon else range(next_process, next_process + len(resources))
        if resources.start <= last_resource:
            raise UserError(f"{where}: resources must ascend without overlap, {left} follows {last_resource}")
        if processes.start != next_process:
            raise UserError(f"{where}: process ranks must be continuous, {right} should begin at {next_process}")
        if len(processes) % len(resources) and len(resources) % len(processes):
            raise UserError(f"{where}: {len(processes)} processes cannot share {len(resources)} resources evenly")
        last_resource, next_process = resources.stop - 1, processes.stop
        yield _Part(resources, processes)


def _spread(where: str, part: _Part, pool: Sequence[Slot]) -> Iterator[Slot]:
    """One slot per process of the part: several processes on a resource, or several resources for a process."""
    per_process = max(1, len(part.resources) // len(part.processes))
    per_resource = max(1, len(part.processes) // len(part.resources))
    for i, rank in enumerate(part.processes):
        first = i // per_resource * per_process
        mine = [pool[r] for r in part.resources[first : first + per_process]]
        nodes = sorted({slot.node for slot in mine})
        if len(nodes) > 1:
            raise UserError(f"{where}: process {rank} would span the nodes {', '.join(map(str, nodes))}")
        yield Slot(nodes[0], tuple(d for slot in mine for d in slot.devices))


def _range(where: str, text: str) -> range:
    """`n` or `a-b`, both ends included."""
    first, dash, last = (piece.strip() for piece in text.partition("-"))
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UserError(f"{where}: {text!r} is no range; write n, a-b or all, with :n or :a-b for process ranks")
    if dash and int(last) < int(first):
        raise UserError(f"{where}: range {text} runs backwards; write {last}-{first}")
    return range(int(first), int(last or first) + 1)


def _absent(resources: range, pool: Sequence[Slot]) -> str:
    """Why `resources` cannot be had, and what to write instead."""
    names = f"{resources.start}-{resources.stop - 1}" if len(resources) > 1 else f"{resources.start}"
    if pool[0].devices:
        return f"names accelerator {names}, but there are {len(pool)} (0-{len(pool) - 1})"
    return (
        f"names resource {names}, but without accelerators the {len(pool)} node(s) are the resources; "
        f"""to run on this machine add '{KEY}={{"actor,env,rollout": all}}'"""
    )


def _node_groups(groups: Sequence[Mapping[str, Any]], num_nodes: int) -> dict[str, tuple[int, ...]]:
    """Label -> nodes; `cluster` is every node."""
    nodes: dict[str, tuple[int, ...]] = {"cluster": tuple(range(num_nodes))}
    for i, group in enumerate(groups):
        where = f"cluster.node_groups[{i}]"
        if set(group) != {"label", "node_ranks"}:
            raise UserError(f"{where}: expected the keys label and node_ranks, got {', '.join(map(str, group))}")
        label = str(group["label"])
        if label in nodes or label == "node":
            raise UserError(f"{where}.label={label!r} is already taken")
        ranks = [r for part in str(group["node_ranks"]).split(",") for r in _range(f"{where}.node_ranks", part.strip())]
        if ranks != sorted(set(ranks)) or ranks[-1] >= num_nodes:
            raise UserError(
                f"{where}.node_ranks={group['node_ranks']!r} must ascend and lie within 0-{num_nodes - 1} "
                "(cluster.num_nodes)"
            )
        nodes[label] = tuple(ranks)
    return nodes


def _group_nodes(where: str, labels: Any, groups: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], bool]:
    """The nodes behind one or several labels, and whether to place by node."""
    names = [str(x).strip() for x in (labels if isinstance(labels, list) else str(labels).split(","))]
    if names == ["node"]:
        return groups["cluster"], True
    for name in names:
        if name not in groups:
            raise UserError(f"{where}: unknown node_group {name!r}; known: {', '.join([*groups, 'node'])}")
    return tuple(sorted({n for name in names for n in groups[name]})), False


def _places(slots: Sequence[Slot]) -> set[tuple[int, int]]:
    """(node, accelerator) pairs; -1 stands for a node used without accelerators."""
    return {(s.node, d) for s in slots for d in s.devices or (-1,)}
