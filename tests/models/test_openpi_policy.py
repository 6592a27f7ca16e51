"""π policies: what predict stores, evaluate scores again; caches, padding and batch order change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from openpi_cases import CRITIC_COLUMNS, PROMPTS, build, config, noise, observation

from rlinf.errors import UserError
from rlinf.models.inputs import Prompts
from rlinf.models.openpi import flow

SAMPLERS = {
    "flow_sde": {},
    "flow_sde_ignore_last": {"ignore_last": True},
    "flow_sde_joint": {"joint_logprob": True},
    "flow_noise": {"noise_method": "flow_noise"},
    "flow_noise_joint": {"noise_method": "flow_noise", "joint_logprob": True},
    "flow_cps": {"noise_method": "flow_cps"},
    "squared_error": {"safe_get_logprob": True},
}
CRITICS = {
    "expert": {"value_input": "expert"},
    "expert_chunk": {"value_input": "expert", "chunk_critic_input": True, "detach_critic_input": True},
    "vlm": {"value_after_vlm": True},
    "vlm_last": {"value_input": "vlm", "value_vlm_mode": "last_token"},
    "state": {"value_input": "state", "critic_state_dim": CRITIC_COLUMNS},
}
GAP = 2e-5


def gap(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None
    assert b is not None
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_calvin"])
def test_evaluate_returns_what_predict_stored(name, sampler):
    cfg = config(name, **SAMPLERS[sampler])
    policy = build(cfg)
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    again = policy.evaluate(out.replay, values=True, entropy=True)
    assert out.actions.shape == out.logprobs.shape == (6, 3, cfg.action_dim)
    assert out.values.shape == (6, 1)
    assert gap(again.logprobs, out.logprobs) <= GAP
    assert gap(again.values, out.values) <= GAP
    assert out.logprobs.abs().max() > 0.1
    learned = cfg.openpi.noise_method == "flow_noise"
    assert (again.entropy.abs().max() > 0) == learned
    score = policy.sampler().score(*replayed(policy, out.replay))
    mean = policy.executed(score.entropy).mean((1, 2))  # over steps, actions and columns: one number per chunk
    assert gap(again.entropy, mean[:, None, None]) <= GAP
    assert torch.isfinite(again.logprobs).all()


def replayed(policy, replay):
    """Arguments of `Sampler.score` for what `predict` stored."""
    prompts = Prompts.stored(replay["tokens"], replay["token_valid"], pads_last=True)
    prefix = policy.prefix(replay["images"], *prompts.trimmed())
    return prefix, replay.get("state"), replay["x"], replay.get("index")


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_metaworld"])
def test_every_critic_agrees_between_rollout_and_update(name, critic):
    cfg = config(name, **CRITICS[critic])
    policy = build(cfg)
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    again = policy.evaluate(out.replay, values=True, entropy=False)
    assert gap(again.values, out.values) <= GAP
    assert out.values.std() > 1e-4
    bootstrap = policy.value(observation(cfg), noise=noise())
    assert bootstrap.shape == (6, 1)
    if cfg.value_input != "expert":  # these critics do not look at the noisy actions
        assert gap(bootstrap, out.values) <= GAP


@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_metaworld"])
def test_bootstrap_values_are_means_over_all_steps_where_stored_values_are(name):
    """With next to no noise a sampled chain is the deterministic path: the value of one is that of the other."""
    quiet = {"noise_method": "flow_noise", "noise_logvar_range": [1e-6, 1e-6]}
    cfg = config(name, joint_logprob=True, **quiet)
    policy = build(cfg)
    stored = policy.predict(observation(cfg), mode="train", noise=noise()).values
    first_step = policy.sampler().ode(*path_start(policy, cfg), steps=1)
    assert gap(policy.critic(first_step.features, None, None), stored) > 100 * GAP  # another number altogether
    assert gap(policy.value(observation(cfg), noise=noise()), stored) <= GAP
    for compat in (None, "rlinf-0.4"):  # one scored step: its value, or in published rollouts that of all steps
        policy = build(config(name), compat=compat)
        path = policy.sampler().ode(*path_start(policy, cfg), steps=None if compat else 1)
        value = policy.value(observation(cfg), noise=noise())
        assert gap(value, policy.critic(path.features, None, None)) <= GAP


def path_start(policy, cfg):
    """Prefix, state and noise from which `policy` values the observation of `cfg`."""
    inputs = policy.processor.encode(observation(cfg))
    start = noise().normal((policy.arch.action_horizon, policy.arch.action_dim))
    return policy.prefix(inputs.images, *inputs.prompts.trimmed()), inputs.state, start


@pytest.mark.parametrize("name", ["pi0_aloha_robotwin", "pi05_aloha_robotwin"])
def test_robotwin_conventions(name):
    cfg = config(name)
    policy = build(cfg)
    obs = observation(cfg)
    out = policy.predict(obs, mode="train", noise=noise())
    assert out.replay["images"].shape == (6, 3, 64, 64, 3)
    assert out.actions.shape == (6, 3, 14)
    assert gap(policy.evaluate(out.replay, values=False, entropy=False).logprobs, out.logprobs) <= GAP
    actions = torch.rand(6, 5, 14)
    x = policy.processor.encode_actions(actions, policy.processor.encode(obs).raw_state)
    assert gap(policy.processor.decode_actions(x, policy.processor.encode(obs).raw_state), actions[:, :3]) <= 1e-5


@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_metaworld"])
def test_rows_do_not_depend_on_their_neighbours(name):
    """Trimming follows the longest prompt of a batch, so this also compares trimmed with padded prompts."""
    cfg = config(name, value_after_vlm=True)
    policy = build(cfg)
    obs = observation(cfg)
    together = policy.predict(obs, mode="train", noise=noise())
    order = torch.tensor([4, 1, 3, 0, 5, 2])
    shuffled = policy.evaluate({k: v[order] for k, v in together.replay.items()}, values=True, entropy=False)
    assert gap(shuffled.logprobs, together.logprobs[order]) <= GAP
    assert gap(shuffled.values, together.values[order]) <= GAP
    for i in range(6):
        alone = policy.predict(obs[[i]], mode="train", noise=noise(1, first=i))
        assert gap(alone.actions, together.actions[[i]]) <= 1e-4
        scored = policy.evaluate({k: v[[i]] for k, v in together.replay.items()}, values=True, entropy=False)
        assert gap(scored.logprobs, together.logprobs[[i]]) <= GAP
        assert gap(scored.values, together.values[[i]]) <= GAP


@pytest.mark.parametrize("critic", ["expert", "vlm"])
@pytest.mark.parametrize("name", ["pi0_calvin", "pi05_metaworld"])
def test_prefix_cache(name, critic):
    cfg = config(name, train_expert_only=True, **CRITICS[critic])
    policy = build(cfg)
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    stored = sum(t[0].numel() * t.element_size() for t in out.cache.values())
    assert stored == cfg.cache_bytes_per_sample()
    rows = torch.tensor([1, 4])  # both short: the cached keys are cut to their length
    replay = {k: v[rows] for k, v in out.replay.items()}
    plain = policy.evaluate(replay, values=True, entropy=False)
    del replay["images"]  # the frozen part is not run again
    cached = policy.evaluate(replay, values=True, entropy=False, cache={k: v[rows] for k, v in out.cache.items()})
    assert gap(cached.logprobs, plain.logprobs) <= GAP
    assert gap(cached.values, plain.values) <= GAP
    (cached.logprobs.sum() + cached.values.sum()).backward()
    learned = {n for n, p in policy.named_parameters() if p.grad is not None}
    assert learned == {n for n, _ in policy.trainable_parameters()}
    assert not any(".paligemma." in n for n in learned)
    assert sum(p.numel() for _, p in policy.trainable_parameters()) == cfg.num_trainable_parameters()


def test_without_frozen_parts_there_is_no_cache_and_all_parts_learn():
    cfg = config(train_expert_only=False, value_after_vlm=True)
    policy = build(cfg)
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    assert out.cache is None
    result = policy.evaluate(out.replay, values=True, entropy=False)
    (result.logprobs.sum() + result.values.sum()).backward()
    assert [n for n, p in policy.named_parameters() if p.grad is None] == []


def test_detached_critic_leaves_the_network_alone():
    cfg = config(value_input="expert", detach_critic_input=True)
    policy = build(cfg)
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    policy.evaluate(out.replay, values=True, entropy=False).values.sum().backward()
    assert {n.split(".")[0] for n, p in policy.named_parameters() if p.grad is not None} == {"value_head"}


def test_logprob_is_the_gaussian_of_the_drawn_step():
    """From the replay alone: x' = μ + σ ε, so the log-prob follows from the noise that predict drew."""
    cfg = config()
    policy = build(cfg)
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    source = noise()
    index = source.integers(4)
    start, eps = source.normal((5, 8)), source.normal((1, 5, 8))[:, 0]
    assert torch.equal(out.replay["index"], index)
    assert len(set(index.tolist())) > 1  # one index per row, not one for the batch
    std = flow.step_weights("flow_sde", 4, 0.5, torch.device("cpu")).std[index][:, None, None]
    want = -torch.log(std) - 0.5 * math.log(2 * math.pi) - 0.5 * eps**2
    assert gap(out.logprobs, want[:, :3, :4]) <= GAP
    first = index == 0
    assert torch.equal(out.replay["x"][first, 0], start[first])


