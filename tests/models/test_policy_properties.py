"""What must hold for every policy with every sampler at fp32: scoring again, batching and shortcuts change no number.

Bound: 5e-4, that of the golden vectors for log-probs and values; processors round sums of other lengths differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, PolicyEval, PolicyOutput
from rlinf.models.config import ModelConfig
from rlinf.models.files import lora
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.nn import packed
from rlinf.models.nn.recompute import BlockStack, set_checkpointing
from rlinf.models.openpi.architecture import VLM
from rlinf.models.openpi.config import Config as Pi
from rlinf.models.openpi.config import OpenPiOptions
from rlinf.models.openpi.conventions import CONVENTIONS
from rlinf.models.openpi.policy import Policy as PiPolicy
from rlinf.models.openvla.config import Config as OpenVla
from rlinf.models.openvla_oft.config import Config as Oft
from rlinf.models.prismatic.policy import PrismaticPolicy
from tests.contracts.test_model_contract import ROWS, gap, make, observation

Tensor = torch.Tensor
SAME, GRADIENT = 5e-4, 1e-5
ORDER = [2, 0, 3, 1]

# ------------------------------------------------------------------ cases
FLOWS = {
    "flow_sde": OpenPiOptions(),
    "flow_sde_ignore_last": OpenPiOptions(ignore_last=True),
    "flow_noise_joint": OpenPiOptions(noise_method="flow_noise", joint_logprob=True),
    "flow_cps": OpenPiOptions(noise_method="flow_cps"),
}
CONVENTION = {
    1: "metaworld",
    2: "calvin",
    3: "aloha_robotwin",
}  # by cameras; the last writes π0.5's state in the prompt
TOKENS = {"T1": (1.0, 0), "T1.6": (1.6, -1), "T1_top20": (1.0, 20)}  # temperature, top_k


def pi(model: str, sampler: str, critic: str, cameras: int, *, frozen: bool = True) -> Pi:
    name = f"{model}_{CONVENTION[cameras]}"
    options = replace(FLOWS[sampler], config_name=name, value_input=critic, action_horizon=4, train_expert_only=frozen)
    return Pi(
        size="compact",
        action_dim=CONVENTIONS[name].action_dim,
        num_action_chunks=3,
        num_steps=3,
        add_value_head=True,
        openpi=options,
    )


def oft(layout: str, chunk: int, value_type: str) -> Oft:
    cfg = Oft(
        size="compact",
        implement_version=layout,
        num_action_chunks=chunk,
        action_dim=4,
        add_value_head=True,
        value_type=value_type,
    )
    if layout == "rlinf":
        return cfg
    return replace(cfg, num_images_in_input=2, use_proprio=True, proprio_dim=5, use_film=True)


def sampled(cfg: OpenVla | Oft, sampler: str) -> OpenVla | Oft:
    temperature, top_k = TOKENS[sampler]
    return replace(cfg, temperature_train=temperature, top_k=top_k)


def names(*parts: object) -> str:
    return "-".join(map(str, parts))


OPENVLA = OpenVla(size="compact", action_dim=7, add_value_head=True)
OFTS = {
    names("oft", *x): oft(*x) for x in itertools.product(("rlinf", "official"), (1, 4), ("chunk_level", "action_level"))
}
CASES: dict[str, ModelConfig] = {
    names(*x): pi(*x) for x in itertools.product(("pi0", "pi05"), FLOWS, ("expert", "vlm"), CONVENTION)
}
CASES |= {names(policy, s): sampled(cfg, s) for policy, cfg in ({"openvla": OPENVLA} | OFTS).items() for s in TOKENS}
STRUCTURES: dict[str, ModelConfig] = {  # one of each network
    "pi0": pi("pi0", "flow_noise_joint", "expert", 2, frozen=False),
    "pi0-frozen": pi("pi0", "flow_sde", "expert", 2),
    "pi05": pi("pi05", "flow_sde", "vlm", 3, frozen=False),
    "pi05-frozen": pi("pi05", "flow_cps", "vlm", 1),
    "openvla": OPENVLA,
    "oft-rlinf": oft("rlinf", 4, "action_level"),
    "oft-official": oft("official", 4, "chunk_level"),
}


def build(cfg: ModelConfig, *, compat: str | None = None) -> PretrainedPolicy:
    """Random weights, with attention and logits that are peaked enough to notice a mistake."""
    policy = make(cfg, compat=compat)
    assert isinstance(policy, PretrainedPolicy)
    gains = {"q_proj.weight": 3.0, "k_proj.weight": 3.0, "lm_head.weight": 4.0}
    with torch.no_grad():
        for name, parameter in policy.net.named_parameters():
            parameter.mul_(next((gain for end, gain in gains.items() if name.endswith(end)), 1.0))
    return policy


@pytest.fixture(scope="module", params=CASES)
def policy(request: pytest.FixtureRequest) -> PretrainedPolicy:
    return build(CASES[request.param])


@pytest.fixture(params=STRUCTURES)
def structure(request: pytest.FixtureRequest) -> PretrainedPolicy:
    return build(STRUCTURES[request.param])


def noise(rows: Iterable[int] = range(ROWS)) -> Noise:
    return Noise(seed=7, at=ChunkIndex(0, 0, 0), env_ids=list(rows))


def rolled_out(policy: PretrainedPolicy, rows: list[int] | None = None) -> PolicyOutput:
    obs = observation(policy.spec)
    rows = list(range(ROWS)) if rows is None else rows
    return policy.predict(obs[rows], mode="train", noise=noise(rows))


def scored(policy: PretrainedPolicy, replay: dict[str, Tensor], cache: dict[str, Tensor] | None = None) -> PolicyEval:
    return policy.evaluate(replay, values=True, entropy=True, cache=cache)


def chosen(out: PolicyOutput) -> Tensor:
    """What was drawn: denoised actions, or bins."""
    return out.replay["x" if "x" in out.replay else "bins"].float()


def compare(what: str, ours: PolicyOutput | PolicyEval, want: PolicyOutput | PolicyEval) -> None:
    """Log-probs and values (and what was drawn, of two rollouts) per element."""
    gaps = {"log-prob": gap(ours.logprobs, want.logprobs), "value": gap(ours.values, want.values)}
    if isinstance(ours, PolicyOutput) and isinstance(want, PolicyOutput):
        gaps["drawn"] = gap(chosen(ours), chosen(want))
    print(f"{what}: " + ", ".join(f"max |Δ {key}| = {g:.1e}" for key, g in gaps.items()))
    assert max(gaps.values()) <= SAME


def picked(out: PolicyOutput, rows: list[int]) -> PolicyOutput:
    """Rows of a rollout."""
    replay = {key: value[rows] for key, value in out.replay.items()}
    return PolicyOutput(out.actions[rows], out.logprobs[rows], out.values[rows], replay)


# ------------------------------------------------------------------ every policy with every sampler
def test_evaluate_equals_predict(policy):
    """With and without the cache of frozen parts, with and without gradients."""
    out = rolled_out(policy)
    compare("evaluate", scored(policy, out.replay), out)
    with torch.no_grad():
        compare("evaluate without gradients", scored(policy, out.replay), out)
    if out.cache is not None:
        compare("evaluate on the cached prefix", scored(policy, out.replay, out.cache), out)
    assert out.logprobs.std() > 0.05
    assert out.values.std() > 1e-4
    assert torch.isfinite(scored(policy, out.replay).entropy).all()


def test_batch_order(policy):
    out = rolled_out(policy)
    compare("predict in another order", rolled_out(policy, ORDER), picked(out, ORDER))
    replay = picked(out, ORDER).replay
    shuffled, want = scored(policy, replay), scored(policy, out.replay)
    compare("evaluate in another order", shuffled, PolicyEval(want.logprobs[ORDER], want.values[ORDER], None))


def test_prompts_are_trimmed_to_the_longest_of_their_batch(policy):
    """Alone, a prompt has no padding; the rows' prompts have different lengths."""
    out = rolled_out(policy)
    together = scored(policy, out.replay)
    lengths = out.replay["token_valid" if "token_valid" in out.replay else "valid"].sum(1)
    assert len(set(lengths.tolist())) > 2
    for row in range(ROWS):
        compare(f"predict row {row} alone", rolled_out(policy, [row]), picked(out, [row]))
        alone = scored(policy, picked(out, [row]).replay)
        compare(f"evaluate row {row} alone", alone, PolicyEval(together.logprobs[[row]], together.values[[row]], None))


