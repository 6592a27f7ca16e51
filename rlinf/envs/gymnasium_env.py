"""A VecEnv as a gymnasium.vector.VectorEnv: one action per step, dictionaries of arrays, episodes that restart."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from gymnasium.vector.utils import batch_space

from rlinf.data.types import Observation
from rlinf.envs.vec import VecEnv


class GymnasiumVectorEnv(gymnasium.vector.VectorEnv):
    """Observations hold `images`, and `wrist_images` and `states` where the simulator has them.

    Infos hold `task_descriptions`, the instruction of every env. An env whose episode ends shows its next one in the
    same step, with the last observation of the old one in `final_obs`.
    """

    def __init__(self, envs: VecEnv) -> None:
        spec = envs.spec
        self.envs, self.num_envs = envs, envs.num_envs
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP, "render_fps": spec.control_hz}
        spaces: dict[str, gymnasium.Space] = {"images": Box(0, 255, (*spec.image_size, 3), np.uint8)}
        if spec.num_wrist_images:
            spaces["wrist_images"] = Box(0, 255, (spec.num_wrist_images, *spec.wrist_image_size, 3), np.uint8)
        if spec.state_dim:
            spaces["states"] = Box(-np.inf, np.inf, (spec.state_dim,), np.float32)
        self.single_observation_space = Dict(spaces)
        self.single_action_space = Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start the next episode of every env; which one that is follows from the run's seed, not from `seed`."""
        step = self.envs.reset()
        return _arrays(step.obs), {"task_descriptions": step.obs.task_descriptions}

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute one action f32 [A] per env."""
        step = self.envs.chunk_step(torch.as_tensor(actions, dtype=torch.float32)[:, None])
        info: dict[str, Any] = {"task_descriptions": step.obs.task_descriptions}
        if step.final_rows is not None and step.final_obs is not None:
            last, ended = _arrays(step.final_obs), np.zeros(self.num_envs, bool)
            final = np.full(self.num_envs, None, object)
            for i, row in enumerate(step.final_rows.tolist()):
                final[row], ended[row] = {name: x[i] for name, x in last.items()}, True
            info |= {"final_obs": final, "_final_obs": ended}
        flags = step.rewards, step.terminated, step.truncated
        rewards, terminated, truncated = (x[:, 0].numpy() for x in flags)
        return _arrays(step.obs), rewards, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        """End the simulator processes."""
        self.envs.close()


def _arrays(obs: Observation) -> dict[str, np.ndarray]:
    parts = {"images": obs.images, "wrist_images": obs.wrist_images, "states": obs.states}
    return {name: x.numpy() for name, x in parts.items() if x is not None}