def test_eval_mode_is_the_ode_of_the_drawn_noise():
    cfg = config()
    policy = build(cfg)
    obs = observation(cfg)
    out = policy.predict(obs, mode="eval", noise=noise())
    assert torch.equal(out.actions, policy.predict(obs, mode="eval", noise=noise()).actions)
    assert out.replay == {}
    assert out.values is None
    inputs, x = policy.processor.encode(obs), noise().normal((5, 8))
    with torch.no_grad():
        prefix = policy.net.prefix(inputs.images, *inputs.prompts.trimmed())
        for i in range(4):
            t = torch.full((6,), 1 - i / 4)
            x = x - policy.net.velocity(policy.net.suffix(prefix, inputs.state, x, policy.net.times(t))) / 4
    assert gap(out.actions, policy.processor.decode_actions(x, inputs.raw_state)) <= 1e-5


@pytest.mark.parametrize("name", ["pi0_metaworld", "pi05_calvin"])
@torch.no_grad()
def test_what_all_steps_share_is_computed_once(name):
    """Tokens, and the end of the path, are those of each step computed by itself."""
    cfg = config(name)
    policy, obs = build(cfg), observation(cfg)
    net, sampler, inputs = policy.net, policy.sampler(), policy.processor.encode(obs)
    times, x = sampler.times(torch.device("cpu")), noise().normal((5, 8))
    tokens = net.noisy_tokens(inputs.state, times, len(x))
    for i in (0, 2):
        want = net.embed_suffix(inputs.state, x + i, times.embedding[i : i + 1])
        torch.testing.assert_close(tokens(x + i, i), want, atol=1e-5, rtol=1e-5)
    prefix = net.prefix(inputs.images, *inputs.prompts.trimmed())
    assert gap(sampler.end(prefix, inputs.state, x), sampler.ode(prefix, inputs.state, x).x[:, -1]) <= 1e-5


