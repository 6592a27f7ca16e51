"""The placement grammar -> slots: which process of which component runs on which node and accelerators. Torch-free.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlinf.errors import UserError, did_you_mean

KEY = "cluster.component_placement"
COMPONENTS = ("env", "rollout", "actor")
SEXAGESIMAL = 60  # YAML 1.1 takes 1:30 for a time of 90 seconds


@dataclass(frozen=True)
class Slot:
    """Where one process runs."""

    node: int
    devices: tuple[int, ...]  # accelerator ids local to the node; empty on the CPU


def place_components(
    placement: Mapping[str, Any], devices: Sequence[int], node_groups: Sequence[Mapping[str, Any]] = ()
) -> dict[str, tuple[Slot, ...]]:
    """The process slots of every component."""
    groups = _node_groups(node_groups, len(devices))
    slots: dict[str, tuple[Slot, ...]] = {}
    for key, value in placement.items():
        for component in (name.strip() for name in str(key).split(",")):
            if component not in COMPONENTS:
                near = did_you_mean(component, COMPONENTS)
                raise UserError(
                    f"{KEY}: unknown component {component!r} in {key!r}{near}; components: {', '.join(COMPONENTS)}"
                )
            if component in slots:
                raise UserError(f"{KEY}: component {component!r} is placed twice")
            slots[component] = _place(key, value, devices, groups)
    for component in COMPONENTS:
        if component not in slots:
            raise UserError(f"{KEY}: component {component!r} is not placed; placed are: {', '.join(slots) or 'none'}")
    return slots


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
