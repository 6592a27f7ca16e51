"""OpenVLA and OpenVLA-OFT as policies: predict and evaluate agree for every sampler, rows for themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, Observation
from rlinf.errors import UserError
from rlinf.models.files import lora
from rlinf.models.openvla.config import Config as OpenVla
from rlinf.models.openvla_oft.config import Config as Oft
from rlinf.models.policy import find_policy
from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic.architecture import Parts
from rlinf.models.prismatic.base_config import PrismaticConfig
from rlinf.models.prismatic.model import PrismaticNet
from rlinf.models.prismatic.policy import PrismaticPolicy

CPU = torch.device("cpu")
ROWS = 4
PROMPTS = ["open it", "put the small blue block on the shelf", "push the red button", "close the drawer now"]
SAMPLERS = {"T1": (1.0, 0), "T1.6": (1.6, -1), "T1_top20": (1.0, 20), "T0.5_top50": (0.5, 50)}  # temperature, top_k
POLICIES: dict[str, tuple[PrismaticConfig, float]] = {  # with the allowed gap between predict and evaluate
    "openvla": (OpenVla(size="compact", action_dim=7, add_value_head=True), 5e-5),
    "oft": (Oft(size="compact", num_action_chunks=4, action_dim=7, add_value_head=True), 2e-5),
    "oft_official": (
        Oft(
            size="compact",
            implement_version="official",
            num_action_chunks=3,
            action_dim=14,
            use_proprio=True,
            proprio_dim=14,
            use_film=True,
            num_images_in_input=3,
            add_value_head=True,
            value_type="action_level",
        ),
        2e-5,
    ),
}


def build(cfg: PrismaticConfig, seed: int = 0) -> PrismaticPolicy:
    """Random weights with peaked logits and a value head that is awake."""
    policy = find_policy(cfg.model_type).build(cfg, CPU, seed=seed)
    assert isinstance(policy, PrismaticPolicy)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.net.language_model.lm_head.weight.mul_(6.0)
        if policy.value_head is not None:
            policy.value_head.mlp[-1].weight.normal_(std=0.1, generator=g)
    states = torch.randn(64, cfg.state_columns, generator=g) if cfg.state_columns else None
    policy.fit_statistics(states, torch.randn(64, cfg.action_dim, generator=g))
    return policy


def observation(cfg: PrismaticConfig, wrists: int | None = None) -> Observation:
    g = torch.Generator().manual_seed(1)
    wrists = cfg.num_images_in_input - 1 if wrists is None else wrists

    def pictures(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (*shape, 3), generator=g, dtype=torch.uint8)

    return Observation(
        images=pictures(ROWS, 48, 60),
        wrist_images=pictures(ROWS, wrists, 30, 20) if wrists else None,
        states=torch.randn(ROWS, cfg.state_columns, generator=g) if cfg.state_columns else None,
        task_descriptions=list(PROMPTS),
    )


def noise(env_ids=range(ROWS)) -> Noise:
    return Noise(seed=7, at=ChunkIndex(0, 0, 0), env_ids=list(env_ids))


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@pytest.fixture(scope="module", params=POLICIES)
def case(request) -> tuple[PrismaticPolicy, float]:
    cfg, bound = POLICIES[request.param]
    return build(cfg), bound


def sampler(policy: PrismaticPolicy, name: str) -> None:
    temperature, top_k = SAMPLERS[name]
    policy.cfg = replace(policy.cfg, temperature_train=temperature, top_k=top_k)


# ------------------------------------------------------------------ predict and evaluate
@pytest.mark.parametrize("name", SAMPLERS)
def test_evaluate_equals_predict(case, name):
    policy, bound = case
    sampler(policy, name)
    out = policy.predict(observation(policy.cfg), mode="train", noise=noise())
    assert out.replay["bins"].dtype == out.replay["images"].dtype == torch.uint8
    assert out.replay["images"].shape[2:] == (policy.arch.image_size, policy.arch.image_size, 3)
    again = policy.evaluate(out.replay, values=True, entropy=True)
    gaps = gap(again.logprobs, out.logprobs), gap(again.values, out.values)
    print(f"{name}: max |Δ log-prob| {gaps[0]:.1e}, |Δ value| {gaps[1]:.1e}")
    assert max(gaps) <= bound
    assert torch.isfinite(again.entropy).all()
    limit = torch.tensor(SAMPLERS[name][1] if SAMPLERS[name][1] > 0 else 256.0).log()
    assert (again.entropy <= limit + 1e-5).all()
    assert out.logprobs.std() > 0.1  # peaked enough to notice


def test_greedy_is_scored_alike(case):
    policy, bound = case
    sampler(policy, "T1")
    inputs = policy.processor.encode(observation(policy.cfg))
    ids, valid = inputs.prompts.trimmed()
    given = {"images": inputs.images, "ids": ids, "valid": valid}
    given |= {} if inputs.state is None else {"state": inputs.state}
    with torch.no_grad():
        out = policy.act(given, temperature=0.0, train=True)
    again = policy.evaluate(given | {"bins": out["bins"]}, values=True, entropy=False)
    assert gap(again.logprobs.flatten(1), out["logprobs"]) <= bound
    assert gap(again.values, out["values"]) <= bound
    chosen = policy.processor.decode_bins(out["bins"])
    assert torch.equal(policy.predict(observation(policy.cfg), mode="eval", noise=noise()).actions, chosen)


def test_batch_order_and_prompt_padding_change_nothing(case):
    policy, bound = case
    sampler(policy, "T1.6")
    obs, order = observation(policy.cfg), [2, 0, 3, 1]
    together = policy.predict(obs, mode="train", noise=noise())
    shuffled = policy.predict(obs[order], mode="train", noise=noise(order))
    assert torch.equal(shuffled.replay["bins"], together.replay["bins"][order])
    assert gap(shuffled.logprobs, together.logprobs[order]) <= 2e-5
    for row in range(ROWS):  # alone, a prompt has no pads
        alone = policy.predict(obs[[row]], mode="train", noise=noise([row]))
        assert torch.equal(alone.replay["bins"], together.replay["bins"][[row]])
        assert gap(alone.logprobs, together.logprobs[[row]]) <= 2e-5
        assert gap(alone.values, together.values[[row]]) <= 2e-5
    assert gap(policy.value(obs, noise=noise()), together.values) <= 2e-5
    replay = together.replay
    with torch.no_grad():
        untrimmed = policy.context(replay["images"], replay["ids"], replay["valid"], replay.get("state"))
        read = policy.read(untrimmed, replay["bins"].long())
    logprobs = action_bins.chosen(policy.score(read.slots, replay["bins"].long()), replay["bins"].long())
    assert gap(logprobs.view_as(together.logprobs), together.logprobs) <= bound
    assert gap(policy.critic(read.value), together.values) <= 2e-5


def test_cameras_that_are_not_read_are_never_seen():
    cfg = POLICIES["oft"][0]
    policy = build(cfg)
    alone = policy.predict(observation(cfg), mode="train", noise=noise())
    more = policy.predict(observation(cfg, wrists=2), mode="train", noise=noise())
    assert more.replay["images"].shape[1] == 1
    assert torch.equal(alone.actions, more.actions)
    assert torch.equal(alone.logprobs, more.logprobs)
    two = build(replace(cfg, num_images_in_input=2))
    with pytest.raises(UserError, match="num_images_in_input=2 needs 1 wrist cameras; the simulator has 0"):
        two.predict(observation(cfg), mode="train", noise=noise())


def test_every_camera_and_the_state_matter():
    cfg = POLICIES["oft_official"][0]
    policy, obs = build(cfg), observation(cfg)
    before = policy.value(obs, noise=noise())
    dark = obs.wrist_images.clone()
    dark[:, 1] = 0
    assert gap(policy.value(replace(obs, wrist_images=dark), noise=noise()), before) > 1e-4
    assert gap(policy.value(replace(obs, states=obs.states + 1), noise=noise()), before) > 1e-4


# ------------------------------------------------------------------ sampling
def test_draws_follow_the_distribution():
    log_prob = action_bins.log_probs(torch.tensor([0.0, 2.0, 1.0] + [-9.0] * 253), temperature=1.0, top_k=3)
    uniforms = (torch.arange(100_000) + 0.5) / 100_000
    bins = action_bins.draw(log_prob.expand(100_000, -1), uniforms)
    share = torch.bincount(bins, minlength=256) / 100_000
    assert gap(share, log_prob.exp()) <= 2e-5
    edges = torch.tensor([0.0, 1.0 - 2**-24])  # the smallest and the largest uniform there is
    last = torch.full((2, 256), -torch.inf)
    last[:, 7:9] = -0.6931472
    assert action_bins.draw(last, edges).tolist() == [7, 8]


def test_the_top_k_are_ranked_inside_the_bins_and_scored_as_drawn():
    logits = torch.randn(5, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    kept = action_bins.log_probs(logits, temperature=2.0, top_k=10)
    assert (kept > -torch.inf).sum(-1).tolist() == [10] * 5
    best = logits.topk(10, -1)
    assert gap(kept.gather(-1, best.indices), (best.values / 2.0).log_softmax(-1)) <= 1e-6
    worst = logits.argmin(-1)  # a stored bin that has left the top k since
    scored = action_bins.log_probs(logits, temperature=2.0, top_k=10, keep=worst)
    assert torch.isfinite(action_bins.chosen(scored, worst)).all()
    (action_bins.chosen(scored, worst).sum() + action_bins.entropy(scored).sum()).backward()
    assert torch.isfinite(logits.grad).all()
    uniform = action_bins.entropy(action_bins.log_probs(torch.zeros(1, 256), temperature=1.0, top_k=0))
    assert uniform.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=1e-5)


def test_eval_temperature():
    cfg = replace(POLICIES["oft"][0], temperature_eval=0.6)
    policy = build(cfg)
    drawn = [
        policy.predict(observation(cfg), mode="eval", noise=Noise(seed=s, at=ChunkIndex(0, 0, 0), env_ids=range(ROWS)))
        for s in (1, 1, 2)
    ]
    assert torch.equal(drawn[0].actions, drawn[1].actions)
    assert not torch.equal(drawn[0].actions, drawn[2].actions)
    assert drawn[0].replay == {}


# ------------------------------------------------------------------ heads, dtypes, adapters
def test_an_l1_head_imitates_and_acts_without_noise():
    cfg = replace(POLICIES["oft_official"][0], action_head="l1", num_images_in_input=1, statistics="q99")
    assert not cfg.spec().has_logprob
    assert not cfg.spec().has_value
    policy, obs = build(cfg), observation(cfg)
    target = 0.3 * torch.randn(ROWS, 3, 14, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adam([p for _, p in policy.trainable_parameters()], lr=2e-3)
    losses = []
    for _ in range(20):
        loss = policy.sft_loss(obs, target, noise=noise())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    a, b = (policy.predict(obs, mode=mode, noise=noise()) for mode in ("train", "eval"))
    assert torch.equal(a.actions, b.actions)
    assert (a.actions - target).abs().mean() < 0.85 * target.abs().mean()


@pytest.mark.parametrize("name", ["openvla", "oft"])
def test_a_further_loss_reads_the_mean_image_token(name):
    policy = build(POLICIES[name][0])
    obs, actions = observation(policy.cfg), torch.randn(ROWS, policy.cfg.num_action_chunks, policy.cfg.action_dim)
    wanted = torch.randn(ROWS, policy.image_width)

    def teach(tokens: torch.Tensor) -> torch.Tensor:
        assert (tokens.shape, tokens.dtype) == (wanted.shape, torch.float32)
        return (tokens - wanted).square().mean()

    plain = policy.sft_loss(obs, actions, noise=noise())
    both = policy.sft_loss(obs, actions, noise=noise(), image_token_loss=teach)
    further = teach(policy.net.embed_images(policy.processor.encode(obs).images).float().mean(1))
    assert both.item() == pytest.approx(plain.item() + further.item(), rel=1e-5)


def test_gradient_checkpointing_changes_no_gradient():
    grads = []
    for on in (False, True):
        policy = build(replace(POLICIES["oft"][0], gradient_checkpointing=on))
        replay = policy.predict(observation(policy.cfg), mode="train", noise=noise()).replay
        policy.evaluate(replay, values=True, entropy=False).logprobs.sum().backward()
        grads.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert max(gap(g, grads[1][name]) for name, g in grads[0].items()) <= 1e-5


def test_bf16_is_the_whole_network_but_never_the_critic():
    cfg = OpenVla(add_value_head=True)
    policy = find_policy("openvla")(cfg, "meta")
    assert {p.dtype for p in policy.net.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.value_head.parameters()} == {torch.float32}
    assert sum(p.numel() for p in policy.parameters()) == sum(cfg.num_parameters().values())
    assert replace(cfg, size="small").stored_precision == "fp32"


@pytest.mark.parametrize("options", [{}, {"proprio_dim": 5, "film": True, "regression": (3, 7)}])
def test_adapted_layers_are_known_without_torch(options):
    arch = POLICIES["oft"][0].architecture()
    with torch.device("meta"):
        net = PrismaticNet(arch, Parts(**options))
    assert sorted(arch.layers(Parts(**options))) == sorted(lora._layers(net))


def test_random_bins_start_in_order():
    """Neighbouring bins are alike in both tables, far ones are not."""
    net = find_policy("openvla").build(OpenVla(size="compact"), CPU).net
    first, last = net.arch.action_begin, net.arch.action_end
    for weight in (net.language_model.lm_head.weight, net.language_model.model.embed_tokens.weight):
        rows = weight[first:last]
        assert torch.cosine_similarity(rows[:-1], rows[1:]).min() > 0.9
        assert torch.cosine_similarity(rows[:1], rows[128:129]).abs() < 0.9
