"""The toy's scripted expert."""

from __future__ import annotations

import numpy as np

from rlinf.simulators.contract import Array
from rlinf.simulators.toy.scene import Scene
from rlinf.simulators.toy.suite import Options


class Expert:
    """Walks straight to the target."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def act(self, sim: Scene) -> Array:
        """An action f32 [2] towards the target: full speed, less in the last step."""
        return np.clip((sim.target - sim.agent) / self.options.step_size, -1, 1).astype(np.float32)
