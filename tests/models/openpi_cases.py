"""Small real π policies and observations for the model tests."""

from __future__ import annotations

import torch

from rlinf.compat.policies import policy_class
from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, Observation
from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.openpi.conventions import CONVENTIONS
from rlinf.models.openpi.policy import Policy

CPU = torch.device("cpu")
PROMPTS = ("Press a handle down sideways", "push it", "take the red block and rotate it to the right")
CRITIC_COLUMNS = 5


def config(name: str = "pi0_metaworld", **options) -> Config:
    """A compact policy of a convention with a critic, 4 denoising steps."""
    row = CONVENTIONS[name]
    return Config(
        size="compact",
        action_dim=row.action_dim,
        num_action_chunks=3,
        num_steps=4,
        add_value_head=True,
        openpi=OpenPiOptions(config_name=name, action_horizon=5, **options),
    )


def build(cfg: Config, seed: int = 0, *, compat: str | None = None) -> Policy:
    """Random weights with every head awake: value heads start at zero, which would hide mistakes."""
    policy = policy_class("openpi", compat).build(cfg, CPU, seed=seed)
    assert isinstance(policy, Policy)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "head" in name or "out_proj" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    row = cfg.convention
    data = torch.randn(64, row.action_dim, generator=generator)
    policy.fit_statistics(torch.rand(64, row.state_dim, generator=generator), data)
    return policy


def observation(cfg: Config, rows: int = 6, seed: int = 0, size: int = 48) -> Observation:
    """Random cameras of another resolution than the model's, prompts of different lengths."""
    g = torch.Generator().manual_seed(seed)
    wrists = cfg.num_cameras - 1
    wrist = torch.randint(0, 256, (rows, wrists, 20, 30, 3), generator=g, dtype=torch.uint8) if wrists else None
    return Observation(
        images=torch.randint(0, 256, (rows, size, size, 3), generator=g, dtype=torch.uint8),
        wrist_images=wrist,
        states=torch.rand(rows, cfg.convention.state_dim, generator=g),
        task_descriptions=[PROMPTS[i % len(PROMPTS)] for i in range(rows)],
        critic_state=torch.randn(rows, CRITIC_COLUMNS, generator=g),
    )


def noise(rows: int = 6, *, first: int = 0, chunk: int = 0) -> Noise:
    return Noise(seed=1, at=ChunkIndex(0, 0, chunk), env_ids=range(first, first + rows))
