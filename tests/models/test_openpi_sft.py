"""Flow-matching imitation: statistics, loss, and that it learns to tell images and prompts apart."""

from __future__ import annotations

import pytest
import torch
from openpi_cases import CPU, build, config, noise, observation

from rlinf.data.types import Observation
from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.openpi.policy import Policy
from rlinf.models.openpi.statistics import Statistics


def test_statistics_of_known_data():
    data = torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None] * torch.tensor([[2.0, 0.0]]) + 3
    stats = Statistics.fit(data, floor=0.05)
    assert stats.mean.tolist() == pytest.approx([3.0, 3.0])
    assert stats.std.tolist() == pytest.approx([2 * data[:, 0].sub(3).div(2).std(correction=0).item(), 0.05])
    assert stats.q01.tolist() == pytest.approx([1.04, 2.9])
    assert stats.q99.tolist() == pytest.approx([4.96, 3.1])
    for quantile in (False, True):
        normal = stats.normalize(data, quantile=quantile)
        assert (stats.unnormalize(normal, quantile=quantile) - data).abs().max() < 1e-12
        assert normal[:, 1].abs().max() < 1e-5


@pytest.mark.parametrize(("name", "smallest"), [("pi0_maniskill", 0.01), ("pi0_metaworld", 0.05)])
def test_centimetres_count_where_actions_are_metres(name, smallest):
    """A column that moves by a centimetre has unit variance for ManiSkill; for controls in [-1, 1] it hardly moves."""
    policy = Policy.build(config(name), CPU, seed=0)
    actions = torch.tensor([-0.01, 0.01])[:, None].repeat(32, policy.cfg.action_dim)
    policy.fit_statistics(torch.rand(64, policy.cfg.state_dim), actions)
    assert policy.processor.action_stats.std[: policy.cfg.action_dim].tolist() == pytest.approx(
        [smallest] * policy.cfg.action_dim
    )


@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_metaworld", "pi0_aloha_robotwin"])
def test_loss_is_the_flow_matching_error(name):
    cfg = config(name)
    policy = build(cfg)
    obs, actions = observation(cfg), torch.randn(6, 3, cfg.action_dim)
    got = policy.sft_loss(obs, actions, noise=noise(), draws=2)
    source, inputs = noise(), policy.processor.encode(obs)
    target = policy.processor.encode_actions(actions, inputs.raw_state)
    assert torch.equal(target[:, 2], target[:, 4])  # a chunk shorter than the horizon repeats its last action
    eps, t = source.normal((2, *target.shape[1:])), source.uniform((2,)) ** (2 / 3) * 0.999 + 0.001
    losses = []
    prefix = policy.net.prefix(inputs.images, *inputs.prompts.trimmed())
    for d in range(2):
        time = t[:, d, None, None]
        x = time * eps[:, d] + (1 - time) * target
        velocity = policy.net.velocity(policy.net.suffix(prefix, inputs.state, x, policy.net.times(t[:, d])))
        losses.append((velocity - (eps[:, d] - target))[..., : cfg.action_dim].square().mean())
    assert got.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["pi0_metaworld", "pi0_aloha_robotwin"])  # one camera, several
def test_a_further_loss_reads_the_mean_image_token_and_teaches_the_eyes(name):
    cfg = config(name)
    policy = build(cfg)
    obs, actions = observation(cfg), torch.randn(6, 3, cfg.action_dim)
    given = torch.randn(6, policy.image_width)
    named = {n: p for n, p in policy.named_parameters() if not n.startswith("value_head")}

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(named, grads, strict=True))

    def teach(tokens: torch.Tensor) -> torch.Tensor:
        assert (tokens.shape, tokens.dtype) == (given.shape, torch.float32)
        return (tokens - given).square().mean()

    plain = policy.sft_loss(obs, actions, noise=noise(), draws=2)
    both = policy.sft_loss(obs, actions, noise=noise(), draws=2, image_token_loss=teach)
    further = teach(policy.net.embed_images(policy.processor.encode(obs).images).mean(1))
    assert both.item() == pytest.approx(plain.item() + further.item(), rel=1e-6)
    plain_grads, both_grads, further_grads = gradients(plain), gradients(both), gradients(further)
    eyes = {n for n in named if "vision_tower" in n or "multi_modal_projector" in n}
    assert {n for n, g in further_grads.items() if g.any()} <= eyes
    assert all(further_grads[n].norm() > 0 for n in eyes if n.endswith("weight"))
    for n in named:
        torch.testing.assert_close(both_grads[n], plain_grads[n] + further_grads[n], msg=n)


def test_only_those_that_learn_to_see_show_their_image_tokens():
    assert build(config(train_expert_only=False)).image_width == 64
    assert build(config(train_expert_only=True)).image_width is None


def test_only_the_expert_learns_when_told():
    cfg = config(train_expert_only=True)
    policy = build(cfg)
    policy.sft_loss(observation(cfg), torch.zeros(6, 3, 4), noise=noise()).backward()
    learned = {n for n, p in policy.named_parameters() if p.grad is not None}
    assert learned
    assert not any(".paligemma." in n or n.startswith("value_head") for n in learned)


def test_it_learns():
    """Twelve images, two prompts: after 120 steps the ODE's actions are close to each sample's own label."""
    cfg = Config(size="compact", action_dim=2, num_action_chunks=2, num_steps=4, openpi=OpenPiOptions(state_dim=2))
    policy = Policy.build(cfg, CPU, seed=0)
    g = torch.Generator().manual_seed(0)
    images = torch.full((12, 64, 64, 3), 40, dtype=torch.uint8)
    for i in range(12):
        images[i, 16 * (i % 4) : 16 * (i % 4) + 16, 16 * (i // 4) : 16 * (i // 4) + 16] = 220
    prompts = ["Press a button" if i % 2 else "Open a window" for i in range(12)]
    obs = Observation(images, None, torch.zeros(12, 2), prompts)
    actions = torch.randn(12, 1, 2, generator=g).expand(-1, 2, -1).contiguous()
    policy.fit_statistics(obs.states, actions.flatten(0, 1))
    optimizer = torch.optim.AdamW(policy.parameters(), 2e-3, weight_decay=0.0)
    for step in range(120):
        optimizer.zero_grad()
        policy.sft_loss(obs, actions, noise=noise(12, chunk=step), draws=8).backward()
        optimizer.step()
    error = (policy.predict(obs, mode="eval", noise=noise(12, chunk=999)).actions - actions).abs().mean()
    baseline = (actions - actions.mean(0)).abs().mean()
    print(f"mean error {error:.3f}, of the constant action {baseline:.3f}")
    assert error < 0.5 * baseline