def test_greedy_bins_are_scored_alike():
    for name in ("openvla", *OFTS):
        policy = build(OPENVLA if name == "openvla" else OFTS[name])
        assert isinstance(policy, PrismaticPolicy)
        inputs = policy.processor.encode(observation(policy.spec))
        ids, valid = inputs.prompts.trimmed()
        given = {"images": inputs.images, "ids": ids, "valid": valid}
        given |= {} if inputs.state is None else {"state": inputs.state}
        with torch.no_grad():
            out = policy.act(given, temperature=0.0, train=True)
        again = scored(policy, given | {"bins": out["bins"]})
        greedy = PolicyEval(out["logprobs"].view_as(again.logprobs), out["values"], None)
        compare(f"{name} greedy", again, greedy)
        actions = policy.predict(observation(policy.spec), mode="eval", noise=noise()).actions
        assert torch.equal(actions, policy.processor.decode_bins(out["bins"]))


# ------------------------------------------------------------------ every network
def test_joined_projections_are_the_single_ones(structure):
    parts = [part for part in structure.net.modules() if isinstance(part, packed.Packed)]
    joined = [part for part in parts if part._joined]
    for part in joined:
        assert all(found.is_current(part._layers(group)) for group, found in part._joined.items())
    out = rolled_out(structure)
    assert len(joined) == len(parts) > 0
    for part in joined:
        part._joined.clear()
    compare("one product each", rolled_out(structure), out)


