"""What a simulator file implements. Runs in the simulator's own process: numpy and the standard library only.

A simulator `foo` is one file `envs/sim/foo.py` (or a package), found by `env_type: foo`, with
- `Options`, a frozen dataclass: every key that `env.{train,eval}.init_params` may hold, plus `task_suite_name`;
- `spec(options) -> EnvSpec`, which must not import the simulator (config checks call it);
- `Scene(options)`, a `Simulator`;
- `Batch(options, num_scenes)`, a `BatchSimulator`, where `spec(options).batched` may be True;
- `Expert(options)` where scripted demonstrations exist;
- `check_setup(options)` where files can be missing: raises SetupError before anything heavy starts.
Imports of the simulator itself belong inside `Scene` and `Batch`, never at the top of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray


class SetupError(RuntimeError):
    """Something is not installed; the text says what, and the line that installs it."""


class AbsentError(SetupError):
    """Nothing of the simulator's own files is on this machine: not a fault, it was never set up."""


TASK_STRIDE = 1_000_000  # reset id = task number * TASK_STRIDE + layout seed


@dataclass(frozen=True)
class IdGrid(Sequence[int]):
    """The reset ids of some tasks x a range of layout seeds, without writing them out.

    Order: task by task, or `interleaved` (every task once, then the next layout) so that any run of ids mixes tasks.
    """

    tasks: tuple[int, ...]  # task numbers in the order of EnvSpec.tasks
    layouts: range
    interleaved: bool = False

    def __len__(self) -> int:
        return len(self.tasks) * len(self.layouts)

    def __getitem__(self, index):  # type: ignore[override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"reset id number {index} of {len(self)}")
        index %= len(self)
        layout, task = divmod(index, len(self.tasks)) if self.interleaved else divmod(index, len(self.layouts))[::-1]
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
    batched: bool = False  # one process holds all scenes of a worker and steps them together, as on a GPU

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
    steps: int  # actions executed; less than C when told to stop at success
    # Quantities of the episode so far. One named like an episode metric (metrics/names.py: avg_len,
    # task/<task>/success_once) is that metric, averaged over the episodes that hold it; another is extra/<name>.
    info: dict[str, float] = field(default_factory=dict)
    frames: list[Array] = field(default_factory=list)  # u8 [H, W, 3] per executed step, only while a video records

    @classmethod
    def zeros(cls, num_actions: int) -> ChunkResult:
        """A result to fill in, step by step."""
        return cls(
            rewards=np.zeros(num_actions, np.float32),
            success=np.zeros(num_actions, bool),
            done=np.zeros(num_actions, bool),
            steps=0,
        )


class Simulator(Protocol):
    """One scene."""

    def reset(self, reset_id: int) -> None:
        """Start the episode `reset_id`: same id, same pixels, bit for bit."""

    def task(self) -> str:
        """What the episode counts as in tables: a member of EnvSpec.tasks, or the name of a chain of them."""

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """Execute actions f32 [C, A] in the simulator's convention; frames are rendered only when `record`."""

    def observe(self) -> dict[str, Any]:
        """images u8 [H,W,3], wrist_images u8 [N,h,w,3] or None, states f32 [S], task_description str (it may change
        during an episode), critic_state f32 [K] or None. Called once per chunk.

        A simulator may also have `observe_soon`: the same, but images may be a function that returns them, called
        after the other scenes of the process were observed.
        """

    def get_state(self) -> bytes:
        """Everything needed to continue this episode bit for bit."""

    def set_state(self, state: bytes) -> None: ...

    def close(self) -> None: ...


class BatchSimulator(Protocol):
    """All scenes of a process, stepped together. `rows` are scene numbers; a scene that is not named stays as it is.

    What one does never depends on the others. An exception ends the process, and with it the episodes of all scenes.
    """

    def reset(self, rows: Sequence[int], reset_ids: Sequence[int]) -> None:
        """Start these episodes; R rows."""

    def task(self, row: int) -> str:
        """As Simulator.task."""

    def step_chunk(
        self,
        rows: Sequence[int],
        actions: Array,
        steps: Sequence[int],
        *,
        stop_on_success: bool,
        record: Sequence[bool],
    ) -> list[ChunkResult]:
        """Execute the first steps[r] of actions f32 [R, C, A] in every row, fewer where told to stop at success."""

    def observe(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """As Simulator.observe, row by row; a row that ended within the chunk is seen where it ended."""

    def get_state(self, rows: Sequence[int]) -> list[bytes]:
        """Everything needed to continue these episodes."""

    def set_state(self, rows: Sequence[int], states: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


class Expert(Protocol):
    """A scripted policy that may look into the simulator; success is judged by the benchmark, never by it."""

    def act(self, sim: Any) -> Array:
        """One action f32 [A] for the scene's current state."""


class ReplayState:
    """get_state/set_state for deterministic simulators: an episode is its reset id and the actions taken since.

    A scene that mixes this in calls `_begin(reset_id)` in reset and `_remember(actions)` for executed actions.
    """

    _reset_id: int
    _history: list[Array]

    def _begin(self, reset_id: int) -> None:
        self._reset_id, self._history = int(reset_id), []

    def _remember(self, actions: Array) -> None:
        self._history.append(np.array(actions, np.float32))

    def get_state(self) -> bytes:
        return json.dumps({"reset_id": self._reset_id, "actions": [a.tolist() for a in self._history]}).encode()

    def set_state(self, state: bytes) -> None:
        saved = json.loads(state)
        self.reset(saved["reset_id"])  # type: ignore[attr-defined]
        for actions in saved["actions"]:
            self.step_chunk(np.array(actions, np.float32), stop_on_success=False, record=False)  # type: ignore[attr-defined]
