"""A policy that the tests of this folder share."""

from __future__ import annotations

import pytest
import torch

from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.policy import find_policy
from rlinf.serving.policy import LoadedPolicy


def make_pi0(device: str) -> LoadedPolicy:
    """π0 of two cameras with random weights."""
    options = OpenPiOptions(config_name="pi0_metaworld", action_horizon=5, num_images_in_input=2)
    cfg = Config(size="compact", num_action_chunks=5, action_dim=4, num_steps=2, openpi=options)
    return LoadedPolicy(find_policy(cfg.model_type).build(cfg, torch.device(device)), seed=3)


@pytest.fixture(scope="session")
def pi0() -> LoadedPolicy:
    """The same for all tests, on the CPU."""
    return make_pi0("cpu")
