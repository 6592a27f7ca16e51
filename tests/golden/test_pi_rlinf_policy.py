"""pi_rlinf_policy: rollouts with stored noises, log-probs, entropies and values of the published RL policy."""

from __future__ import annotations

import json

import torch
from pi_tiny_model import tiny_inputs, tiny_policy, tiny_prefix
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import ModuleDict

from rlinf.models.openpi import flow
from tests.weights import load_weights

OPTIONS = {"noise_method", "noise_level", "joint_logprob", "ignore_last", "chunk_critic_input", "value_after_vlm"}
OPTIONS |= {"value_vlm_mode", "noise_logvar_range"}


@torch.no_grad()
def test_every_stored_case(golden_dir, small_vocab_tokenizer, max_delta):
    cases = sorted(p.stem for p in (golden_dir / "pi_rlinf_policy").glob("pi*.safetensors"))
    assert cases
    for case in cases:
        check_case(case, golden_dir, small_vocab_tokenizer, max_delta)


def check_case(case, golden_dir, small_vocab_tokenizer, max_delta):
    folder = golden_dir / "pi_rlinf_policy"
    io = load_file(folder / f"{case}.safetensors")
    with safe_open(folder / f"{case}.safetensors", "pt") as file:
        stored = json.loads(file.metadata()["config"])
    pi05 = stored["pi05"]
    options = {key: value for key, value in stored.items() if key in OPTIONS}
    # The published values (mean over steps at rollout, pooling over padding) are the compat behaviour.
    policy = tiny_policy(golden_dir, pi05=pi05, tokenizer_file=small_vocab_tokenizer, compat="rlinf-0.4", **options)
    head = ModuleDict({"value_head": policy.value_head})
    load_weights(head, folder / f"value_head_in{64 if pi05 else 32}.safetensors")
    if policy.noise_head is not None:
        load_weights(ModuleDict({"noise_head": policy.noise_head}), folder / "noise_head.safetensors")

    obs = tiny_inputs(golden_dir, pi05)
    state, prefix = obs["state"], tiny_prefix(policy.net, obs, full_mask=True)
    pooled, sampler = policy.pool(prefix), policy.sampler()
    left = set(io) - {"rollout_noises", "eval.noise"}
    left -= {"eval.prev_logprobs"}  # nobody scores the deterministic path

    def check(key, got, bound):
        left.discard(key)
        max_delta(f"{case} {key}", got, io[key], bound)

    # Rollout with the stored noises, in draw order.
    noises, steps = io["rollout_noises"], sampler.num_steps
    index = None if sampler.joint else io["denoise_inds"][:, 0]
    chain = sampler.sample(prefix, state, noises[0], lambda i: noises[1 + i], index)
    check("chains", chain.x, 3e-3)
    check("actions", chain.x[:, -1], 3e-3)
    check("prev_logprobs", policy.executed(sampler.logprobs(chain, index)), 5e-4)
    check("prev_values", policy.critic(chain.features, pooled, None), 5e-4)
    check("denoise_inds", torch.arange(steps).expand(2, -1) if index is None else index[:, None].expand(-1, steps), 0)
    check("timesteps", flow.timesteps(steps), 1e-6)

    # Recompute from the stored chain.
    rows = torch.arange(2)
    x = io["chains"] if index is None else io["chains"][rows[:, None], torch.stack((index, index + 1), 1)]
    score = sampler.score(prefix, state, x, index)
    check("train_logprobs", policy.executed(score.logprobs), 5e-4)
    check("train_entropy", policy.executed(score.entropy).mean((1, 2))[:, None], 5e-4)
    check("train_values", policy.critic(score.features, pooled, None)[:, 0], 5e-4)
    left -= {"raw_logprob", "raw_entropy", "raw_value"}
    max_delta(f"{case} raw_logprob", score.logprobs, io["raw_logprob"].mean(1), 5e-4)
    max_delta(f"{case} raw_entropy", score.entropy, io["raw_entropy"].mean(1), 5e-4)
    values = policy.critic(score.features, pooled, None)
    max_delta(f"{case} raw_value", values, io["raw_value"].mean(1, keepdim=True), 5e-4)

    # Every step of the stored chain.
    times = sampler.times(state.device)
    found = [sampler.transition(prefix, state, io["chains"][:, i], slice(i, i + 1), times) for i in range(steps)]
    check("step_mean", torch.stack([s.mean for s in found], 1), 2e-4)
    check("step_std", torch.stack([s.std for s in found], 1), 2e-4)
    check("step_v", torch.stack([s.velocity for s in found], 1), 2e-4)
    if pi05:  # the VLM's value does not depend on the step; upstream stores zeros here
        check("step_value", torch.zeros(2, steps), 0)
    else:
        check("step_value", torch.cat([policy.critic(s.features[:, None], None, None) for s in found], 1), 5e-4)

    # Deterministic evaluation.
    check("eval.actions", sampler.end(prefix, state, io["eval.noise"]), 3e-3)
    features = sampler.ode(prefix, state, io["eval.noise"]).features
    check("eval.prev_values", policy.critic(features, pooled, None), 5e-4)
    assert not left, f"stored but not compared: {sorted(left)}"