def gradients(policy: PretrainedPolicy, replay: dict[str, Tensor]) -> dict[str, Tensor]:
    policy.zero_grad(set_to_none=True)
    new = scored(policy, replay)
    (new.logprobs.mean() + new.values.mean()).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def test_gradient_checkpointing(structure):
    replay = rolled_out(structure).replay
    kept = gradients(structure, replay)
    set_checkpointing(structure.net, True)
    assert all(part.checkpointing for part in structure.net.modules() if isinstance(part, BlockStack))
    again = gradients(structure, replay)
    assert kept.keys() == again.keys()
    worst = max(gap(again[name], grad) for name, grad in kept.items())
    print(f"max |Δ gradient| = {worst:.1e} of at most {max(float(g.abs().max()) for g in kept.values()):.1e}")
    assert worst <= GRADIENT


def test_fresh_adapters_change_nothing_and_the_rest_is_frozen(structure):
    out = rolled_out(structure)
    before = scored(structure, out.replay)
    structure.cfg = replace(structure.cfg, is_lora=True, lora_rank=4, lora_alpha=16)
    frozen = isinstance(structure.cfg, Pi) and structure.cfg.freeze_vlm
    structure.attach_adapters(0, frozen=(VLM,) if frozen else ())
    compare("predict with adapters", rolled_out(structure), out)
    compare("evaluate with adapters", scored(structure, out.replay), before)
    learned = gradients(structure, out.replay).keys()
    assert any(".lora_B." in name for name in learned)
    assert all(".lora_" in name or name.startswith(structure.heads) for name in learned)


