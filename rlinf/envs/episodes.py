"""The running episode of each env, and which reset id an env plays next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from rlinf.data.noise import generator
from rlinf.data.types import EpisodeRecord
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import ids_of_task
from rlinf.simulators.contract import EnvSpec


@dataclass
class Episode:
    """The running episode of one env, or its last one while the env waits for a reset."""

    env_id: int  # global
    number: int = -1  # episodes this env has begun, less one
    reset_id: int = -1
    task: str = ""
    description: str = ""
    elapsed: int = 0  # primitive steps so far
    level: float = 0.0  # reward level after the last step
    episode_return: float = 0.0
    success_once: bool = False
    success_now: bool = False
    extra: dict[str, float] = field(default_factory=dict)
    waiting: bool = True  # ended (or never begun) and not reset: nothing is simulated
    loaded: bool = False  # whether its scene still holds this episode
    first_call: int = 0  # chunks that the batch had played when it began
    calls: int = 0  # chunks played
    instructions: list[tuple[int, str]] = field(default_factory=list)  # (chunk, description from then on)

    def next(self, number: int, reset_id: int, first_call: int = 0) -> Episode:
        """A new episode of the same env."""
        return Episode(self.env_id, number, reset_id, waiting=False, loaded=True, first_call=first_call)

    def told(self, description: str) -> None:
        """Take over what the policy is told from now on."""
        if description != self.description or not self.instructions:
            self.instructions.append((self.calls, description))
        self.description = description

    def to_json(self) -> dict[str, Any]:
        """The episode as a checkpoint holds it, where `loaded` is called on_stage."""
        saved = asdict(self)
        return saved | {"on_stage": saved.pop("loaded")}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Episode:
        """Read an episode that `to_json` wrote."""
        return cls(**{"loaded" if name == "on_stage" else name: value for name, value in saved.items()})

    def advance(self, levels: Sequence[float], success: Sequence[bool], *, relative: bool) -> list[float]:
        """Count the executed steps of a chunk; returns their rewards: the reward levels, or their differences."""
        rewards = []
        for level, solved in zip(levels, success, strict=True):
            rewards.append(level - self.level if relative else level)
            self.level, self.success_now = level, bool(solved)
            self.success_once |= bool(solved)
        self.elapsed += len(rewards)
        self.episode_return += float(sum(rewards))
        return rewards

    def title(self) -> str:
        """Names what is being played, for an error message; empty when nothing is."""
        return "" if self.waiting else f"env {self.env_id} task {self.task or '(starting)'} reset id {self.reset_id}"

    def caption(self, spec: EnvSpec, steps_ago: int, reward: float, solved: bool) -> list[str]:
        """Two lines for the video; of a chain of tasks, the instruction that is being followed."""
        title = self.task if self.task in spec.tasks else self.description
        line = f"step {self.elapsed - steps_ago} r {reward:.1f}"
        return [title, f"{line} success" if solved else line]

    def record(self, suite: str, seed: int, video: str | None = None) -> EpisodeRecord:
        """The record of the episode, for metrics and tables."""
        return EpisodeRecord(
            suite=suite,
            task=self.task,
            reset_id=self.reset_id,
            seed=seed,
            env_id=self.env_id,
            steps=self.elapsed,
            episode_return=self.episode_return,
            success_once=self.success_once,
            success_at_end=self.success_now,
            extra=dict(self.extra),
            first_call=self.first_call,
            calls=self.calls,
            instructions=tuple((call, text) for call, text in self.instructions),
            video=video,
        )


class TrainIds:
    """Chooses a new training id for every group and episode, drawn or in order: members start equal on any rank."""

    def __init__(self, cfg: EnvConfig, spec: EnvSpec, seed: int) -> None:
        self.cfg, self.seed = cfg, seed
        self.ids = spec.reset_ids["train"]
        self.num_groups = max(1, cfg.total_num_envs // cfg.group_size)
        self._shares: TaskShares | None = None
        if spec.balanced:
            self._shares = TaskShares([cfg.task_weights.get(task, 1.0) for task in spec.tasks], self.num_groups, seed)
            self._ids_of_task = [ids_of_task(spec, "train", task) for task in spec.tasks]

    def pick(self, env_id: int, number: int) -> int:
        """The reset id of an env's episode `number`."""
        group, ids = env_id // self.cfg.group_size, self.ids
        if self.cfg.use_ordered_reset_state_ids:
            return ids[(group + number * self.num_groups) % len(ids)]
        if self._shares is not None:
            ids = self._ids_of_task[self._shares.task(group, number)]
        return ids[int(generator(self.seed, "reset", 0, group, number).integers(len(ids)))]


class TaskShares:
    """Deals tasks to the groups of a rollout, so that each gets its share of them, rounded up or down.

    The line from 0 to 1 is divided among the tasks by weight, and the G groups stand on it in random order, 1 / G
    apart: a task with the share w of the line has w x G of them, rounded up or down. Where the first one stands moves
    from rollout to rollout (a van der Corput sequence), so that what was rounded evens out.
    """

    def __init__(self, weights: Sequence[float], num_groups: int, seed: int) -> None:
        self._ends = np.cumsum(weights) / np.sum(weights)
        self._num_groups, self._seed = num_groups, seed
        self._first = float(generator(seed, "tasks", 1).random())
        self._order = lru_cache(maxsize=64)(self._shuffled)  # the groups of a rollout ask for the same one

    def task(self, group: int, number: int) -> int:
        """Position in EnvSpec.tasks of what a group plays as its episode `number`."""
        stands = (self._order(number)[group] + (self._first + _van_der_corput(number)) % 1.0) / self._num_groups
        return min(int(np.searchsorted(self._ends, stands, side="right")), len(self._ends) - 1)

    def _shuffled(self, number: int) -> list[int]:
        return generator(self._seed, "tasks", 0, number).permutation(self._num_groups).tolist()


def _van_der_corput(number: int) -> float:
    """The binary digits of a number, mirrored at the point: 0, 1/2, 1/4, 3/4, 1/8, ..., as even as can be."""
    return int(f"{number:b}"[::-1], 2) / (1 << number.bit_length())


class EvalIds:
    """Deals evaluation ids: env i of n plays the trials i, i + n, i + 2n, ... of the list, each once."""

    def __init__(self, cfg: EnvConfig, trials: Sequence[int]) -> None:
        self.total_num_envs, self.trials = cfg.total_num_envs, trials

    def count(self, env_id: int) -> int:
        """How many trials an env plays."""
        return len(range(env_id, len(self.trials), self.total_num_envs))

    def pick(self, env_id: int, number: int) -> int:
        """The reset id of an env's trial `number`."""
        return self.trials[env_id + number * self.total_num_envs]
