"""Accelerators of a process: from the plan's numbers to the ids a driver library understands. Torch-free.

Written against doubles: no machine with several GPUs was at hand (docs/cluster.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.placement.plan import Plan
from rlinf.simulators.opengl import egl_cuda_numbers as egl_cuda_numbers


def wanted_devices(plan: Plan) -> dict[int, int]:
    """Accelerators to reserve on each node: all up to the highest that the plan names, so that numbers keep meaning."""
    count: dict[int, int] = {}
    for process in plan.processes:
        highest = max(process.slot.devices, default=-1)
        count[process.slot.node] = max(count.get(process.slot.node, 0), highest + 1)
    return {node: n for node, n in count.items() if n > 0}


def sort_devices(granted: Sequence[tuple[int, str]]) -> dict[int, list[str]]:
    """(node, id) of every reserved accelerator, in any order -> node -> ids in the order of the plan's numbers."""
    ids: dict[int, list[str]] = {}
    for node, device in sorted(granted, key=lambda g: (g[0], (0, int(g[1]), "") if g[1].isdecimal() else (1, 0, g[1]))):
        ids.setdefault(node, []).append(device)
    return ids


def device_variables(ids: Sequence[str], egl_devices: Sequence[int | None]) -> dict[str, str]:
    """Environment of a process that may use these accelerators and no other.

    CUDA and, through it, SAPIEN's Vulkan renderer follow CUDA_VISIBLE_DEVICES; MuJoCo's EGL counts devices in its own
    order. egl_devices: the CUDA number of every EGL device of the machine, None for those without.
    """
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(ids)}
    if ids and ids[0].isdecimal() and int(ids[0]) in egl_devices:
        variables["MUJOCO_EGL_DEVICE_ID"] = str(list(egl_devices).index(int(ids[0])))
    return variables


def crowded_teams(plan: Plan) -> frozenset[str]:
    """Teams of which two processes share an accelerator, or one has none, which NCCL does not allow."""
    slots = {name: [plan.processes[i].slot for i in members] for name, members in plan.teams.items()}
    used = {name: [(slot.node, device) for slot in team for device in slot.devices] for name, team in slots.items()}
    shared = {name for name, devices in used.items() if len(devices) != len(set(devices))}
    return frozenset(shared | {name for name, team in slots.items() if not all(slot.devices for slot in team)})
