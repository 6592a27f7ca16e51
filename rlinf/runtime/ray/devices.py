"""Accelerators of a process: from the plan's numbers to the ids that CUDA and EGL understand. Torch-free.

Tested without real GPUs: no machine with several of them was at hand (docs/cluster.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.placement.plan import Plan


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


def groups_without_nccl(plan: Plan) -> set[str]:
    """Process groups of which two members share an accelerator, or one has none, which NCCL does not allow."""
    found = set()
    for name, members in plan.process_groups.items():
        slots = [plan.processes[index].slot for index in members]
        used = [(slot.node, device) for slot in slots for device in slot.devices]
        if len(used) != len(set(used)) or not all(slot.devices for slot in slots):
            found.add(name)
    return found
