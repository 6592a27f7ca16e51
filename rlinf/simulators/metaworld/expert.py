"""MetaWorld's scripted policies as an expert."""

from __future__ import annotations

import numpy as np

from rlinf.simulators.contract import Array
from rlinf.simulators.metaworld.scene import Scene
from rlinf.simulators.metaworld.suite import Options


class Expert:
    """Acts by the scripted policy of the running task; those give actions beyond 1, which are clipped."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def act(self, sim: Scene) -> Array:
        """One action f32 [4] from MetaWorld's own observation."""
        world = sim.world()
        return np.clip(world.policy.get_action(world.obs), -1, 1).astype(np.float32)
