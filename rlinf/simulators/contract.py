"""What a simulator offers. Runs in the simulator's own process too: numpy and the standard library only, Python 3.10.

A simulator `foo` is a folder, found by `env_type: foo` under rlinf/simulators, or anywhere by its dotted path. Its
`__init__.py` offers
- `Options`, a frozen dataclass: every key that `env.{train,eval}.init_params` may hold, plus `task_suite_name`, plus
  those of `center_crop`, `use_custom_reward`, `assets_path`, `seeds_path` and `task_config` that the simulator reads
  from the block itself: where a field has that name, it takes the block's value, else a value is warned of;
- `spec(options) -> EnvSpec`, which must not import the simulator (config checks call it);
- `Scene(options)`, a `Simulator`;
- `Batch(options, num_scenes)`, a `BatchSimulator`, where `spec(options).batched` may be True;
- `Expert(options)`, an `Expert` or a `DrivingExpert`, where scripted demonstrations exist; with a method
  `solves(reset_id) -> bool` where `rlinf seeds` can look for episodes that it solves;
- `loaded_tasks()`, where `spec(options).loaded_task_bytes` is set: called in the simulator's process, it returns the
  numbers of the tasks in memory and how many were built since the process began; `Options` then has max_loaded_tasks;
- `smallest_task()`, where the defaults need files that may be absent: the task_config of which `rlinf doctor` draws a
  frame;
- `check_setup(options)`, where files can be missing: raises SetupError before anything heavy starts;
- `seed_candidates(split)` and `seed_document(options, found)`, where `rlinf seeds` looks for episodes that the expert
  solves: the reset ids to try, and what the file says of those found;
- `own_interpreter()`, where the simulator has an environment of its own: the interpreter to take without env.*.python,
  or None for the running one;
- `protocol(options)`, where more than the options decides what an evaluation measures: a dict of plain values that is
  laid over them (versions of packages, a digest of assets, the renderer that `auto` stands for), with None for an
  option that changes no number. Without it every option but paths counts.
`task_suite_name` is one name for all of these. Of a list in the block, `spec` is asked name by name and rlinf joins the
answers; `Scene`, `Batch`, `Expert` and `check_setup` get the options of the first name and must do for the reset ids of
all, which is no work where an id tells its task. A simulator that must know the list has a field
`listed: tuple[str, ...] = ()`, which holds it and is empty without one.
Rlinf's own are divided alike: suite.py (Options, spec), tasks.py (what is to be done, and when it is), scene.py,
expert.py, and assets.py where files are read. The simulator itself is imported inside `Scene` and `Batch` only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import numpy as np

Array = np.ndarray
Rows = Sequence[int]  # numbers of scenes within their process


def versions_of(*packages: str) -> dict[str, str | None]:
    """For `protocol`: `version.<package>` -> the version that is installed, None where it is not."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[f"version.{name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[f"version.{name}"] = None
    return found


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """For `protocol`: a digest of the names and contents of files below a folder, computed once per process."""
    about = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(set(files))]
    return _files_digest(str(folder), tuple(about))


