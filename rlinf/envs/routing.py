"""Which simulator process plays which episode: one that has its task in memory, with equal work. Torch-free.

Building a task of MetaWorld takes as long as hundreds of its steps, and a step of one task six times that of another.
So a task is loaded in several processes, and an episode goes to one of them; which one makes no difference to what is
simulated. A task is known by its number.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.simulators.contract import EnvSpec

COPIES = 6  # processes that load a task: 64 draws of 50 tasks then find equal loads in 16; with 2, half of them do
EVEN = 1e-9  # differences of work below this are none
MIN_LOADED = 4  # tasks that a process may always keep
MEMORY_SHARE = 4  # loaded tasks take up to this part (a quarter) of a machine whose every core has a process


@cache
def usable_cores() -> int:
    """Cores that this process may use: of the machine, within its affinity and the limit of its control group."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def num_processes(cfg: EnvConfig, spec: EnvSpec, num_envs: int) -> int:
    """Simulator processes of an env worker's stage."""
    return 1 if spec.batched else min(num_envs, cfg.num_processes or usable_cores())


def tasks_per_process(cfg: EnvConfig, spec: EnvSpec, num_envs: int) -> int:
    """Most tasks that a process keeps in memory, where nothing is said: enough for COPIES of each, if they fit."""
    processes = num_processes(cfg, spec, num_envs)
    groups = max(1, num_envs // cfg.group_size)  # which start with a task each
    copies = min(processes, -(-COPIES * processes // min(processes, groups)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fitting = memory // MEMORY_SHARE // usable_cores() // spec.loaded_task_bytes
    least = max(MIN_LOADED, even_load(num_envs, processes))  # fewer would be rebuilt within an episode
    return min(len(spec.tasks), max(least, min(fitting, -(-copies * len(spec.tasks) // processes))))


def even_load(num_envs: int, processes: int) -> int:
    """Episodes of the fullest process where all play equally many."""
    return -(-num_envs // processes)


def assign(
    tasks: Mapping[int, int],
    seconds: Mapping[int, float],
    loaded: Sequence[Collection[int]],
    running: Sequence[float],
    *,
    tolerated: float,
) -> dict[int, int]:
    """The process of each row that starts an episode of a task (row -> task), with nearly equal work for all.

    `seconds` is the work of each row's episode, in any unit; `loaded` are the tasks in memory and `running` the work of
    the episodes that go on, by process. A task is loaded in a further process where one would have more than
    `tolerated` times its share.
    """
    work = _Work(tasks, seconds, loaded, running)
    for row in sorted(tasks, key=lambda row: (-seconds[row], tasks[row], row)):
        work.place(row, min(work.holders(row) or work.everyone, key=lambda p: (work.load[p], len(work.held[p]))))
    share = sum(work.load) / len(work.load)
    while True:
        while work.pass_on():
            pass
        fullest, emptiest = (pick(work.everyone, key=work.load.__getitem__) for pick in (max, min))
        movable = [row for row in work.rows[fullest] if work.load[emptiest] + work.of(row) < work.load[fullest]]
        if work.load[fullest] <= max(tolerated * share, share + EVEN) or not movable:
            return {row: p for p, rows in enumerate(work.rows) for row in rows}
        work.place(max(movable, key=work.of), emptiest, fullest)


class _Work:
    """Rows in processes while they are dealt out."""

    def __init__(
        self,
        tasks: Mapping[int, int],
        seconds: Mapping[int, float],
        loaded: Sequence[Collection[int]],
        running: Sequence[float],
    ) -> None:
        self.tasks, self.seconds, self.load = tasks, seconds, list(running)
        self.held = [set(there) for there in loaded]
        self.everyone = list(range(len(self.held)))
        self.rows: list[list[int]] = [[] for _ in self.held]

    def of(self, row: int) -> float:
        """The work of a row's episode."""
        return self.seconds[row]

    def holders(self, row: int) -> list[int]:
        """Processes that have a row's task loaded."""
        return [p for p in self.everyone if self.tasks[row] in self.held[p]]

    def place(self, row: int, target: int, source: int | None = None) -> None:
        """Give a row to a process, which loads its task where it has not."""
        if source is not None:
            self.rows[source].remove(row)
            self.load[source] -= self.of(row)
        self.rows[target].append(row)
        self.load[target] += self.of(row)
        self.held[target].add(self.tasks[row])

    def pass_on(self) -> bool:
        """Let the fullest process pass a row to one that holds its task, and that one to another, until all concerned
        have less than the fullest had; whether there was such a way."""
        start = max(self.everyone, key=self.load.__getitem__)
        most = self.load[start] - EVEN
        ways: list[tuple[int, float, list[tuple[int, int, int]]]] = [(start, 0.0, [])]  # process, work it got, moves
        seen = {start}
        for p, got, moves in ways:
            for row in sorted(self.rows[p], key=self.of, reverse=True):
                if moves and self.load[p] + got - self.of(row) >= most:
                    continue
                for q in self.holders(row):
                    if q in seen:
                        continue
                    steps = [*moves, (row, q, p)]
                    if self.load[q] + self.of(row) < most:
                        for step in steps:
                            self.place(*step)
                        return True
                    seen.add(q)
                    ways.append((q, self.of(row), steps))
        return False


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
