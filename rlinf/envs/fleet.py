"""Fleet: the simulator processes of one VecEnv, addressed by row; restarts what dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlinf.envs.sim_process import ScenesReply, SimProcess, SimulatorDiedError, command_scenes, start_all
from rlinf.errors import SimulatorError
from rlinf.simulators.contract import EnvSpec

logger = logging.getLogger(__name__)


class Fleet:
    """Rows 0..B-1 spread over processes as neighbours; every process holds several scenes, a batched one all."""

    def __init__(
        self,
        *,
        simulator: str,
        options: Any,
        spec: EnvSpec,
        env_ids: Sequence[int],
        num_processes: int,
        chunk_size: int,
        num_recorded: int,
        critic_state: bool,
        python: str | None,
        deadline_s: float,
        max_restarts: int,
        describe: Callable[[int], str],
    ) -> None:
        self.simulator, self.env_ids, num_envs = simulator, env_ids, len(env_ids)
        self.deadline_s, self.max_restarts = deadline_s, max_restarts
        self.num_restarts = 0  # since the start
        if spec.batched:
            num_processes = 1
        self.rows = split_evenly(num_envs, num_processes)
        self._describe = describe  # row -> what it plays, for error messages
        self._place = {row: (p, row - rows[0]) for p, rows in enumerate(self.rows) for row in rows}
        self._failures = [0] * num_processes  # since `forgive`
        self._processes: list[SimProcess] = []
        self._make = [
            {
                "simulator": simulator,
                "options": options,
                "num_scenes": len(rows),
                "layout": scene_arrays(spec, len(rows), chunk_size, sum(r < num_recorded for r in rows), critic_state),
                "name": f"{p} (envs {env_ids[rows[0]]}-{env_ids[rows[-1]]})",
                "python": python,
                "batched": spec.batched,
            }
            for p, rows in enumerate(self.rows)
        ]

    @property
    def running(self) -> bool:
        """Whether the processes are up."""
        return bool(self._processes)

    def start(self) -> None:
        """Start every process and wait until all have imported their simulator."""
        if self._processes:
            return
        try:
            for arguments in self._make:
                self._processes.append(SimProcess(**arguments))
            start_all(self._processes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process and free the shared memory."""
        for process in self._processes:
            process.close()
        self._processes = []

    def forgive(self) -> None:
        """Count failures from zero again (a new training step)."""
        self._failures = [0] * len(self._failures)

    def pids(self) -> list[int]:
        """Process ids, for tests and the curious."""
        return [process.pid for process in self._processes]

    def array(self, row: int, name: str) -> np.ndarray:
        """A row of a shared array, without copying; it is overwritten by the next command."""
        p, scene = self._place[row]
        return self._processes[p].arrays[name][scene]

    def gather(self, name: str, rows: Sequence[int]) -> np.ndarray:
        """A copy of some rows of a shared array, [len(rows), ...]."""
        if len(rows) == len(self.env_ids):
            return np.concatenate([process.arrays[name] for process in self._processes])
        return np.stack([self.array(row, name) for row in rows])

    def command(
        self, command: str, work: Mapping[int, Mapping[str, Any]]
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Run `command` on rows (row -> arguments), all processes at once.

        Returns the replies by row, and every row whose scene is gone: those that raised, and all rows of a process that
        died or hung (also rows the command did not name). Gone rows need a reset.
        """
        scenes: dict[SimProcess, list[tuple[int, Mapping[str, Any]]]] = {}
        for row, arguments in work.items():
            p, scene = self._place[row]
            scenes.setdefault(self._processes[p], []).append((scene, arguments))
        number = {process: p for p, process in enumerate(self._processes)}
        replies: dict[int, dict[str, Any]] = {}
        gone: set[int] = set()
        for process, reply in command_scenes(command, scenes, self.deadline_s).items():
            p = number[process]
            if isinstance(reply, ScenesReply):
                replies |= {self.rows[p][scene]: r for scene, r in reply.replies.items()}
                failed = {self.rows[p][scene]: text for scene, text in reply.failed.items()}
                for row, text in failed.items():
                    self._count_failure(p, [row], text)
                gone |= set(failed)
            else:
                self._restart(p, reply)
                gone |= set(self.rows[p])
        return dict(sorted(replies.items())), gone

    def _restart(self, p: int, fault: SimulatorDiedError) -> None:
        self._count_failure(p, self.rows[p], str(fault))
        while True:
            try:
                self._processes[p].start()
                self._processes[p].wait_ready()
                return
            except SimulatorDiedError as again:
                self._count_failure(p, self.rows[p], str(again))

    def _count_failure(self, p: int, rows: Sequence[int], what: str) -> None:
        self._failures[p] += 1
        self.num_restarts += 1
        playing = [text for text in map(self._describe, rows) if text]
        names = "; ".join(playing[:4]) + (f" and {len(playing) - 4} more" if len(playing) > 4 else "")
        first, last = self.env_ids[self.rows[p][0]], self.env_ids[self.rows[p][-1]]
        text = f"simulator {self.simulator!r} of envs {first}-{last} failed while playing {names or 'nothing'}: {what}"
        if self._failures[p] > self.max_restarts:
            raise SimulatorError(f"{text}\ngiven up after {self.max_restarts} restarts in one step (max_restarts)")
        logger.warning("%s\nit starts again; the steps of these episodes are masked", text)


def split_evenly(count: int, parts: int) -> list[range]:
    """Ranges of neighbours whose sizes differ by at most one."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def scene_arrays(
    spec: EnvSpec, scenes: int, chunk_size: int, recorded: int, critic_state: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a process shares with its parent: actions in, results and observations out."""
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {
        "actions": ("float32", (scenes, chunk_size, spec.action_dim)),
        "rewards": ("float32", (scenes, chunk_size)),
        "success": ("bool", (scenes, chunk_size)),
        "done": ("bool", (scenes, chunk_size)),
        "images": ("uint8", (scenes, *spec.image_size, 3)),
    }
    if spec.num_wrist_images:
        arrays["wrist_images"] = ("uint8", (scenes, spec.num_wrist_images, *spec.wrist_image_size, 3))
    if spec.state_dim:
        arrays["states"] = ("float32", (scenes, spec.state_dim))
    if critic_state and spec.critic_state_dim:
        arrays["critic_state"] = ("float32", (scenes, spec.critic_state_dim))
    if recorded:
        arrays["frames"] = ("uint8", (recorded, chunk_size, *spec.image_size, 3))
    return arrays