@functools.cache
def _files_digest(folder: str, files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in files:
        digest.update(f"{os.path.relpath(name, folder)}\0{len(name)}".encode())
        digest.update(Path(name).read_bytes())
    return digest.hexdigest()[:16]


class SetupError(RuntimeError):
    """Something is not installed; the text says what, and the line that installs it."""


class AbsentError(SetupError):
    """Nothing of the simulator's own files is on this machine: not a fault, it was never set up."""


TASK_STRIDE = 1_000_000  # reset id = task number * TASK_STRIDE + layout seed


def task_number(reset_id: int) -> int:
    """The number of the task that a reset id of an IdGrid belongs to."""
    return reset_id // TASK_STRIDE


_notes: list[str] = []


def note(text: str) -> None:
    """Say something of a running episode in the log of the run; called in the simulator's process."""
    _notes.append(text)


def take_notes() -> list[str]:
    """What was said since the last call."""
    said = _notes[:]
    _notes.clear()
    return said


_listeners: list[Callable[[], None]] = []


def sign_of_life() -> None:
    """Tell the parent that a command which takes long goes on; called in the simulator's process."""
    for listener in _listeners:
        listener()


def on_sign_of_life(listener: Callable[[], None]) -> None:
    """Call this function at every sign of life."""
    _listeners.append(listener)


class ComputedIds(Sequence[int], ABC):
    """Many reset ids, computed when they are asked for instead of being written out."""

    @abstractmethod
    def at(self, position: int) -> int:
        """The id at a position from 0 on."""

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        positions = range(len(self))[index]
        return [self.at(i) for i in positions] if isinstance(positions, range) else self.at(positions)


@dataclass(frozen=True)
class IdGrid(ComputedIds):
    """The reset ids of some tasks x a range of layout seeds.

    Order: task by task, or `interleaved` (every task once, then the next layout) so that any run of ids mixes tasks.
    """

    tasks: tuple[int, ...]  # task numbers in the order of EnvSpec.tasks
    layouts: range
    interleaved: bool = False

    def __len__(self) -> int:
        return len(self.tasks) * len(self.layouts)

    def at(self, position: int) -> int:
        """The id at a position from 0 on."""
        task, layout = _task_and_place(position, len(self.tasks), len(self.layouts), interleaved=self.interleaved)
        return self.tasks[task] * TASK_STRIDE + self.layouts[layout]

    def __contains__(self, reset_id: object) -> bool:
        if not isinstance(reset_id, int):
            return False
        task, layout = divmod(reset_id, TASK_STRIDE)
        return task in self.tasks and layout in self.layouts

    def of_task(self, position: int) -> IdGrid:
        """The ids of the task at `position` in EnvSpec.tasks."""
        return IdGrid((self.tasks[position],), self.layouts)


@dataclass(frozen=True)
class JoinedIds(ComputedIds):
    """The reset ids of several tasks in one sequence: as many of each as the task with the fewest has; order as IdGrid.

    `of_task` and `in` know the others, too.
    """

    parts: tuple[Sequence[int], ...]  # in the order of EnvSpec.tasks
    interleaved: bool = False

    @property
    def per_task(self) -> int:
        """Ids of each task in the sequence."""
        return min(map(len, self.parts))

    def __len__(self) -> int:
        return len(self.parts) * self.per_task

    def at(self, position: int) -> int:
        """The id at a position from 0 on."""
        task, place = _task_and_place(position, len(self.parts), self.per_task, interleaved=self.interleaved)
        return self.parts[task][place]

    def __contains__(self, reset_id: object) -> bool:
        return any(reset_id in part for part in self.parts)

    def of_task(self, position: int) -> Sequence[int]:
        """The ids of the task at `position` in EnvSpec.tasks."""
        return self.parts[position]


def _task_and_place(position: int, num_tasks: int, per_task: int, *, interleaved: bool) -> tuple[int, int]:
    """Which task an id at `position` is of, and which one of the task's ids it is."""
    if interleaved:
        place, task = divmod(position, num_tasks)
    else:
        task, place = divmod(position, per_task)
    return task, place


# Layout seeds by what they are for; of those held out, a suite plays the first few
EVAL_LAYOUTS, DEMO_LAYOUTS, TRAIN_LAYOUTS = range(500), range(100_000, 500_000), range(500_000, TASK_STRIDE)


def split_ids(tasks: tuple[int, ...], trials: int) -> dict[str, IdGrid]:
    """EnvSpec.reset_ids of these task numbers, with `trials` held-out layouts of each."""
    return {
        "train": IdGrid(tasks, TRAIN_LAYOUTS, interleaved=True),
        "demo": IdGrid(tasks, DEMO_LAYOUTS, interleaved=True),
        "eval": IdGrid(tasks, EVAL_LAYOUTS[:trials]),
    }


@dataclass(frozen=True)
class EnvSpec:
    """The shape of one benchmark suite, known without starting the simulator."""

    suite: str
    tasks: tuple[str, ...]
    action_dim: int
    action_names: tuple[str, ...]
    gripper: Literal["none", "sign", "binary_pm1", "absolute"]  # how the simulator reads the gripper column
    state_dim: int
    image_size: tuple[int, int]  # height, width of the main camera
    reset_ids: Mapping[str, Sequence[int]]  # "train", "demo", "eval": disjoint, each id means the same scene everywhere
    control_hz: float
    task_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # e.g. difficulty -> tasks, for tables
    num_wrist_images: int = 0
    wrist_image_size: tuple[int, int] = (0, 0)
    critic_state_dim: int = 0  # K: columns of the simulator's privileged state, for a critic; 0: it tells none
    pays_events: bool = False  # rewards are paid as they come (a subtask solved), never as differences of a level
    min_episode_steps: int = 0  # max_episode_steps below this would cut what the suite's protocol allows
    step_limits: Mapping[str, int] = field(default_factory=dict)  # by task: actions at most, below max_episode_steps
    action_bound: float = 1.0  # actions lie within plus and minus this; an expert's are clipped to it
    expert_drives: bool = False  # the expert moves the robot by its own plan: no noise can be added to its actions
    loaded_task_bytes: int = 0  # memory of a task, where a process keeps some: episodes then go where theirs is loaded
    robot: str = ""  # which robot acts, as datasets name it
    batched: bool = False  # one process holds all scenes of a worker and steps them together, as on a GPU
    balanced: bool = False  # tasks get equal or weighted shares of the episodes; set by rlinf for lists and weights

    @property
    def critic_input_dim(self) -> int:
        """Columns that a critic reads: the simulator's K, then the share of the episode that has passed; 0 for none."""
        return self.critic_state_dim + 1 if self.critic_state_dim else 0


@dataclass
class ChunkResult:
    """What happened during one chunk of C actions; entries after `steps` are zero."""

    rewards: Array  # f32 [C] the benchmark's own reward level before differencing (0/1 success for sparse tasks)
    success: Array  # bool [C]
    done: Array  # bool [C]; terminal for reasons other than success
    steps: int  # actions executed; less than C when told to stop at success, or where the policy must look again
    # Quantities of the episode so far. One named like an episode metric (metrics/names.py: avg_len, fail_once,
    # task/<task>/success_once) is that metric, averaged over the episodes that hold it; another is extra/<name>.
    # A simulator in which an episode can fail tells fail_once and fail_at_end, 0 or 1, from the first step on.
    info: dict[str, float] = field(default_factory=dict)
    frames: list[Array] = field(default_factory=list)  # u8 [H, W, 3] per executed step, only while a video records

    @classmethod
    def zeros(cls, num_actions: int) -> ChunkResult:
        """A result to fill in, step by step."""
        return cls(np.zeros(num_actions, np.float32), np.zeros(num_actions, bool), np.zeros(num_actions, bool), steps=0)


class SceneObservation(TypedDict):
    """What a scene shows after a reset or a chunk."""

    images: Array | Callable[[], Array]
    """u8 [H, W, 3] of the main camera, or a function that returns what it saw: it is called after the other scenes of
    the process were observed, or an expert took further steps, so that a GPU draws all images before one is fetched."""
    wrist_images: Array | None  # u8 [N, h, w, 3]
    states: Array | None  # f32 [S]
    task_description: str  # the instruction; it may change during an episode
    critic_state: Array | None  # f32 [K]


class Simulator(Protocol):
    """One simulated world, which plays one episode after another."""

    def reset(self, reset_id: int) -> None:
        """Start the episode `reset_id`: same id, same pixels, bit for bit."""

    def task(self) -> str:
        """What the episode counts as in tables: a member of EnvSpec.tasks, or the name of a chain of them."""

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """Execute actions f32 [C, A] in the simulator's convention, at least one; frames only when `record`."""

    def observe(self) -> SceneObservation:
        """What the scene shows now; called once per chunk."""

    def get_state(self) -> bytes:
        """Everything needed to continue this episode bit for bit."""

    def set_state(self, state: bytes) -> None:
        """Continue the episode of a `get_state`."""

    def close(self) -> None:
        """Free what the scene holds."""


class BatchSimulator(Protocol):
    """All scenes of a process, stepped together. A scene whose row is not named stays as it is.

    What one does never depends on the others. An exception ends the process, and with it the episodes of all scenes.
    """

    def reset(self, rows: Rows, reset_ids: Sequence[int]) -> None:
        """Start these episodes; R rows."""

    def task(self, row: int) -> str:
        """As Simulator.task."""

    def step_chunk(
        self, rows: Rows, actions: Array, steps: Sequence[int], *, stop_on_success: bool, record: Sequence[bool]
    ) -> list[ChunkResult]:
        """Execute the first steps[r] of actions f32 [R, C, A] in every row, fewer where told to stop at success."""

    def observe(self, rows: Rows) -> list[SceneObservation]:
        """As Simulator.observe, row by row; a row that ended within the chunk is seen where it ended."""

    def get_state(self, rows: Rows) -> list[bytes]:
        """Everything needed to continue these episodes."""

    def set_state(self, rows: Rows, states: Sequence[bytes]) -> None:
        """Continue the episodes of a `get_state`."""

    def close(self) -> None:
        """Free what the scenes hold."""


class Expert(Protocol):
    """A scripted policy that may look into the simulator; success is judged by the benchmark, never by it."""

    def act(self, sim: Any) -> Array:
        """One action f32 [A] for the scene's current state."""


class DrivingExpert(ABC):
    """An expert that plans a whole episode and moves the robot itself; the parts of it are asked for one by one."""

    @abstractmethod
    def play(self, sim: Any, steps: int, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """Execute the next `steps` actions of the plan in the scene, as a chunk."""

    @abstractmethod
    def show(self, sim: Any, steps: int) -> tuple[list[SceneObservation], Array, ChunkResult]:
        """The next `steps` rows of a demonstration, or the rest of it: what was seen, actions f32 [T, A], and how it
        went; the last row says success or done."""


class ReplayScene(ABC):
    """A deterministic scene, whose state is its reset id and the actions since: a base class for a `Simulator`.

    Subclasses say how an episode starts, what one action does and what the camera sees.
    """

    reset_id: int
    _history: list[Array]  # chunks of executed actions

    @abstractmethod
    def start(self, reset_id: int) -> None:
        """Begin the episode `reset_id`; called by `reset`."""

    @abstractmethod
    def step(self, action: Array) -> tuple[float, bool, bool]:
        """Execute an action [A]; returns the reward level, success, and whether the episode ended without success."""

    @abstractmethod
    def frame(self) -> Array:
        """The main camera's image u8 [H, W, 3], for a video."""

    def info(self) -> dict[str, float]:
        """Quantities of the episode so far, for ChunkResult.info."""
        return {}

    def must_look(self) -> bool:
        """Whether the policy must see the scene before the next action: the rest of the chunk is then not played.

        For evaluations only: an update takes a chunk as one action, and one that was not played to its end for the end
        of the episode.
        """
        return False

    def reset(self, reset_id: int) -> None:
        """As Simulator.reset."""
        self.reset_id, self._history = int(reset_id), []
        self.start(self.reset_id)

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """As Simulator.step_chunk."""
        result = ChunkResult.zeros(len(actions))
        for i, action in enumerate(actions):
            reward, success, done = self.step(action)
            result.rewards[i], result.success[i], result.done[i], result.steps = reward, success, done, i + 1
            if record:
                result.frames.append(self.frame())
            if (stop_on_success and (success or done)) or self.must_look():
                break
        self._history.append(np.array(actions[: result.steps], np.float32))
        result.info = self.info()
        return result

    def get_state(self) -> bytes:
        """As Simulator.get_state."""
        return json.dumps({"reset_id": self.reset_id, "actions": [a.tolist() for a in self._history]}).encode()

    def set_state(self, state: bytes) -> None:
        """As Simulator.set_state."""
        saved = json.loads(state)
        self.reset(saved["reset_id"])
        for actions in saved["actions"]:
            self.step_chunk(np.array(actions, np.float32), stop_on_success=False, record=False)


def image_side(default: int, **given: int | None) -> int:
    """Pixels of a square image that several keys may set; ValueError where two differ or it is below 16."""
    sides = {key: pixels for key, pixels in given.items() if pixels is not None}
    if len(set(sides.values())) > 1:
        named = " and ".join(f"{key}={pixels}" for key, pixels in sides.items())
        raise ValueError(f"{named} must be equal: they name one square image")
    side = next(iter(sides.values()), default)
    if side < 16:
        raise ValueError(f"{next(iter(given))}={side} must be at least 16")
    return side
