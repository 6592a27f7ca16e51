"""Flow-matching imitation: statistics, loss, and that it learns to tell images and prompts apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from openpi_cases import CPU, build, config, noise, observation

from rlinf.config.schema import ActorConfig, RunnerConfig, SftConfig
from rlinf.config.schema import Config as RunConfig
from rlinf.data.types import Observation
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.writer import DatasetWriter
from rlinf.models.openpi.config import Config, OpenPiOptions
from rlinf.models.openpi.policy import Policy
from rlinf.models.openpi.statistics import Statistics
from rlinf.simulators.contract import EnvSpec
from rlinf.training.sft import train_sft


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


@pytest.mark.parametrize("given", [3, 5])  # actions; the horizon is 5
@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_metaworld", "pi0_aloha_robotwin"])
def test_loss_is_the_flow_matching_error_of_all_columns_of_real_actions(name, given):
    cfg = config(name)
    policy = build(cfg)
    obs, actions = observation(cfg), torch.randn(6, given, cfg.action_dim)
    is_target = None if given == 3 else torch.arange(5) <= torch.arange(6)[:, None]  # beyond: the episode is over
    got = policy.sft_loss(obs, actions, is_target=is_target, noise=noise(), draws=2)
    counted = torch.arange(5).expand(6, -1) < 3 if is_target is None else is_target
    source, inputs = noise(), policy.processor.encode(obs)
    target = policy.processor.encode_actions(actions, inputs.raw_state)
    assert target.shape == (6, 5, policy.arch.action_dim)
    assert not target[..., cfg.action_dim :].any()
    eps, t = source.normal((2, *target.shape[1:])), source.uniform((2,)) ** (2 / 3) * 0.999 + 0.001
    losses = []
    prefix = policy.net.prefix(inputs.images, *inputs.prompts.trimmed())
    for d in range(2):
        time = t[:, d, None, None]
        x = time * eps[:, d] + (1 - time) * target
        velocity = policy.net.velocity(policy.net.suffix(prefix, inputs.state, x, policy.net.times(t[:, d])))
        losses.append((velocity - (eps[:, d] - target))[counted].square().mean())
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


def demonstrations(folder: Path, lengths: tuple[int, ...]) -> DemoDataset:
    """Episodes of random images, whose states and actions wander; the first state column is the frame's number."""
    spec = EnvSpec("test", ("t",), 4, ("x", "y", "z", "g"), "none", 4, (64, 64), {}, 10.0)
    rng, frames = np.random.default_rng(0), 0
    with DatasetWriter(folder, spec) as writer:
        for length in lengths:
            walk = np.cumsum(0.1 * rng.standard_normal((length, 4)), 0).astype(np.float32)
            states = np.concatenate([np.arange(frames, frames + length)[:, None], walk[:, 1:]], 1).astype(np.float32)
            images = rng.integers(0, 256, (length, 64, 64, 3), dtype=np.uint8)
            writer.add(images=images, states=states, actions=np.tanh(walk), task="press a handle")
            frames += length
    return DemoDataset(folder)


def run_config(tmp_path: Path, model: Config, **sft) -> RunConfig:
    return RunConfig(
        runner=RunnerConfig(seed=0),
        actor=ActorConfig(model=model),
        sft=SftConfig(dataset=str(tmp_path / "demos"), output=str(tmp_path / "sft"), **sft),
    )


def test_targets_are_the_datasets_actions_up_to_the_horizon(tmp_path, monkeypatch):
    """H = 50, C = 5: all 50 targets are the episode's own actions, and none counts after its end."""
    data, seen, plain = demonstrations(tmp_path / "demos", (70, 30)), [], Policy.sft_loss

    def sft_loss(self, obs, actions, *, is_target, **options):
        encoded = self.processor.encode_actions(actions, self.processor.encode(obs).raw_state)
        normal = self.processor.action_stats.unnormalize(encoded[..., :4], quantile=False)
        seen.append((obs.states[:, 0].long(), normal, is_target))
        return plain(self, obs, actions, is_target=is_target, **options)

    monkeypatch.setattr(Policy, "sft_loss", sft_loss)
    options = OpenPiOptions(action_horizon=50, state_dim=4)
    model = Config(size="compact", action_dim=4, num_action_chunks=5, num_steps=2, openpi=options)
    train_sft(run_config(tmp_path, model, steps=2, batch_size=50), on_progress=lambda line: None)
    frames, targets, counted = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert sorted(frames.tolist()) == list(range(100))
    assert targets.shape == (100, 50, 4)
    for frame, target, counts in zip(frames.tolist(), targets, counted, strict=True):
        left = int(data.last_frame[frame]) - frame + 1
        want = data.actions[frame : frame + min(left, 50)]
        assert counts.tolist() == [True] * len(want) + [False] * (50 - len(want))
        assert (target[: len(want)] - want).abs().max() < 1e-5


@pytest.mark.slow  # 400 steps
def test_sampled_padding_columns_are_near_zero_after_imitation(tmp_path):
    """A network of 8 columns, 4 of them real: after 400 steps the sampler brings the others from noise to zero."""
    data = demonstrations(tmp_path / "demos", (40,) * 5)
    options = OpenPiOptions(state_dim=4, train_expert_only=False)
    model = Config(size="compact", action_dim=4, num_action_chunks=5, num_steps=2, openpi=options)
    cfg = run_config(tmp_path, model, steps=400, batch_size=16, noise_draws=4)
    folder = train_sft(cfg, on_progress=lambda line: None)
    policy = Policy.build(replace(model, model_path=str(folder)), CPU)
    inputs = policy.processor.encode(data.observation(range(0, 200, 2)))
    prefix = policy.prefix(inputs.images, *inputs.prompts.trimmed())
    start = torch.randn(100, 5, 8, generator=torch.Generator().manual_seed(0))
    padding = policy.sampler().ode(prefix, inputs.state, start).x[:, -1, :, 4:]
    assert padding.std() <= 0.1
