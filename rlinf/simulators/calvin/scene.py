"""One play table and the chain of tasks played at it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np

from rlinf.simulators.calvin.assets import check_folder, find_folder, read_annotations
from rlinf.simulators.calvin.chain import Chain
from rlinf.simulators.calvin.expert import Expert
from rlinf.simulators.calvin.expert_moves import Hand
from rlinf.simulators.calvin.nearness import nearness
from rlinf.simulators.calvin.starts import start_of
from rlinf.simulators.calvin.suite import Options
from rlinf.simulators.calvin.tasks import TASKS, Facts, solved
from rlinf.simulators.contract import AbsentError, Array, ReplayScene, SceneObservation

EXPERT_STEPS = 300  # control steps at most for the task before an episode; drawer, slider and lamps take 12 to 40


def check_bullet() -> None:
    """Refuse a Python that Bullet has no wheel for; where it is merely not installed, importing it says so."""
    if sys.version_info >= (3, 12) and find_spec("pybullet") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise AbsentError(
            f"pybullet's wheels end at Python 3.11 and this is {version}; install with Python 3.11, or let "
            "env.train.python and env.eval.python name an interpreter that has numpy, pyyaml and pybullet"
        )


def check_setup(options: Options) -> None:
    """Refuse to start where files that the scenes need are missing."""
    check_folder(find_folder(options.data_path), options.scenes)


class Scene(ReplayScene):
    """An episode: a world, the chain of its tasks, and the facts of the moment at which the current task began."""

    def __init__(self, options: Options) -> None:
        check_bullet()
        check_setup(options)
        folder = find_folder(options.data_path)
        self.options = options
        self._sentences = read_annotations(folder, options.sentences)
        from rlinf.simulators.calvin.world import World

        self.world = World(folder, options)
        self._hand = Hand(self.world)

    def start(self, reset_id: int) -> None:
        """Build the world of the id, let a seeded one come to rest, and begin its chain."""
        options = self.options
        start = start_of(
            reset_id, options.tasks, options.in_a_row, expert_first=options.expert_first, compat=options.compat
        )
        if start.scene not in self.options.scenes:
            raise ValueError(f"reset id {reset_id} is of scene {start.scene}, not of {self.options.task_suite_name}")
        self.world.reset(start.scene, start.robot_obs, start.scene_obs)
        for _ in range(start.settle_steps):
            self.world.step(np.array([0, 0, 0, 0, 0, 0, start.gripper]))
        if start.done_before:
            self._let_expert_play(start.done_before)
        self._begin(start.tasks, options.step_limit)

    def _begin(self, tasks: tuple[str, ...], step_limit: int) -> None:
        """Begin these tasks with the world as it is now."""
        self.chain = Chain(tasks, step_limit=step_limit)
        self._begin_task(self.world.facts())

    def _begin_task(self, facts: Facts) -> None:
        """From these facts on the chain's current task is judged."""
        self._before = facts
        self._near = self._nearness(facts)

    def _let_expert_play(self, task: str) -> None:
        """Play a task as the scripted expert does, up to the step that solves it."""
        self._begin((task,), EXPERT_STEPS)
        expert = Expert(self.options)
        while not self.chain.over:
            self.step(expert.act(self))

    def task(self) -> str:
        return f"chain-{self.world.scene}" if len(self.chain.tasks) > 1 else self.chain.task

    @property
    def instruction(self) -> str:
        """The sentence of the current task; drawn anew for each, from the reset id alone."""
        sentences = self._sentences[self.chain.task]
        return sentences[int(np.random.default_rng([self.reset_id, self.chain.position]).integers(len(sentences)))]

    def step(self, action: Array) -> tuple[float, bool, bool]:
        """A reward of 1 each time a task of the chain is solved, success once all are; shaped_reward pays the way."""
        self.world.step(action)
        reward = 0.0 if self.chain.over else self._judge()
        return reward, self.chain.complete, self.chain.failed

    def info(self) -> dict[str, float]:
        """Metrics of the chain so far."""
        return self.chain.metrics()

    def must_look(self) -> bool:
        """The benchmark's own evaluator asks the policy anew as soon as a subtask is solved."""
        chain = self.chain
        return self.options.looks_after_subtask and chain.just_solved and not chain.over

    def frame(self) -> Array:
        """The fixed camera's image u8 [size, size, 3]."""
        return self.world.static_image()

    def observe(self) -> SceneObservation:
        """Both cameras, where the gripper is, the sentence, and everything for a critic."""
        world, chain = self.world, self.chain
        robot = world.robot_obs()
        progress = np.zeros(len(TASKS) + 1)
        progress[TASKS.index(chain.task)], progress[-1] = 1.0, chain.solved / len(chain.tasks)
        return {
            "images": self.frame(),
            "wrist_images": world.wrist_image()[None],
            "states": robot[:7].astype(np.float32),
            "task_description": self.instruction,
            "critic_state": np.concatenate([robot, world.scene_obs(), progress]).astype(np.float32),
        }

    def close(self) -> None:
        """Free the world."""
        self.world.close()

    def _judge(self) -> float:
        """The reward of this step. Where it solved the current task, the next one is judged from this moment on."""
        now, near = self.world.facts(), self._near
        happened = solved(self.chain.task, self._before, now)
        self.chain.count_step(happened)
        if happened:
            self._begin_task(now)
        else:
            self._near = self._nearness(now)
        way = 1.0 if happened else self._near
        return float(happened) + self.options.shaped_reward * (way - near)

    def _nearness(self, now: Facts) -> float:
        """How near the current task is to being solved, 0 to 1; 0 where nothing is paid for that."""
        if not self.options.shaped_reward:
            return 0.0
        return nearness(self.chain.task, self._hand, self._before, now)
