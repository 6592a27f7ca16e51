"""The eight `config_name` rows, from an observation to the simulator's actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sentencepiece
import torch
from openpi_cases import build, config, noise, observation

from rlinf.models.files.tokenizers import BUNDLED
from rlinf.models.openpi import transforms
from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.openpi.conventions import CONVENTIONS
from rlinf.models.openpi.statistics import Statistics

# horizon and prompt slots of the published network, cameras, state columns read, action columns, quantiles, relative
FACTS = {
    "pi0_metaworld": (5, 48, 1, 4, 4, False, False),
    "pi05_metaworld": (5, 200, 1, 0, 4, True, False),
    "pi0_calvin": (5, 48, 2, 7, 7, False, False),
    "pi05_calvin": (5, 200, 2, 0, 7, True, False),
    "pi0_maniskill": (50, 48, 1, 8, 7, False, False),
    "pi05_maniskill": (10, 200, 1, 0, 7, True, False),
    "pi0_aloha_robotwin": (50, 48, 3, 14, 14, False, True),
    "pi05_aloha_robotwin": (50, 200, 3, 14, 14, True, True),
}
ASSETS = {
    "metaworld": "lerobot/metaworld_mt50",
    "calvin": "InternRobotics/InternData-Calvin_ABC",
    "maniskill": "physical-intelligence/maniskill",
    "robotwin": "physical-intelligence/robotwin",
}
ALOHA = ["pi0_aloha_robotwin", "pi05_aloha_robotwin"]


@pytest.mark.parametrize("name", FACTS)
def test_facts(name):
    assert set(FACTS) == set(CONVENTIONS)
    horizon, slots, cameras, state, columns, quantile, relative = FACTS[name]
    cfg = Config(num_action_chunks=5, action_dim=columns, openpi=OpenPiOptions(config_name=name))
    arch, row, spec = cfg.architecture(), cfg.convention, cfg.spec()
    assert (arch.action_horizon, arch.max_token_len, arch.action_dim) == (horizon, slots, 32)
    assert (spec.num_images, spec.state_dim, spec.action_dim) == (cameras, state, columns)
    assert (row.pi05, row.quantile_norm) == (name.startswith("pi05"), quantile)
    assert row.discrete_state == row.adapt_to_pi == (name == "pi05_aloha_robotwin")
    assert row.asset_id == ASSETS[name.split("_")[-1]]
    assert row.delta_mask == (((True,) * 6 + (False,)) * 2 if relative else ())


@pytest.mark.parametrize("name", FACTS)
def test_there_and_back(name):
    cfg = config(name)
    _, _, cameras, state, columns, quantile, _ = FACTS[name]
    policy, obs = build(cfg), observation(cfg)
    processor = policy.processor
    inputs = processor.encode(obs)
    assert inputs.images.shape == (6, cameras, 64, 64, 3)
    assert (inputs.raw_state is None) == (state == 0)

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(BUNDLED))
    texts = [pieces.decode(t[v].tolist()) for t, v in zip(inputs.prompts.ids, inputs.prompts.valid, strict=True)]
    if cfg.convention.discrete_state:
        normal = processor.state_stats.normalize(transforms.aloha_state(obs.states), quantile=True)
        bins = (((normal.double() + 1) * 128).floor()).clamp(-1, 255).long()  # 256 equal bins of [-1, 1]
        spoken = [" ".join(map(str, row)) for row in bins.tolist()]
        want = [f"Task: {t}, State: {s};\nAction: " for t, s in zip(obs.task_descriptions, spoken, strict=True)]
        assert texts == want
    else:
        assert texts == [f"{t}\n" for t in obs.task_descriptions]

    if cfg.convention.pi05:
        assert inputs.state is None
    else:
        padded = inputs.state
        assert padded.shape == (6, policy.arch.action_dim)
        assert not padded[:, state:].any()
        back = processor.state_stats.unnormalize(padded[:, :state], quantile=quantile)
        assert torch.allclose(back, obs.states[:, :state], atol=1e-5)

    actions = torch.rand(6, 3, columns, generator=torch.Generator().manual_seed(3)) * 2 - 1
    model = processor.encode_actions(actions, inputs.raw_state)
    assert model.shape == (6, 5, policy.arch.action_dim)
    assert not model[..., columns:].any()
    assert torch.equal(model[:, 3:], model[:, 2:3].expand(-1, 2, -1))
    assert torch.allclose(processor.decode_actions(model, inputs.raw_state), actions, atol=1e-5)

    out = policy.predict(obs, mode="train", noise=noise())
    assert out.actions.shape == out.logprobs.shape == (6, 3, columns)
    assert out.actions.isfinite().all()
    scores = policy.evaluate(out.replay, values=True, entropy=False)
    assert torch.allclose(scores.logprobs, out.logprobs, atol=2e-5)


@pytest.mark.parametrize("name", ALOHA)
def test_no_relative_motion_is_standing_still(name):
    """Arm joints are relative to the state, whatever their signs in between; grippers are absolute."""
    cfg = config(name)
    processor, obs = build(cfg).processor, observation(cfg)
    processor.state_stats, processor.action_stats = Statistics.identity(14), Statistics.identity(14)
    actions = processor.decode_actions(torch.zeros(6, 5, 16), processor.encode(obs).raw_state)
    joints = [i for i in range(14) if i not in (6, 13)]
    assert torch.allclose(actions[..., joints], obs.states[:, None, joints].expand(-1, 3, -1), atol=1e-5)
    shut = (0.5476 + 0.6213) / (1.4910 + 0.6213) if CONVENTIONS[name].adapt_to_pi else 0.0
    assert torch.allclose(actions[..., [6, 13]], torch.tensor(shut), atol=1e-5)


@pytest.mark.parametrize("name", ALOHA)
def test_cameras_keep_their_order(name):
    cfg = config(name)
    obs = observation(cfg)
    shades = torch.tensor([10, 20], dtype=torch.uint8).view(1, 2, 1, 1, 1).expand(6, 2, 64, 64, 3)
    obs = replace(obs, images=torch.full((6, 64, 64, 3), 5, dtype=torch.uint8), wrist_images=shades)
    images = build(cfg).processor.encode_images(obs)
    assert images[0, :, 0, 0, 0].tolist() == [5, 10, 20]
