"""openvla_rlinf_policy: rollout and update numbers of the published OpenVLA policy, three samplers."""

from __future__ import annotations

import pytest
import torch
from prismatic_tiny_policy import greedy, scored, stored_inputs, tiny_policy, with_sampler
from safetensors.torch import load_file

from rlinf.models.openvla.config import Config

SAMPLERS = {"greedy": (1.0, 0), "sample_T1.0": (1.0, 0), "sample_T1.6_k50": (1.6, 50)}  # temperature, top_k


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_stored_number(sampler, golden_dir, tmp_path, max_delta):
    folder = golden_dir / "openvla_rlinf_policy"
    io = load_file(folder / "io.safetensors")
    assert {key.rsplit(".", 1)[0] for key in io if "." in key} == set(SAMPLERS)
    cfg = Config(max_prompt_length=20)
    head = folder / "value_head.safetensors"
    policy = tiny_policy(golden_dir, cfg, tmp_path, value_head=head)
    inputs, stored = stored_inputs(io), {k.removeprefix(f"{sampler}."): v for k, v in io.items() if sampler in k}
    bins = (stored["action_tokens"] - policy.arch.action_begin).flatten(1)
    temperature, top_k = SAMPLERS[sampler]
    left = set(stored) - {"action_tokens"}

    def check(key, got, bound):
        left.discard(key)
        max_delta(f"{sampler} {key}", got, stored[key], bound)

    check("actions", policy.processor.decode_bins(bins), 1e-6)
    rollout = scored(with_sampler(policy, temperature=temperature, top_k=top_k), inputs, bins)
    check("prev_logprobs", rollout.logprobs[:, 0], 5e-4)
    check("prev_values", rollout.values, 5e-4)
    # The published update ranks the whole vocabulary for top-k: compat only.
    published = tiny_policy(golden_dir, cfg, tmp_path, value_head=head, compat="rlinf-0.4")
    update = scored(with_sampler(published, temperature=temperature, top_k=top_k), inputs, bins)
    check("train_logprobs", update.logprobs[:, 0], 5e-4)
    check("train_values", update.values, 5e-4)
    check("train_entropy", update.entropy[:, 0], 5e-4)
    if sampler == "greedy":
        out = greedy(policy, inputs)
        assert torch.equal(out["bins"], bins)
        max_delta("greedy prev_logprobs, cached decode", out["logprobs"], stored["prev_logprobs"], 5e-4)
        max_delta("greedy prev_values, cached decode", out["values"], stored["prev_values"], 5e-4)
    assert not left, f"stored but not compared: {sorted(left)}"
