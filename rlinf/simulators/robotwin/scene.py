"""One RoboTwin episode. The whole chunk is one path, as RoboTwin executes it, and success ends it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np

from rlinf.simulators.contract import Array, ChunkResult, ReplayScene, SceneObservation, note
from rlinf.simulators.robotwin.host import explain, load_host
from rlinf.simulators.robotwin.seeds import substitute
from rlinf.simulators.robotwin.suite import Options
from rlinf.simulators.robotwin.tasks import task_and_seed
from rlinf.simulators.robotwin.world import World

WARM_RESETS = 2  # after which a process has loaded what it keeps, so that memory beyond is growth
GREW = 75  # exit status of a process that ends because its memory grew


class Scene(ReplayScene):
    """One episode after another, each in a world of its own."""

    def __init__(self, options: Options) -> None:
        self.options, self._host = options, load_host(options)
        self._world: World | None = None
        self._first_info: dict[str, str] | None = None  # of the first episode of this scene
        self._num_resets = 0
        self._level = 0.0  # of the reward, after the last chunk

    @property
    def world(self) -> World:
        """The running episode's world."""
        assert self._world is not None
        return self._world

    def start(self, reset_id: int) -> None:
        """Build the scene of a seed, or of one in its place where its objects do not come to rest."""
        self._task, self.seed = task_and_seed(reset_id, self.options.task)
        self._free()
        _check_memory(self.options.max_growth_mb)
        unstable: list[int] = []
        while self._world is None:
            seed = self.attempt(len(unstable))
            try:
                self._world = World(self._host, self.options, self._task, seed)
            except self._host.unstable_error:
                unstable.append(seed)
                if len(unstable) > self.options.max_unstable:
                    raise RuntimeError(
                        f"{self._task}: the objects of seed {self.seed} do not come to rest, nor do those of the "
                        f"{self.options.max_unstable} seeds tried in its place (init_params.max_unstable): {unstable}"
                    ) from None
            except RuntimeError as error:
                explain(error)
                raise
        self.played_seed = seed
        self._unstable = len(unstable)
        if unstable:
            named = ", ".join(map(str, unstable))
            note(f"{self._task}: the objects of seed {named} do not come to rest; seed {seed} is played in its place")
        info = self.world.info()
        self.instruction = self._host.instruction(self._task, self.told(info), self.seed, self.options.instruction)

    def told(self, info: dict[str, str]) -> dict[str, str]:
        """What the instruction is made from: the episode that is played, or as published the first of this scene."""
        if self._first_info is None:
            self._first_info = info
        return self._first_info if self.options.compat else info

    def attempt(self, number: int) -> int:
        """The seed of the first, second, ... attempt at a reset: as published the next one, else one of no list."""
        return self.seed + number if self.options.compat else substitute(self.seed, number)

    def task(self) -> str:
        return self._task

    def step_chunk(self, actions: Array, *, stop_on_success: bool, record: bool) -> ChunkResult:
        """As Simulator.step_chunk; all actions count as executed, and what they led to stands in the last column.

        An episode that has succeeded stands still, whatever `stop_on_success` says.
        """
        world, dense = self.world, self.options.reward == "dense"
        result = ChunkResult.zeros(len(actions))
        pictures: list[Array] = []
        if dense:
            world.begin_shaping()
        solved = world.play(actions, pictures if record else None)
        level = world.shaped_level() if dense and not solved else float(solved)
        result.steps = len(actions)
        result.rewards[-1], result.success[-1] = level, solved
        if dense or solved:  # levels of which differences are paid: before the end it is the one of the last chunk
            result.rewards[:-1] = self._level
        self._level = level
        if record:
            pictures.append(self.frame())
            result.frames = [pictures[i] for i in np.linspace(0, len(pictures) - 1, len(actions)).round().astype(int)]
        self._history.append(np.array(actions, np.float32))
        result.info = self.info()
        return result

    def reset(self, reset_id: int) -> None:
        """As Simulator.reset."""
        self._level = 0.0
        super().reset(reset_id)

    def step(self, action: Array) -> tuple[float, bool, bool]:
        """A chunk of one action."""
        one = self.step_chunk(action[None], stop_on_success=True, record=False)
        return float(one.rewards[0]), bool(one.success[0]), False

    def frame(self) -> Array:
        """What the head camera sees u8 [H, W, 3]."""
        return self.world.pictures()[0]

    def info(self) -> dict[str, float]:
        """How many unstable seeds this episode took."""
        return {"unstable_seeds": float(self._unstable)}

    def observe(self) -> SceneObservation:
        """The cameras, the targets of joints and grippers, and the sentence."""
        return observation(self.world, self.instruction)

    def close(self) -> None:
        """Free the world."""
        self._free(clear_cache=True)

    def _free(self, *, clear_cache: bool = False) -> None:
        """Free the last world; every clear_cache_freq-th time SAPIEN's cache too."""
        self._num_resets += 1
        if self._world is not None:
            often = max(1, int(self.options.task_config.get("clear_cache_freq", 8)))
            self._world.close(clear_cache=clear_cache or self._num_resets % often == 0)
            self._world = None
            gc.collect()  # RoboTwin's objects refer to each other in circles, through SAPIEN's


def observation(world: World, instruction: str) -> SceneObservation:
    """What a world shows now."""
    main, wrists = world.pictures()
    return {
        "images": main,
        "wrist_images": wrists,
        "states": world.state().astype(np.float32),
        "task_description": instruction,
        "critic_state": None,
    }


_usual: list[int] = []  # bytes of this process at its first resets


def _check_memory(max_growth_mb: int) -> None:
    """End the process where it has grown too much: its parent counts that, starts it anew and begins the episodes."""
    if not max_growth_mb:
        return
    used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if len(_usual) <= WARM_RESETS:
        _usual.append(used)
    elif used - _usual[-1] > max_growth_mb << 20:
        grown = (used - _usual[-1]) >> 20
        print(f"memory grew by {grown} MB over resets (init_params.max_growth_mb={max_growth_mb})", flush=True)
        os._exit(GREW)
