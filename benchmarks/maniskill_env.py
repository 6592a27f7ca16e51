"""CPU milliseconds per env step on ManiSkill's put-on-plate: the published layout against ours, in one run.

    python benchmarks/maniskill_env.py [--episodes 4] [--shader minimal]

Needs SAPIEN, MANISKILL_ASSET_DIR and MS_ASSET_DIR. Published layout: all 25 objects and 17 plates stand in the world,
and every step draws colours and segmentation at 480 x 640 and puts the table image behind them. Ours: what the episode
shows, drawn once per chunk of 8. Both play the scripted expert's actions, chunk by chunk in turns, and must show the
same pixels at the end of each. Time is that of all threads (process_time), without resets and first pictures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.simulators.maniskill import Expert, Options
from rlinf.simulators.maniskill.assets import Assets, find_assets
from rlinf.simulators.maniskill.constants import NATIVE_SIZE
from rlinf.simulators.maniskill.reset_ids import reset_ids
from rlinf.simulators.maniskill.suite import SHADERS
from rlinf.simulators.maniskill.tasks import PREFIX, Body, BodyKey, Episode, episode, hidden_bodies
from rlinf.simulators.vulkan import check_driver

CHUNK, EPISODE_STEPS = 8, 80
ENV_ID, OBJ_SET = PREFIX + "Main-v3", "train"
AT_LEAST = 4.0  # times faster at the published size
SMALL = 64


@dataclass
class Player:
    """One way to play an episode."""

    name: str
    start: Callable[[Episode], None]
    play: Callable[[np.ndarray], np.ndarray]  # actions f32 [8, 7] -> picture at the end u8 [H, W, 3]
    seconds: list[float] = field(default_factory=list)  # of each chunk

    @property
    def ms_per_step(self) -> float:
        return 1e3 * float(np.mean(self.seconds)) / CHUNK


def published_world(assets: Assets) -> Any:
    """The published layout: one world for good, in which everything that no episode shows stands behind the camera."""
    import sapien

    from rlinf.simulators.maniskill.cpu.world import World

    class PublishedWorld(World):
        def _build(self, bodies: dict[BodyKey, Body]) -> None:
            everything = hidden_bodies() | bodies
            if self._scene is None:
                super()._build(everything)
            for key, body in everything.items():
                self._entities[key].set_pose(sapien.Pose(body.position, body.quaternion))
                self._components[key].set_linear_velocity(np.zeros(3, np.float32))
                self._components[key].set_angular_velocity(np.zeros(3, np.float32))

    return PublishedWorld(assets)


def published(assets: Assets, shader: str) -> Player:
    """Everything in the world, a picture after every step; a new world per episode, so that physics start equal."""
    from rlinf.simulators.maniskill.cpu.renderer import Renderer

    renderer, world = Renderer(assets, NATIVE_SIZE, shader), published_world(assets)

    def start(begun: Episode) -> None:
        world.close()
        world.reset(begun)
        renderer.picture(world.view(), begun)

    def play(actions: np.ndarray) -> np.ndarray:
        for action in actions:
            world.step(action)
            picture = renderer.picture(world.view(), world.episode)
        return picture

    return Player("published: all objects, every step, 480 x 640", start, play)


def ours(assets: Assets, shader: str, size: tuple[int, int]) -> Player:
    """What is shown, a picture after the chunk."""
    from rlinf.simulators.maniskill.cpu.renderer import Renderer
    from rlinf.simulators.maniskill.cpu.world import World

    renderer, world = Renderer(assets, size, shader), World(assets)

    def start(begun: Episode) -> None:
        world.reset(begun)
        renderer.picture(world.view(), begun)

    def play(actions: np.ndarray) -> np.ndarray:
        for action in actions:
            world.step(action)
        return renderer.picture(world.view(), world.episode)

    return Player(f"ours: what is shown, once per chunk, {size[0]} x {size[1]}", start, play)


def expert_actions(assets: Assets, begun: Episode, steps: int) -> np.ndarray:
    """What the expert does, f32 [steps, 7]."""
    from rlinf.simulators.maniskill.cpu.world import World

    @dataclass
    class Played:
        world: World

    played, expert, actions = Played(World(assets)), Expert(Options()), []
    played.world.reset(begun)
    for _ in range(steps):
        actions.append(expert.act(played))
        played.world.step(actions[-1])
    return np.stack(actions)


def measure(episodes: int, steps: int, shader: str) -> list[Player]:
    """All players on the same chunks; AssertionError if a picture of ours is not the published one."""
    assets = find_assets([(ENV_ID, OBJ_SET)])
    players = [published(assets, shader), ours(assets, shader, NATIVE_SIZE), ours(assets, shader, (SMALL, SMALL))]
    for episode_id in reset_ids(ENV_ID, OBJ_SET, 0)["train"][:episodes]:
        begun = episode(ENV_ID, OBJ_SET, episode_id)
        actions = expert_actions(assets, begun, steps)
        for player in players:
            player.start(begun)
        for first in range(0, steps, CHUNK):
            pictures = []
            for player in players:
                before = time.process_time()
                pictures.append(player.play(actions[first : first + CHUNK]))
                player.seconds.append(time.process_time() - before)
            assert np.array_equal(pictures[0], pictures[1]), (
                f"episode {episode_id}, step {first + CHUNK}: pixels differ"
            )
    return players


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=EPISODE_STEPS, help="of each episode, a multiple of 8")
    parser.add_argument("--shader", choices=SHADERS, default=SHADERS[0])
    args = parser.parse_args(words)
    check_driver()
    baseline, *players = measure(args.episodes, args.steps, args.shader)
    print(
        f"{ENV_ID}, {args.episodes} episodes of {args.steps} steps, chunk {CHUNK}, shader {args.shader}; equal pixels"
    )
    print(f"{baseline.name:52s} {baseline.ms_per_step:8.2f} CPU ms/step")
    for player in players:
        ratio = baseline.ms_per_step / player.ms_per_step
        print(f"{player.name:52s} {player.ms_per_step:8.2f} CPU ms/step   {ratio:6.1f}x")
    if baseline.ms_per_step < AT_LEAST * players[0].ms_per_step:
        raise SystemExit(f"less than {AT_LEAST}x at the published size")


if __name__ == "__main__":
    main()
