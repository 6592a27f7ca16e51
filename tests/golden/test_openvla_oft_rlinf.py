"""openvla_oft_rlinf: the published OFT policy (`implement_version: rlinf`), three shapes, three samplers."""

from __future__ import annotations

import pytest
import torch
from prismatic_tiny_policy import greedy, scored, stored_inputs, tiny_policy, with_sampler
from safetensors.torch import load_file

from rlinf.models.openvla_oft.config import Config

CASES = {  # images, actions a chunk, value type
    "chunk1_action": (1, 1, "action_level"),
    "chunk4_action": (2, 4, "action_level"),
    "chunk4_chunk": (1, 4, "chunk_level"),
}
SAMPLERS = {"greedy": (1.0, 0), "sampleT1.6": (1.6, -1), "sampleT1k20": (1.0, 20)}  # temperature, top_k


def test_every_case_is_known(golden_dir):
    keys = load_file(golden_dir / "openvla_oft_rlinf" / "io.safetensors").keys()
    inputs = {f"{case}.{name}" for case in CASES for name in ("input_ids", "attention_mask", "pixel_values_lowres")}
    assert {key.rsplit(".", 1)[0] for key in keys - inputs} == {f"{c}.{s}" for c in CASES for s in SAMPLERS}


@pytest.mark.parametrize("case", CASES)
def test_every_stored_number(case, golden_dir, tmp_path, max_delta):
    folder = golden_dir / "openvla_oft_rlinf"
    io, (images, chunk, value_type) = load_file(folder / "io.safetensors"), CASES[case]
    cfg = Config(max_prompt_length=20, num_images_in_input=images, num_action_chunks=chunk, value_type=value_type)
    head = folder / f"value_head_{case}.safetensors"
    policy = tiny_policy(golden_dir, cfg, tmp_path, value_head=head)
    published = tiny_policy(golden_dir, cfg, tmp_path, value_head=head, compat="rlinf-0.4")
    inputs = stored_inputs(io, f"{case}.")
    for sampler, (temperature, top_k) in SAMPLERS.items():
        prefix = f"{case}.{sampler}."
        stored = {key.removeprefix(prefix): value for key, value in io.items() if key.startswith(prefix)}
        left = set(stored) - {"action_tokens"}

        def check(key, got, bound, stored=stored, left=left, prefix=prefix):
            left.discard(key)
            max_delta(f"{prefix}{key}", got, stored[key], bound)

        bins = (stored["action_tokens"] - policy.arch.action_begin).flatten(1)
        check("actions", policy.processor.decode_bins(bins), 1e-6)
        rollout = scored(with_sampler(policy, temperature=temperature, top_k=top_k), inputs, bins)
        check("prev_logprobs", rollout.logprobs.flatten(1), 5e-4)
        check("prev_values", rollout.values, 5e-4)
        # The published update ranks the whole vocabulary for top-k: compat only.
        update = scored(with_sampler(published, temperature=temperature, top_k=top_k), inputs, bins)
        check("train_logprobs", update.logprobs.flatten(1), 5e-4)
        check("train_values", update.values, 5e-4)
        check("train_entropy", update.entropy.flatten(1), 5e-4)
        if sampler == "greedy":
            assert torch.equal(greedy(policy, inputs)["bins"], bins)
        assert not left, f"stored but not compared: {sorted(left)}"