def test_every_case_can_be_learnt_from(policy):
    """Scoring with gradients runs back to the trainable parts, with the prefix recomputed and (π) kept."""
    out = rolled_out(policy)
    for cache in (None, out.cache) if out.cache else (None,):
        with torch.enable_grad():
            again = policy.evaluate(out.replay, values=True, entropy=False, cache=cache)
            again.logprobs.sum().backward()
        assert any(p.grad is not None for _, p in policy.trainable_parameters())
        policy.zero_grad(set_to_none=True)


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("name", ["pi0", "openvla"])
def test_an_adapter_that_has_learnt_acts_and_scores_alike(name, target):
    """Adapters of a single kind of layer, awake: what is scored is what was done, and both feel the adapters."""
    cfg = pi("pi0", "flow_sde", "expert", 1, frozen=False) if name == "pi0" else STRUCTURES["openvla"]
    policy = build(cfg)
    before = scored(policy, rolled_out(policy).replay)
    policy.cfg = replace(policy.cfg, is_lora=True, lora_rank=4, lora_targets=[target])
    policy.attach_adapters(0)
    with torch.no_grad():
        for layer in lora.adapted_layers(policy.net).values():
            layer.lora_B["default"].weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    out = rolled_out(policy)
    compare("adapted", scored(policy, out.replay), out)
    assert gap(before.values, out.values) > 1e-3


def test_frozen_parts_get_no_gradient(structure):
    out = rolled_out(structure)
    learned = gradients(structure, out.replay).keys()
    trainable = {name for name, _ in structure.trainable_parameters()}
    everything = {name for name, _ in structure.named_parameters()}
    assert learned <= trainable
    vlm = {name for name in everything if name.startswith(f"net.{VLM}")}
    if isinstance(structure.cfg, Pi) and structure.cfg.freeze_vlm:
        assert vlm
        assert trainable == learned == everything - vlm
    else:
        assert trainable == everything
        assert len(learned) > 0.9 * len(everything)


@pytest.mark.parametrize("critic", ["expert", "vlm"])
@pytest.mark.parametrize("cameras", [1, 2])
@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_absent_cameras_and_unused_prompt_slots_are_dropped(model, cameras, critic):
    """The published layout, three cameras (black and masked where absent) and all prompt slots, gives the same."""
    cfg = pi(model, "flow_sde", critic, cameras)
    cfg = replace(cfg, openpi=replace(cfg.openpi, value_vlm_mode="first_token"))
    full = build(cfg, compat="rlinf-0.4")
    short = build(cfg)
    long_out, out = rolled_out(full), rolled_out(short)
    assert long_out.cache["k"].shape[3] - out.cache["k"].shape[3] == (3 - cameras) * short.arch.image_tokens
    want = PolicyEval(
        long_out.logprobs, scored(full, long_out.replay).values, None
    )  # published rollouts average values
    compare("dropped", scored(short, out.replay), want)
    assert gap(chosen(out), chosen(long_out)) <= SAME


@pytest.mark.parametrize("name", [name for name, cfg in STRUCTURES.items() if cfg.spec().num_images < 3])
def test_cameras_that_are_not_read_are_not_seen(name):
    policy = build(STRUCTURES[name])
    obs, more = observation(policy.spec), torch.full((ROWS, 1, 30, 20, 3), 200, dtype=torch.uint8)
    extra = more if obs.wrist_images is None else torch.cat((obs.wrist_images, more), 1)
    out = policy.predict(replace(obs, wrist_images=extra), mode="train", noise=noise())
    assert torch.equal(out.logprobs, rolled_out(policy).logprobs)
    assert torch.equal(out.values, rolled_out(policy).values)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bf16(structure):
    """How far scoring is from sampling in bf16: printed, and small beside what the log-probs are about."""
    exact = rolled_out(structure)
    if isinstance(structure, PiPolicy):
        structure.net.apply_bf16_rule()
    else:
        structure.net.to(torch.bfloat16)
    packed.pack(structure.net)
    with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():  # some machines advertise bf16 they lack
        out = rolled_out(structure)
        again = scored(structure, out.replay)
    gaps = gap(again.logprobs, out.logprobs), gap(again.values, out.values)
    print(f"evaluate - predict: max |Δ log-prob| = {gaps[0]:.1e}, |Δ value| = {gaps[1]:.1e}")
    print(f"bf16 - fp32: value {gap(out.values, exact.values):.1e} of {float(exact.values.abs().max()):.1e}")
    assert gaps[0] <= 0.5
    assert gaps[1] <= 0.05
