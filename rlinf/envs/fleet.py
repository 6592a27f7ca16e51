"""Fleet: the simulator processes of a batch of envs, addressed by row; a process that dies is started again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.data.layout import split_evenly
from rlinf.envs.config import EnvConfig
from rlinf.envs.sim_process import SimProcess, SimulatorDiedError, exchange, start_all
from rlinf.errors import SimulatorError
from rlinf.progress import report
from rlinf.simulators.child_program import OBSERVED
from rlinf.simulators.contract import EnvSpec

logger = logging.getLogger(__name__)


class Fleet:
    """Spreads rows 0..B-1 over processes, neighbours together; a process holds several scenes, a batched one all."""

    def __init__(
        self,
        cfg: EnvConfig,
        spec: EnvSpec,
        env_ids: Sequence[int],
        *,
        options: Any,
        num_processes: int,
        chunk_size: int,
        playing: Callable[[int], str],
        num_recorded: int = 0,
        critic_state: bool = False,
        demonstrations: bool = False,
    ) -> None:
        """`playing` says what a row plays, for error messages; of `demonstrations` every step is shared."""
        self.cfg, self.env_ids, self._playing = cfg, env_ids, playing
        self.num_restarts = 0  # since the start
        if spec.batched:
            num_processes = 1
        self.rows = split_evenly(len(env_ids), num_processes)
        self._place = {row: (p, row - rows[0]) for p, rows in enumerate(self.rows) for row in rows}
        self._failures = [0] * num_processes  # since `reset_failure_count`
        self._processes: list[SimProcess] = []

        def make(p: int, rows: range) -> SimProcess:
            recorded = sum(row < num_recorded for row in rows)
            layout = scene_arrays(spec, len(rows), chunk_size, recorded, critic_state, demonstrations)
            name = f"{p} (envs {env_ids[rows[0]]}-{env_ids[rows[-1]]})"
            return SimProcess(cfg, options, name=name, num_scenes=len(rows), layout=layout, batched=spec.batched)

        self._make = make

    @property
    def running(self) -> bool:
        """Whether the processes are up."""
        return bool(self._processes)

    def start(self) -> None:
        """Start every process and wait until all have imported their simulator."""
        if self._processes:
            return
        try:
            for p, rows in enumerate(self.rows):
                self._processes.append(self._make(p, rows))
            start_all(self._processes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process and free the shared memory."""
        for process in self._processes:
            process.close()
        self._processes = []

    def reset_failure_count(self) -> None:
        """Start a new budget of `max_restarts` failures per process; called once per training step."""
        self._failures = [0] * len(self._failures)

    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes]

    def array(self, row: int, name: str) -> np.ndarray:
        """A row of a shared array, without copying; it is overwritten by the next command."""
        p, scene = self._place[row]
        return self._processes[p].arrays[name][scene]

    def arrays(self, row: int, prefix: str) -> dict[str, np.ndarray]:
        """The row of every shared array whose name begins with `prefix`, without copying, by the rest of its name."""
        p, scene = self._place[row]
        shared = self._processes[p].arrays.items()
        return {name.removeprefix(prefix): rows[scene] for name, rows in shared if name.startswith(prefix)}

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
        scenes: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}  # by process
        for row, arguments in work.items():
            p, scene = self._place[row]
            scenes.setdefault(p, []).append((scene, arguments))
        answers = exchange(
            {self._processes[p]: {"command": command, "scenes": part} for p, part in scenes.items()},
            self.cfg.step_deadline_s,
        )
        replies: dict[int, dict[str, Any]] = {}
        gone: set[int] = set()
        for p, (process, rows) in enumerate(zip(self._processes, self.rows, strict=False)):  # no process: not started
            answer = answers.get(process)
            if isinstance(answer, SimulatorDiedError):
                self._restart(p, answer)
                gone |= set(rows)
            elif answer is not None:
                replies |= {rows[int(scene)]: reply for scene, reply in answer["replies"].items()}
                for scene, text in answer["failed"].items():
                    self._count_failure(p, [rows[int(scene)]], text)
                    gone.add(rows[int(scene)])
        return replies, gone

    def build(
        self, command: str, work: Mapping[int, Mapping[str, Any]], task_of: Callable[[int], str]
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """As `command`, for the first scenes of new processes: one of each process at a time, reporting its task."""
        replies: dict[int, dict[str, Any]] = {}
        gone: set[int] = set()
        rounds: dict[int, list[int]] = {}
        for row in work:
            rounds.setdefault(self._place[row][1], []).append(row)
        for rows in rounds.values():
            report(f"building {task_of(rows[0])}", len(replies), len(work))
            made, lost = self.command(command, {row: work[row] for row in rows if row not in gone})
            replies |= made
            gone |= lost
        report("building", len(work), len(work))
        return replies, gone

    def _restart(self, p: int, fault: SimulatorDiedError) -> None:
        """Start a process that died again, and once more whenever that fails, up to `max_restarts` failures."""
        while True:
            self._count_failure(p, self.rows[p], str(fault))
            try:
                self._processes[p].start()
                return self._processes[p].wait_ready()
            except SimulatorDiedError as again:
                fault = again

    def _count_failure(self, p: int, rows: Sequence[int], what: str) -> None:
        """Warn of a failure that cost these rows their episodes; SimulatorError when there were too many."""
        self._failures[p] += 1
        self.num_restarts += 1
        playing = [text for text in map(self._playing, rows) if text]
        names = "; ".join(playing[:4]) + (f" and {len(playing) - 4} more" if len(playing) > 4 else "")
        first, last = self.env_ids[self.rows[p][0]], self.env_ids[self.rows[p][-1]]
        who, most = f"simulator {self.cfg.env_type!r} of envs {first}-{last}", self.cfg.max_restarts
        text = f"{who} failed while playing {names or 'nothing'}: {what}"
        if self._failures[p] > most:
            raise SimulatorError(f"{text}\ngiven up after {most} restarts in one step (max_restarts)")
        logger.warning("%s\nit starts again; what these episodes did so far does not count", text)


def scene_arrays(
    spec: EnvSpec, scenes: int, chunk_size: int, recorded: int, critic_state: bool, demonstrations: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a process shares with its parent, name -> dtype, shape: actions in, results and observations out."""
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
    if demonstrations:  # the same for each step, and what the expert wanted and did
        seen = {name: arrays[name] for name in OBSERVED if name in arrays}
        arrays |= {f"demo_{name}": (kind, (scenes, chunk_size, *shape[1:])) for name, (kind, shape) in seen.items()}
        arrays |= {"demo_labels": arrays["actions"], "demo_actions": arrays["actions"]}
    return arrays