def test_pictures_that_fit_stay_where_they_are():
    cfg = config()
    policy = build(cfg)
    size = policy.arch.image_size
    fitting, other = observation(cfg, size=size), observation(cfg, size=48)
    read = policy.processor.read(fitting)
    assert read.images.data_ptr() == fitting.images.data_ptr()
    assert torch.equal(read.images[:, 0], fitting.images)
    assert policy.processor.read(other).images.shape == read.images.shape


def test_new_statistics_are_not_replayed_from_old_recordings(monkeypatch):
    cfg = config()
    policy, cleared = build(cfg), []
    monkeypatch.setattr(policy._act, "clear", lambda: cleared.append(1))
    policy.fit_statistics(torch.rand(8, cfg.convention.state_dim), torch.randn(8, cfg.action_dim))
    assert cleared == [1]


def test_noise_annealing():
    policy = build(config(noise_anneal=True, noise_params=[0.7, 0.3, 400.0]))
    assert policy.sampler().noise_level == 0.7
    policy.set_global_step(100)
    assert policy.sampler().noise_level == pytest.approx(0.6)


def test_actions_of_a_chunk_share_a_draw_of_noise():
    cfg = config(noise_per="chunk", num_steps=1)
    policy = build(cfg)
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    sampler, x = policy.sampler(), out.replay["x"]
    weights = sampler.weights(x.device).at(slice(0, 1))
    prefix = policy.prefix(out.replay["images"], *policy._trimmed(policy.processor.encode(observation(cfg))))
    step = sampler.transition(prefix, out.replay["state"], x[:, 0], slice(0, 1), sampler.times(x.device))
    drawn = (x[:, 1] - step.mean) / weights.std
    assert gap(drawn, drawn[:, :1].expand_as(drawn)) <= 1e-4
    single = torch.distributions.Normal(0.0, 0.5).log_prob(0.5 * drawn[:, 0, : cfg.action_dim])
    assert out.logprobs.shape == (len(x), cfg.num_action_chunks, cfg.action_dim)
    assert gap(out.logprobs.sum(1), single) <= 1e-4
    again = policy.evaluate(out.replay, values=False, entropy=False)
    assert gap(again.logprobs, out.logprobs) <= GAP


