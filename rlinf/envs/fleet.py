"""Fleet: the simulator processes of a batch of envs, addressed by row; a process that dies is started again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from rlinf.data.layout import split_evenly
from rlinf.envs.config import EnvConfig
from rlinf.envs.routing import assign, missing_copies, num_processes, tasks_per_process
from rlinf.envs.sim_process import SharedArrays, SimProcess, SimulatorDiedError, exchange, start_all
from rlinf.errors import SimulatorError
from rlinf.progress import report
from rlinf.simulators.child_program import OBSERVED
from rlinf.simulators.contract import EnvSpec, task_number
from rlinf.simulators.png import largest_png
from rlinf.simulators.tiles import tile_size

UNEVEN, MOST_UNEVEN = 1.25, 2.0  # times its share of the work that a process may get before tasks are loaded for it in
# others: while tasks are being loaded anyway, and after
FILMED = 3.0  # times as long as another that a filmed step is taken to be before one was measured

logger = logging.getLogger(__name__)


class Fleet:
    """Spreads rows 0..B-1 over processes, neighbours together; a process holds several scenes, a batched one all.

    Where a simulator keeps tasks in memory, a row moves to a process that has the task of its next episode.
    """

    def __init__(
        self,
        cfg: EnvConfig,
        spec: EnvSpec,
        env_ids: Sequence[int],
        *,
        options: Any,
        chunk_size: int,
        playing: Callable[[int], str],
        num_recorded: int = 0,
        critic_state: bool = False,
        demonstrations: bool = False,
        load_ahead: bool = False,
    ) -> None:
        """`playing` says what a row plays, for error messages; of `demonstrations` every step is shared.

        `load_ahead` loads the rest of the suite once as many episodes have begun as it has tasks.
        """
        self.cfg, self.env_ids, self._playing = cfg, env_ids, playing
        self.num_restarts = 0  # since the start
        self.num_tasks_built = 0  # since the start
        processes = num_processes(cfg, spec, len(env_ids))
        self._failures = [0] * processes  # since `reset_failure_count`
        self._processes: list[SimProcess] = []
        self._shared: SharedArrays | None = None
        self._num_recorded = num_recorded
        # Seconds and steps of a task's episodes, by its number and whether a video shows them.
        self._spent: dict[tuple[int, bool], tuple[float, int]] = {}
        self._ids_to_load: dict[int, int] = {}  # one of each task, by its number, where tasks are loaded ahead
        self._forget()
        self._routed, self._max_loaded = spec.loaded_task_bytes > 0, 0
        if self._routed:
            self._max_loaded = options.max_loaded_tasks or tasks_per_process(cfg, spec, len(env_ids))
            options = replace(options, max_loaded_tasks=self._max_loaded)
            if load_ahead:
                firsts = spec.reset_ids["train"][: len(spec.tasks)]  # of every task, for they are interleaved
                self._ids_to_load = {task_number(reset_id): reset_id for reset_id in firsts}
        layout = scene_arrays(spec, len(env_ids), chunk_size, num_recorded, critic_state, demonstrations)

        def make(p: int, rows: Sequence[int]) -> SimProcess:
            name = str(p) if self._routed else f"{p} (envs {env_ids[rows[0]]}-{env_ids[rows[-1]]})"
            assert self._shared is not None
            return SimProcess(cfg, options, name=name, rows=rows, shared=self._shared, spec=spec, routed=self._routed)

        self._layout, self._make = layout, make

    @property
    def running(self) -> bool:
        """Whether the processes are up."""
        return bool(self._processes)

    def start(self) -> None:
        """Start every process and wait until all have imported their simulator."""
        if self._processes:
            return
        try:
            self._shared = SharedArrays(self._layout)
            self._processes = [self._make(p, rows) for p, rows in enumerate(self.rows)]
            start_all(self._processes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process and free the shared memory."""
        for process in self._processes:
            process.close()
        if self._shared is not None:
            self._shared.close()
        self._processes, self._shared = [], None
        self._forget()

    def _forget(self) -> None:
        """Note that rows lie as in the beginning, with nothing loaded."""
        self.rows = [list(rows) for rows in split_evenly(len(self.env_ids), len(self._failures))]  # by process
        self._process_of = {row: p for p, rows in enumerate(self.rows) for row in rows}
        self._loaded: list[list[int]] = [[] for _ in self.rows]  # numbers of the tasks in memory, by process
        self._built = [0] * len(self.rows)  # tasks that each process has built since it started
        self._task_of: dict[int, int] = {}  # number of the task of each row's last episode
        self._num_begun, self._all_loaded = 0, False

    def reset_failure_count(self) -> None:
        """Start a new budget of `max_restarts` failures per process; called once per training step."""
        self._failures = [0] * len(self._failures)

    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes]

    def array(self, row: int, name: str) -> np.ndarray:
        """A row of a shared array, without copying; it is overwritten by the next command."""
        return self._arrays[name][row]

    def arrays(self, row: int, prefix: str) -> dict[str, np.ndarray]:
        """The row of every shared array whose name begins with `prefix`, without copying, by the rest of its name."""
        shared = self._arrays.items()
        return {name.removeprefix(prefix): rows[row] for name, rows in shared if name.startswith(prefix)}

    def gather(self, name: str, rows: Sequence[int]) -> np.ndarray:
        """A copy of some rows of a shared array, [len(rows), ...]."""
        rows_in_order = len(rows) == len(self.env_ids)
        return self._arrays[name].copy() if rows_in_order else self._arrays[name][list(rows)]

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        assert self._shared is not None
        return self._shared.arrays

    def place(self, reset_ids: Mapping[int, int], running: Collection[int]) -> set[int]:
        """Move rows (row -> reset id) that are about to start an episode to processes that have its task in memory.

        `running` are the rows whose episodes go on. Returns the rows of processes that died on the way.
        """
        if not self._routed or not reset_ids:
            return set()
        gone = self._load_ahead()
        tasks = {row: task_number(reset_id) for row, reset_id in reset_ids.items()}
        seconds_of = self._seconds_per_step()
        going_on = [
            sum(seconds_of(row, self._task_of[row]) for row in rows if row in running and row not in tasks)
            for rows in self.rows
        ]
        seconds = {row: seconds_of(row, task) for row, task in tasks.items()}
        tolerated = MOST_UNEVEN if self._all_loaded else UNEVEN
        self._process_of |= assign(tasks, seconds, self._loaded, going_on, tolerated=tolerated)
        self._task_of |= tasks
        self.rows = [[] for _ in self.rows]
        for row, p in sorted(self._process_of.items()):
            self.rows[p].append(row)
        self._num_begun += len(tasks)
        return gone

    def _seconds_per_step(self) -> Callable[[int, int], float]:
        """What a step of a row takes that plays a task: as measured, or as of other tasks; filmed rows apart."""
        known = {kind: spent / steps for kind, (spent, steps) in self._spent.items()}
        plain, filmed = ([s for (_, shown), s in known.items() if shown == of] for of in (False, True))
        usual = fmean(plain) if plain else 1.0
        usual_filmed = fmean(filmed) if filmed else FILMED * usual

        def seconds(row: int, task: int) -> float:
            is_filmed = row < self._num_recorded
            return known.get((task, is_filmed), usual_filmed if is_filmed else usual)

        return seconds

    def _load_ahead(self) -> set[int]:
        """Load the rest of the suite, once, where it is time to; returns the rows of processes that died meanwhile."""
        ids = self._ids_to_load
        if not ids or self._all_loaded or self._num_begun < len(ids):
            return set()
        self._all_loaded = True
        parts = missing_copies(list(ids), self._loaded, self._max_loaded)
        messages = {
            self._processes[p]: {"command": "load", "reset_ids": [ids[task] for task in part]}
            for p, part in enumerate(parts)
            if part
        }
        return self._take_in(exchange(messages, self.cfg.step_deadline_s))[1]

    def command(
        self, command: str, work: Mapping[int, Mapping[str, Any]]
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Run `command` on rows (row -> arguments), all processes at once.

        Returns the replies by row, and every row whose scene is gone: those that raised, and all rows of a process that
        died or hung (also rows the command did not name). Gone rows need a reset.
        """
        scenes: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}  # by process
        for row, arguments in work.items():
            scenes.setdefault(self._process_of[row], []).append((row, arguments))
        messages = {self._processes[p]: {"command": command, "scenes": part} for p, part in scenes.items()}
        return self._take_in(exchange(messages, self.cfg.step_deadline_s))

    def _take_in(
        self, answers: Mapping[SimProcess, dict[str, Any] | SimulatorDiedError]
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Read the answers to a command and start processes that died again; returns as `command`."""
        replies: dict[int, dict[str, Any]] = {}
        gone: set[int] = set()
        for p, process in enumerate(self._processes):
            answer = answers.get(process)
            if isinstance(answer, SimulatorDiedError):
                self._restart(p, answer)
                gone |= set(self.rows[p])
            elif answer is not None:
                replies |= {int(row): reply for row, reply in answer["replies"].items()}
                for text in answer.get("notes", ()):
                    logger.warning("simulator %r: %s", self.cfg.env_type, text)
                for row, text in answer["failed"].items():
                    self._count_failure(p, [int(row)], text)
                    gone.add(int(row))
                if self._routed:
                    self._note_times(answer["replies"])
                    self.num_tasks_built += answer["built"] - self._built[p]
                    self._loaded[p], self._built[p] = answer["loaded"], answer["built"]
        return replies, gone

    def _note_times(self, replies: Mapping[str, dict[str, Any]]) -> None:
        """Add up how long the steps of each task take, filmed or not."""
        for row, reply in replies.items():
            if "steps" in reply:
                kind = self._task_of[int(row)], int(row) < self._num_recorded
                spent, steps = self._spent.get(kind, (0.0, 0))
                self._spent[kind] = spent + reply["seconds"], steps + reply["steps"]

    def build(
        self, command: str, work: Mapping[int, Mapping[str, Any]], task_of: Callable[[int], str]
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """As `command`, for the first scenes of new processes: one of each process at a time, reporting its task."""
        replies: dict[int, dict[str, Any]] = {}
        gone: set[int] = set()
        rounds: dict[int, list[int]] = {}
        for row in work:
            rounds.setdefault(self.rows[self._process_of[row]].index(row), []).append(row)
        for rows in rounds.values():
            report(f"building {task_of(rows[0])}", len(replies), len(work))
            made, lost = self.command(command, {row: work[row] for row in rows if row not in gone})
            replies |= made
            gone |= lost
        report("building", len(work), len(work))
        return replies, gone

    def _restart(self, p: int, fault: SimulatorDiedError) -> None:
        """Start a process that died again, and once more whenever that fails, up to `max_restarts` failures."""
        self._loaded[p], self._built[p] = [], 0
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
        envs = [self.env_ids[row] for row in self.rows[p]]
        together = f"{envs[0]}-{envs[-1]}" if envs and envs[-1] - envs[0] < len(envs) else ", ".join(map(str, envs))
        who, most = f"simulator {self.cfg.env_type!r} of envs {together or 'none'}", self.cfg.max_restarts
        text = f"{who} failed while playing {names or 'nothing'}: {what}"
        if self._failures[p] > most:
            raise SimulatorError(f"{text}\ngiven up after {most} restarts in one step (max_restarts)")
        logger.warning("%s\nit starts again; what these episodes did so far does not count", text)


def scene_arrays(
    spec: EnvSpec, scenes: int, chunk_size: int, recorded: int, critic_state: bool, demonstrations: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What processes share with their parent, name -> dtype, shape: actions in, results and observations out."""
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
        arrays["frames"] = ("uint8", (recorded, chunk_size, *tile_size(spec.image_size, recorded), 3))
    if demonstrations:  # the same for each step, and what the expert wanted and did
        seen = {name: arrays[name] for name in OBSERVED if name in arrays}
        arrays |= {f"demo_{name}": (kind, (scenes, chunk_size, *shape[1:])) for name, (kind, shape) in seen.items()}
        arrays |= {"demo_labels": arrays["actions"], "demo_actions": arrays["actions"]}
        for name in ("images", "wrist_images"):  # and, where the parent asks for it, all pictures encoded
            if name in arrays:
                *_, height, width, _ = arrays[name][1]
                cameras = math.prod(arrays[name][1][1:-3])
                arrays[f"png_{name}"] = ("uint8", (scenes, chunk_size, cameras, largest_png(height, width)))
                arrays[f"size_{name}"] = ("int64", (scenes, chunk_size, cameras))
    return arrays
