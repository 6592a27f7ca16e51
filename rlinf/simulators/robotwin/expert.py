"""RoboTwin's own planner as an expert: it plays an episode in a world of its own, of which the targets are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.simulators.contract import Array, ChunkResult, DrivingExpert, SceneObservation, sign_of_life
from rlinf.simulators.robotwin.host import load_host
from rlinf.simulators.robotwin.scene import Scene, observation
from rlinf.simulators.robotwin.suite import Options
from rlinf.simulators.robotwin.tasks import task_and_seed
from rlinf.simulators.robotwin.world import World


@dataclass(frozen=True)
class Played:
    """An episode that the expert played."""

    states: list[Array]  # f32 [14]: the targets at every frame; the next one is the action
    seen: list[SceneObservation]  # at every frame, where it was drawn
    solved: bool


class Expert(DrivingExpert):
    """Plays the episode of a scene once more, from its beginning, and hands out what it did."""

    def __init__(self, options: Options) -> None:
        self.options, self._host = options, load_host(options)
        self._played: Played | None = None
        self._next = 0  # frame from which the next part goes on

    def play(self, sim: Scene, steps: int, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """The targets of the expert are paths of the scene; once they are through, the last one is held."""
        if self._played is None:
            self._played = self._play(sim.task(), sim.played_seed)
        targets = self._part(steps) or self._played.states[-1:] * steps
        return sim.step_chunk(np.stack(targets), stop_on_success=stop_on_success, record=record)

    def show(self, sim: Scene, steps: int) -> tuple[list[SceneObservation], Array, ChunkResult]:
        """What RoboTwin itself would keep of the episode: a frame, and as action the targets of the next one."""
        if self._played is None:
            self._played = self._play(sim.task(), sim.played_seed, description=sim.instruction)
        played, first = self._played, self._next
        actions = np.stack(self._part(steps))
        result = ChunkResult.zeros(steps)
        result.steps = len(actions)
        if self._next == len(played.states) - 1:
            last = len(actions) - 1
            result.rewards[last], result.success[last] = float(played.solved), played.solved
            result.done[last] = not played.solved
        return played.seen[first : self._next], actions, result

    def solves(self, reset_id: int) -> bool:
        """Whether RoboTwin's own expert solves an episode; one whose objects do not come to rest it does not."""
        task, seed = task_and_seed(reset_id, self.options.task)
        try:
            return self._play(task, seed).solved
        except self._host.unstable_error:
            return False

    def _part(self, steps: int) -> list[Array]:
        """The actions of the next frames."""
        assert self._played is not None
        part = self._played.states[self._next + 1 : self._next + 1 + steps]
        self._next += len(part)
        return part

    def _play(self, task: str, seed: int, description: str | None = None) -> Played:
        """Let RoboTwin play; the frames are drawn where there is a description to go with them."""
        world = World(self._host, self.options, task, seed)
        states: list[Array] = []
        seen: list[SceneObservation] = []

        def keep_frame() -> None:
            sign_of_life()
            state = world.state().astype(np.float32)
            if states and np.array_equal(states[-1], state):
                return  # nothing was to move since: it is no action
            states.append(state)
            if description is not None:
                world.moved()
                seen.append(observation(world, description))

        try:
            keep_frame()
            solved = world.play_expert(keep_frame)
            keep_frame()
        finally:
            world.close(clear_cache=False)
        return Played(states, seen, solved and len(states) > 1)
