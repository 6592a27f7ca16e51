"""openvla_oft_rlinf_official: the published OFT policy with state token, </s> and prompts packed to the left."""

from __future__ import annotations

import pytest
import torch
from prismatic_tiny_model import OFT
from prismatic_tiny_policy import greedy, scored, stored_inputs, tiny_policy, with_sampler
from safetensors.torch import load_file
from torch.nn import functional as F

from rlinf.models.openvla_oft.config import Config
from tests.weights import load_weights

EMPTY_TOKEN = 29871  # of Llama-2
SAMPLERS = {"greedy": (1.0, 0), "sampleT1.6": (1.6, -1)}  # temperature, top_k


def test_every_stored_number(golden_dir, tmp_path, max_delta):
    folder = golden_dir / "openvla_oft_rlinf_official"
    io = load_file(folder / "io.safetensors")
    assert {key.rsplit(".", 1)[0] for key in io if "." in key} == set(SAMPLERS)
    cfg = Config(
        implement_version="official",
        max_prompt_length=24,
        num_action_chunks=8,
        value_type="action_level",
        use_proprio=True,
        proprio_dim=7,
        statistics="q99",
    )
    head = folder / "value_head.safetensors"
    policy = tiny_policy(golden_dir, cfg, tmp_path, value_head=head)
    in_compat = tiny_policy(golden_dir, cfg, tmp_path, value_head=head, compat="rlinf-0.4")
    for each in (policy, in_compat):
        load_weights(each.net.proprio_projector, folder / "proprio_projector.safetensors")
    inputs = stored_inputs(io)
    for sampler, (temperature, top_k) in SAMPLERS.items():
        stored = {k.removeprefix(f"{sampler}."): v for k, v in io.items() if k.startswith(f"{sampler}.")}
        left = set(stored) - {"action_tokens"}

        def check(key, got, bound, sampler=sampler, stored=stored, left=left):
            left.discard(key)
            max_delta(f"{sampler} {key}", got, stored[key], bound)

        bins = stored["action_tokens"]  # relative ids here
        check("actions", policy.processor.decode_bins(bins), 1e-6)
        score = scored(with_sampler(policy, temperature=temperature, top_k=top_k), inputs, bins)
        check("prev_logprobs", score.logprobs.flatten(1), 5e-4)
        check("train_logprobs", score.logprobs.flatten(1), 5e-4)
        check("train_entropy", score.entropy.flatten(1), 5e-4)
        ours = score.values
        # The published critic counts from the end of the padded row, which is not the last prompt token: compat only.
        published = scored(with_sampler(in_compat, temperature=temperature, top_k=top_k), inputs, bins)
        check("prev_values", published.values, 5e-4)
        check("train_values", published.values, 5e-4)
        assert (published.values - ours).abs().max() > 1e-3
        max_delta("compat moves the value only", published.logprobs, score.logprobs, 2e-5)
        if sampler == "greedy":
            assert torch.equal(greedy(policy, inputs)["bins"], bins)
        assert not left, f"stored but not compared: {sorted(left)}"


@pytest.mark.parametrize("case", ["l1", "discrete", "discrete_proprio", "film"])
@torch.no_grad()
def test_the_policy_acts_like_the_first_oft_code(case, golden_dir, tmp_path, max_delta):
    """The stored actions of openvla_oft_official, two images, through our policy's own sequence."""
    io = load_file(golden_dir / OFT / "io.safetensors")
    cfg = Config(
        implement_version="official",
        action_head="l1" if case in ("l1", "film") else "tokens",
        use_film=case == "film",
        use_proprio=case != "discrete",
        num_images_in_input=2,
        num_action_chunks=8,
        statistics="q99",
    )
    policy = tiny_policy(golden_dir, cfg, tmp_path, value_head=None, side=True)
    ids = F.pad(io["input_ids"], (0, 1), value=EMPTY_TOKEN)
    inputs = stored_inputs(
        io | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "proprio": io["proprio"][None]}
    )
    out = greedy(policy, inputs if cfg.use_proprio else {k: v for k, v in inputs.items() if k != "state"})
    if cfg.regression is not None:
        max_delta(f"{case}.actions", policy.processor.decode_actions(out["actions"])[0], io[f"{case}.actions"], 1e-4)
    else:
        max_delta(f"{case}.actions", policy.processor.decode_bins(out["bins"])[0], io[f"{case}.actions"], 1e-6)