def test_shared_noise_is_scored_by_what_it_moves():
    x, mean, std = torch.randn(2, 5, 3), torch.randn(2, 5, 3), torch.full((2, 5, 3), 0.2)
    shift = torch.randn(2, 5, 3)
    shift[:, :4] -= shift[:, :4].mean(1, keepdim=True)  # leaves the mean of the first four where it is
    found = flow.logprob_together(x, mean, std, 4)
    assert gap(flow.logprob_together(x, mean + shift, std, 4), found) <= 1e-5
    assert torch.equal(found[:, 4:], torch.zeros(2, 1, 3))
    want = torch.distributions.Normal(mean[:, :4].mean(1), 0.2).log_prob(x[:, :4].mean(1))
    assert gap(found.sum(1), want) <= 1e-5


def test_published_values_average_the_steps_and_read_three_cameras():
    cfg = config("pi05_metaworld", value_after_vlm=True)
    policy, clean = build(cfg, compat="rlinf-0.4"), build(cfg)
    out, own = (p.predict(observation(cfg), mode="train", noise=noise()) for p in (policy, clean))
    assert out.replay["images"].shape == own.replay["images"].shape
    assert gap(out.actions, own.actions) <= 1e-5
    assert gap(out.values, own.values) > 1e-4  # the mean also reads padding
    for cache in (None, out.cache):
        again = policy.evaluate(out.replay, values=True, entropy=False, cache=cache)
        assert gap(again.values, out.values) <= GAP
        assert gap(again.logprobs, out.logprobs) <= GAP
    cfg = config()
    policy = build(cfg, compat="rlinf-0.4")
    out = policy.predict(observation(cfg), mode="train", noise=noise())
    again = policy.evaluate(out.replay, values=True, entropy=False)
    assert gap(again.values, out.values) > 1e-4  # the published mismatch
    assert gap(again.logprobs, out.logprobs) <= GAP


def test_observations_that_do_not_fit():
    cfg = config("pi0_calvin")
    policy = build(cfg)
    obs = observation(config("pi0_metaworld"))
    with pytest.raises(UserError, match="reads 7 state columns, the simulator gives 4"):
        policy.predict(obs, mode="eval", noise=noise())
    cfg = config(value_input="state", critic_state_dim=7)
    with pytest.raises(UserError, match="critic_state_dim=7, but the simulator's critic state has 5"):
        build(cfg).predict(observation(cfg), mode="train", noise=noise())
    cfg = config("pi0_metaworld", num_images_in_input=2)
    with pytest.raises(UserError, match="needs 1 wrist cameras; the simulator has 0"):
        build(cfg).predict(obs, mode="eval", noise=noise())


def test_prompts_change_actions():
    cfg = config()
    policy = build(cfg)
    obs = observation(cfg, rows=1)
    actions = []
    for prompt in PROMPTS:
        obs.task_descriptions[0] = prompt
        actions.append(policy.predict(obs, mode="eval", noise=noise(1)).actions)
    assert gap(actions[0], actions[1]) > 1e-3
    assert gap(actions[0], actions[2]) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"joint_logprob": True}, {"value_after_vlm": True}, {"train_expert_only": True}]
)
def test_recorded_scores_and_gradients_are_the_direct_ones(options):
    """Also of two micro batches, and at another noise level than that of the recording."""
    cfg = config(**options)
    policy, rows = build(cfg), {}
    for seed in range(2):
        replay = policy.predict(observation(cfg, seed=seed), mode="train", noise=noise(chunk=seed)).replay
        rows[seed] = {name: tensor.cuda() for name, tensor in replay.items()}
    policy.cuda()

    def step(level: float, *, recorded: bool) -> list[torch.Tensor]:
        policy.noise_level, policy._score.enabled = level, recorded
        policy.zero_grad(set_to_none=True)
        seen = []
        for replay in rows.values():
            found = policy.evaluate(replay, values=True, entropy=True)
            (found.logprobs.sum() + found.values.square().sum() + found.entropy.sum()).backward()
            seen += [found.logprobs, found.values, found.entropy]
        return seen + [p.grad for p in policy.parameters() if p.grad is not None]

    for level in (0.5, 0.3):
        fast = [tensor.detach().clone() for tensor in step(level, recorded=True)]
        plain = [tensor.detach() for tensor in step(level, recorded=False)]
        largest = max(float(tensor.norm()) for tensor in plain)  # some gradients are 0 but for rounding: keys' biases
        for a, b in zip(fast, plain, strict=True):
            assert float((a - b).norm()) <= 1e-3 * float(b.norm()) + 1e-6 * largest
    assert policy._score._recordings
