"""Which simulator process plays which episode: one that has its task in memory, with equal loads. Torch-free.

Building a task of MetaWorld takes as long as a hundred of its steps. So a task is loaded in several processes, and an
episode goes to one of them; which one changes nothing in what is simulated. A task is known by its number.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.simulators.contract import EnvSpec

COPIES = 6  # processes that load a task: 64 draws of 50 tasks then find equal loads in 16; with 2, half of them do
MIN_LOADED = 4  # tasks that a process may always keep
MEMORY_SHARE = 4  # loaded tasks take up to this part (a quarter) of a machine whose every core has a process


def num_processes(cfg: EnvConfig, spec: EnvSpec, num_envs: int) -> int:
    """Simulator processes of an env worker's stage."""
    return 1 if spec.batched else min(num_envs, cfg.num_processes or os.cpu_count() or 1)


def tasks_per_process(cfg: EnvConfig, spec: EnvSpec, num_envs: int) -> int:
    """Most tasks that a process keeps in memory, where nothing is said: enough for COPIES of each, if they fit."""
    processes = num_processes(cfg, spec, num_envs)
    groups = max(1, num_envs // cfg.group_size)  # which start with a task each
    copies = min(processes, -(-COPIES * processes // min(processes, groups)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fitting = memory // MEMORY_SHARE // (os.cpu_count() or 1) // spec.loaded_task_bytes
    least = max(MIN_LOADED, even_load(num_envs, processes))  # fewer would be rebuilt within an episode
    return min(len(spec.tasks), max(least, min(fitting, -(-copies * len(spec.tasks) // processes))))


def even_load(num_envs: int, processes: int) -> int:
    """Episodes of the fullest process where all play equally many."""
    return -(-num_envs // processes)


def assign(
    tasks: Mapping[int, int], loaded: Sequence[Collection[int]], running: Sequence[int], most: int
) -> dict[int, int]:
    """The process of each row that starts an episode of a task (row -> task).

    `loaded` are the tasks in memory and `running` the episodes that go on, by process. No process gets more than `most`
    episodes, but for a quarter more where that spares the building of a task.
    """
    held = [set(there) for there in loaded]
    placed: list[list[int]] = [[] for _ in held]

    def load(p: int) -> int:
        return running[p] + len(placed[p])

    def fits(row: int, tried: set[int]) -> bool:
        """Place the row in a process that holds its task, moving rows on to others where it is full."""
        for p in sorted((p for p, there in enumerate(held) if tasks[row] in there), key=load):
            if p in tried:
                continue
            tried.add(p)
            if load(p) < most:
                placed[p].append(row)
                return True
            for i, other in enumerate(placed[p]):
                if fits(other, tried):
                    placed[p][i] = row
                    return True
        return False

    left = [row for row in sorted(tasks, key=lambda row: (tasks[row], row)) if not fits(row, set())]
    for row in left:
        task = tasks[row]
        p = min(range(len(held)), key=lambda p: (task not in held[p], load(p)))
        if task not in held[p] or load(p) >= most + most // 4:
            free = [p for p in range(len(held)) if load(p) < most]
            p = min(free, key=lambda p: (task not in held[p], load(p), len(held[p])))
        held[p].add(task)
        placed[p].append(row)
    return {row: p for p, rows in enumerate(placed) for row in rows}


def missing_copies(tasks: Sequence[int], loaded: Sequence[Collection[int]], limit: int) -> list[list[int]]:
    """The tasks that each process should load beside its own, until it has `limit`: equally many copies of each task.

    They are mixed, so that any tasks drawn together find processes of their own.
    """
    held, rng = [list(there) for there in loaded], np.random.default_rng(0)
    copies = {task: sum(task in there for there in held) for task in tasks}
    for _ in range(min(limit, len(tasks))):
        for p in rng.permutation(len(held)):
            wanted = [task for task in tasks if task not in held[p]]
            if len(held[p]) < limit and wanted:
                fewest = min(copies[task] for task in wanted)
                task = rng.choice([task for task in wanted if copies[task] == fewest]).item()
                held[p].append(task)
                copies[task] += 1
    return [there[len(before) :] for there, before in zip(held, loaded, strict=True)]
