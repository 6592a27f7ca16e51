"""Probe: the success rate of a policy, or of one constant action, on a fixed list of reset ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch

from rlinf.config.schema import Config
from rlinf.data.noise import Noise
from rlinf.data.types import Observation
from rlinf.envs.bridge import Bridge
from rlinf.envs.config import VideoConfig
from rlinf.envs.spec import env_spec
from rlinf.envs.vec import VecEnv
from rlinf.metrics.stats import Rate
from rlinf.models.policy import Policy

Act = Callable[[Observation, Noise], torch.Tensor]  # -> f32 [B, C, A] in the policy's convention


class Probe:
    """Plays the same episodes at every call; its simulators keep running between calls.

    Example: `with Probe(cfg, ids) as probe: rate = probe.play_policy(policy)`
    """

    def __init__(self, cfg: Config, reset_ids: Sequence[int]) -> None:
        num_envs = min(len(reset_ids), cfg.env.eval.total_num_envs)
        env_cfg = replace(cfg.env.eval, total_num_envs=num_envs, video_cfg=VideoConfig())
        spec, policy_spec = env_spec(env_cfg), cfg.actor.model.spec()
        self.cfg, self.num_envs = cfg, num_envs
        self.bridge = Bridge(spec, policy_spec)
        self.env = VecEnv(
            env_cfg,
            spec,
            env_ids=range(num_envs),
            mode="eval",
            chunk_size=policy_spec.num_action_chunks,
            seed=cfg.runner.seed,
            trials=list(reset_ids),
        )

    def play(self, act: Act, device: torch.device | str = "cpu") -> Rate:
        """Success of `act`, which takes tensors on `device`, on every id once; equal calls draw equal noise."""
        step = self.env.reset()
        while not self.env.done:
            assert step.trials is not None
            noise = Noise.of_trials(step.trials, seed=self.cfg.runner.seed, device=device)
            step = self.env.chunk_step(self.bridge.to_env(act(step.obs.to(device), noise).cpu()))
        return Rate.of(e.success_once for e in self.env.drain_episodes())

    def play_policy(self, policy: Policy) -> Rate:
        """Success of the policy's deterministic sampler."""
        device = next(policy.parameters()).device
        with torch.no_grad():
            return self.play(lambda obs, noise: policy.predict(obs, mode="eval", noise=noise).actions, device)

    def play_constant(self, action: torch.Tensor) -> Rate:
        """Success of one action f32 [A] repeated forever: what a policy that sees nothing achieves."""
        chunk = self.cfg.actor.model.spec().num_action_chunks
        return self.play(lambda obs, noise: action.expand(self.num_envs, chunk, -1))

    def close(self) -> None:
        self.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
