"""What every model under rlinf/models must hold; new ones are found by name and bring their own examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlinf.compat.policies import policy_class
from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, Observation
from rlinf.models.config import ModelConfig, PolicySpec, available_models, find_config
from rlinf.models.policy import Policy, find_policy
from rlinf.training.optim import VALUE_HEAD

CPU = torch.device("cpu")
ROWS, GAP = 4, 2e-5
CASES = {f"{name}-{i}": cfg for name in available_models() for i, cfg in enumerate(find_config(name).examples())}
PROMPTS = ("push the red button", "open it", "put the small blue block on the shelf", "close the drawer")


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def observation(spec: PolicySpec, rows: int = ROWS, seed: int = 0) -> Observation:
    """Random pictures (of another size than the model's) and states that fit the spec."""
    g, wrists = torch.Generator().manual_seed(seed), spec.num_images - 1

    def pictures(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (*shape, 3), generator=g, dtype=torch.uint8)

    return Observation(
        images=pictures(rows, 40, 40),
        wrist_images=pictures(rows, wrists, 30, 20) if wrists else None,
        states=randn(g, rows, spec.state_dim) if spec.state_dim else None,
        task_descriptions=list(PROMPTS[:rows]),
        critic_state=randn(g, rows, spec.critic_state_dim) if spec.critic_state_dim else None,
    )


def noise(rows: int = ROWS, *, first: int = 0, chunk: int = 0) -> Noise:
    return Noise(seed=7, at=ChunkIndex(0, 0, chunk), env_ids=range(first, first + rows))


def gap(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None
    assert b is not None
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@pytest.fixture(scope="module", params=CASES)
def cfg(request: pytest.FixtureRequest) -> ModelConfig:
    return CASES[request.param]


def make(cfg: ModelConfig, seed: int = 0, *, compat: str | None = None) -> Policy:
    """Random weights, statistics of random data, and a value head that is awake (it may start at zero)."""
    policy = policy_class(cfg.model_type, compat).build(cfg, CPU, seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if VALUE_HEAD in name:
                parameter.add_(0.1 * randn(g, *parameter.shape))
    policy.fit_statistics(*statistics_data(g, policy))
    return policy


def statistics_data(g: torch.Generator, policy: Policy) -> tuple[torch.Tensor | None, torch.Tensor]:
    """States and actions to normalise by."""
    spec = policy.spec
    return randn(g, 64, spec.state_dim) if spec.state_dim else None, randn(g, 64, spec.action_dim)


@pytest.fixture(scope="module")
def policy(cfg: ModelConfig) -> Policy:
    return make(cfg)


def test_predict_gives_what_the_spec_promises(cfg, policy):
    spec = policy.spec
    assert spec == cfg.spec()
    obs = observation(spec)
    for mode in ("train", "eval"):
        out = policy.predict(obs, mode=mode, noise=noise())
        assert out.actions.shape == (ROWS, spec.num_action_chunks, spec.action_dim)
        assert out.actions.dtype == torch.float32
        assert torch.isfinite(out.actions).all()
        assert not out.actions.requires_grad
    out = policy.predict(obs, mode="train", noise=noise())
    assert out.logprobs.shape == out.actions.shape
    assert out.logprobs.dtype == torch.float32
    assert all(len(value) == ROWS for value in (*out.replay.values(), *(out.cache or {}).values()))
    assert (out.cache is not None) == (cfg.cache_bytes_per_sample() > 0)
    if spec.has_value:
        assert out.values.shape == (ROWS, spec.values_per_chunk)
        assert out.values.std() > 0
        value = policy.value(obs, noise=noise())
        assert value.shape == out.values.shape
        assert torch.isfinite(value).all()


def test_evaluate_returns_what_predict_stored(policy):
    if not policy.spec.has_logprob:
        pytest.skip("this policy gives no log-probs")
    spec = policy.spec
    out = policy.predict(observation(spec), mode="train", noise=noise())
    for cache in (None, out.cache):
        again = policy.evaluate(out.replay, values=spec.has_value, entropy=True, cache=cache)
        assert gap(again.logprobs, out.logprobs) <= GAP
        assert again.entropy.shape in (out.logprobs.shape, (len(out.logprobs), 1, 1))
        if spec.has_value:
            assert gap(again.values, out.values) <= GAP
    order = torch.tensor([2, 0, 3, 1])
    shuffled = policy.evaluate({k: v[order] for k, v in out.replay.items()}, values=False, entropy=False)
    assert gap(shuffled.logprobs, out.logprobs[order]) <= GAP
    assert shuffled.values is None
    assert shuffled.entropy is None


def test_a_row_depends_on_its_own_noise_and_observation_only(policy):
    obs = observation(policy.spec)
    together = policy.predict(obs, mode="eval", noise=noise()).actions
    for row in range(ROWS):
        alone = policy.predict(obs[[row]], mode="eval", noise=noise(1, first=row)).actions
        assert gap(alone, together[[row]]) <= 1e-4
    again = policy.predict(obs, mode="train", noise=noise()).actions
    assert torch.equal(again, policy.predict(obs, mode="train", noise=noise()).actions)
    assert gap(again, policy.predict(obs, mode="train", noise=noise(chunk=1)).actions) > 1e-3


def test_gradients_reach_the_trainable_parameters(cfg, policy):
    parameters = dict(policy.trainable_parameters())
    assert sum(p.numel() for p in parameters.values()) == cfg.num_trainable_parameters() > 0
    assert sum(p.numel() for p in policy.parameters()) == sum(cfg.num_parameters().values())
    assert any(VALUE_HEAD in name for name in parameters) == policy.spec.has_value
    if policy.spec.has_logprob:
        out = policy.predict(observation(policy.spec), mode="train", noise=noise())
        new = policy.evaluate(out.replay, values=policy.spec.has_value, entropy=False)
        (new.logprobs.sum() + (new.values.sum() if new.values is not None else 0)).backward()
        learned = {name for name, p in policy.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
        policy.zero_grad(set_to_none=True)
        assert learned
        assert learned <= parameters.keys()


def test_a_saved_policy_comes_back_bit_for_bit(cfg, policy, tmp_path: Path):
    policy.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").is_file()
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pt", ".pkl", ".bin")]
    again = find_policy(cfg.model_type).build(replace(cfg, model_path=str(tmp_path)), CPU, seed=99)
    ours, theirs = policy.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    obs = observation(policy.spec)
    for mode in ("train", "eval"):
        a, b = (p.predict(obs, mode=mode, noise=noise()) for p in (policy, again))
        assert torch.equal(a.actions, b.actions)
    other = make(cfg, seed=5)
    assert any(not torch.equal(ours[name], t) for name, t in other.state_dict().items())
    other.load_weights(tmp_path if cfg.is_lora else tmp_path / "model.safetensors")
    assert all(torch.equal(ours[name], t) for name, t in other.state_dict().items())
    assert not torch.equal(other.predict(obs, mode="eval", noise=noise()).actions, a.actions)  # its own statistics
    other.load_pretrained(tmp_path)
    assert torch.equal(other.predict(obs, mode="eval", noise=noise()).actions, a.actions)


def test_imitation_loss_falls(cfg):
    policy = make(cfg)
    g, spec = torch.Generator().manual_seed(3), policy.spec
    actions = 0.3 * randn(g, ROWS, spec.num_action_chunks, spec.action_dim)
    optimizer = torch.optim.Adam([p for _, p in policy.trainable_parameters()], lr=2e-3)
    losses = []
    for _ in range(12):
        loss = policy.sft_loss(observation(spec), actions, noise=noise(), draws=2)
        assert loss.shape == ()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_the_action_path_is_that_of_predict_and_of_imitation(cfg: ModelConfig, policy: Policy) -> None:
    """`rlinf doctor --recipe` checks what evaluations and imitation compute, not something beside it."""
    g, spec = torch.Generator().manual_seed(1), policy.spec
    states, actions = statistics_data(g, policy)
    policy.fit_statistics(states, actions)
    path = type(policy).action_path(cfg)
    path.fit(states, actions)
    obs, outputs, targets = observation(spec), [], []
    policy._act, act = lambda *a, **k: outputs.append(act(*a, **k)) or outputs[-1], policy._act
    decode = getattr(policy.processor, "unnormalize_actions", None)  # a flow's call ends with un-normalised actions
    if decode is not None:
        policy.processor.unnormalize_actions = lambda x: outputs.append({"actions": x}) or decode(x)
    try:
        actions = policy.predict(obs, mode="eval", noise=noise()).actions
    finally:
        policy._act = act
        if decode is not None:
            del policy.processor.unnormalize_actions
    network = next(outputs[0][name] for name in ("bins", "actions") if name in outputs[0])
    assert torch.equal(path.actions(obs, network), actions)

    wanted = 0.5 * randn(g, ROWS, policy.action_horizon, spec.action_dim)
    learned = "_imitate" if hasattr(policy, "_imitate") else "read"  # a flow's target, or tokens
    original = getattr(policy, learned)
    setattr(policy, learned, lambda *a: targets.append(a) or original(*a))
    try:
        policy.sft_loss(obs, wanted, noise=noise())
    finally:
        setattr(policy, learned, original)
    target = targets[0][0]["target"] if learned == "_imitate" else targets[0][1]
    assert torch.equal(path.targets(obs, wanted), target)

    inside = path.normal(obs, wanted).actions[:, : spec.num_action_chunks].abs() <= 1
    error = (path.actions(obs, target) - wanted[:, : spec.num_action_chunks]).abs() * inside
    assert (error <= 1.001 * path.resolution().float() + 1e-5).all()
    seen = path.seen(obs)
    assert seen.images.shape == (ROWS, spec.num_images, spec.image_size, spec.image_size, 3)
    assert (seen.state is None) == (spec.state_dim == 0)
