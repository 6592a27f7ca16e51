"""Processes that stand in for the ranks of a worker group: torch.distributed on the CPU, without Ray."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlinf.runtime.process_group import ProcessGroup, disconnect

WORLD = 3
TIMEOUT = timedelta(seconds=60)  # of one collective


class Ranks:
    """Three processes that can act as groups of one, two or three."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, f"{folder}/store", theirs), daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies is noticed
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(group, *args) on each rank of a group of `size`; results by rank, errors of all ranks as one."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, args))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        if errors := [f"rank {rank}: {a}" for rank, a in enumerate(answers) if isinstance(a, Exception)]:
            raise RuntimeError("\n".join(errors))
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()


def _serve(rank: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=TIMEOUT)
    groups = {size: dist.new_group(list(range(size)), timeout=TIMEOUT) for size in range(1, WORLD + 1)}
    with suppress(EOFError):  # the pipe was closed
        while True:
            size, function, args = pipe.recv()
            try:
                answer = function(ProcessGroup(rank, size, groups[size]), *args)
            except Exception as error:
                answer = RuntimeError("".join(traceback.format_exception(error)))
            pipe.send(answer)
    disconnect()
