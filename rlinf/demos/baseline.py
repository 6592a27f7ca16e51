"""What a policy that sees nothing achieves: the honest zero of a success rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rlinf.config.schema import Config, VideoConfig
from rlinf.demos.dataset import DemoDataset
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.envs.vec import VecEnv
from rlinf.metrics.stats import Rate


def constant_action_rate(cfg: Config, dataset: Path, *, trials: int = 32) -> Rate:
    """Success of the demonstrations' mean action, played open-loop on held-out trials."""
    env_cfg = replace(cfg.env.eval, num_trials=trials, total_num_envs=min(trials, 16), video_cfg=VideoConfig())
    spec, chunk = env_spec(env_cfg), cfg.actor.model.num_action_chunks
    mean = torch.as_tensor(DemoDataset(dataset).actions).float().mean(0)  # [A]
    actions = mean.expand(env_cfg.total_num_envs, chunk, spec.action_dim)
    env = VecEnv(
        env_cfg,
        spec,
        num_envs=env_cfg.total_num_envs,
        first_env=0,
        mode="eval",
        chunk_size=chunk,
        seed=cfg.runner.seed,
        trials=eval_trials(env_cfg, spec),
    )
    try:
        step = env.reset()
        episodes = list(step.episodes)
        while not env.done:
            episodes += env.chunk_step(actions).episodes
    finally:
        env.close()
    return Rate.of(e.success_once for e in episodes)
