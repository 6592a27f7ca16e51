"""pi0_tiny, pi05_tiny: every stored activation of the published network, reproduced."""

from __future__ import annotations

import json

import pytest
import torch
from pi_tiny_model import architecture, tiny_inputs, tiny_policy, tiny_prefix

from rlinf.models.files.tokenizers import BUNDLED
from rlinf.models.openpi.model import PiNet, positions, time_embedding, visible
from rlinf.models.openpi.sampler import Sampler

INPUTS = {
    "images",
    "image_valid",
    "tokenized_prompt",
    "tokenized_prompt_mask",
    "state",
    "noise",
    "actions",
    "x_t",
    "time",
}


@pytest.fixture(scope="module", params=[False, True], ids=["pi0", "pi05"])
def tiny(request, golden_dir, small_vocab_tokenizer):
    io = tiny_inputs(golden_dir, request.param)
    net = tiny_policy(golden_dir, pi05=request.param, tokenizer_file=small_vocab_tokenizer).net
    return net, io


@torch.no_grad()
def test_every_stored_tensor(tiny, max_delta):
    net, io = tiny
    arch = net.arch
    left = {k for k in io if not k.startswith("image")} - INPUTS - {"bf16policy.v_t"}

    def check(key, got, bound, *, relative=False):
        left.discard(key)
        max_delta(key, got, io[key], bound, relative=relative)

    images = net.embed_images(io["images"])
    check("prefix.image0_tokens", images[:, : arch.image_tokens], 2e-4)
    check("prefix.lang_tokens", net.embed_prompt(io["tokenized_prompt"]), 2e-4)
    prefix = tiny_prefix(net, io, full_mask=True)
    check("prefix.pad_masks", prefix.valid, 0)
    check("prefix.att_masks", torch.zeros_like(prefix.valid), 0)  # one block: no token starts a new one
    check("prefix.output", prefix.output, 2e-4)
    check("kv.layer0.k", prefix.kv[0].k, 2e-4)
    check("kv.layer2.v", prefix.kv[2].v, 2e-4)
    starts = torch.tensor(net.suffix_starts())
    valid = torch.cat((prefix.valid, torch.ones(2, len(starts), dtype=torch.bool)), 1)
    check("suffix.att_masks", starts.expand(2, -1), 0)
    check("suffix.pad_masks", valid[:, -len(starts) :], 0)
    p = prefix.valid.shape[1]
    rows = [0, 300, 700, p - 1, p, p + 1, p + len(starts) - 1]
    joint = torch.cat((torch.zeros(p, dtype=torch.long), starts))
    check("att_2d_rows", visible(valid, joint)[:, rows], 0)
    check("position_ids", positions(valid), 0)
    check("time_embedding", time_embedding(io["time"], arch.expert_width), 2e-4)
    times = net.times(io["time"])
    check("suffix.embs", net.embed_suffix(io["state"], io["x_t"], times.embedding), 2e-4)
    if arch.pi05:
        check("suffix.adarms_cond", net.time_condition(times.embedding), 2e-4)
    prefix = tiny_prefix(net, io)
    velocity = net.velocity(net.suffix(prefix, io["state"], io["x_t"], net.times(io["time"])))
    check("v_t", velocity, 2e-4)
    t = io["time"][:, None, None]
    noisy = t * io["noise"] + (1 - t) * io["actions"]
    velocity = net.velocity(net.suffix(prefix, io["state"], noisy, net.times(io["time"])))
    check("train.loss_elementwise", (io["noise"] - io["actions"] - velocity) ** 2, 2e-4, relative=True)
    for steps in (4, 10):
        check(f"sampled_actions_{steps}", Sampler(net, "flow_ode", steps).end(prefix, io["state"], io["noise"]), 3e-3)
    assert not left, f"stored but not compared: {sorted(left)}"


@torch.no_grad()
def test_dropping_masked_cameras_and_padding_changes_nothing(tiny, max_delta):
    net, io = tiny
    full = tiny_prefix(net, io)
    rows = torch.tensor([0])
    cameras, length = io["image_valid"][0], int(io["tokenized_prompt_mask"][0].sum())
    short = net.prefix(io["images"][rows][:, cameras], io["tokenized_prompt"][rows, :length], None)
    times = net.times(io["time"])
    want = net.velocity(net.suffix(full, io["state"], io["x_t"], times))[rows]
    got = net.velocity(net.suffix(short, io["state"][rows], io["x_t"][rows], times.at(rows)))
    print(f"prefix tokens {full.kv[0].k.shape[2]} -> {short.kv[0].k.shape[2]}")
    max_delta("v_t trimmed", got, want, 2e-5)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@torch.no_grad()
def test_bf16_rule(tiny, golden_dir, max_delta):
    net, io = tiny
    stored = json.loads(
        (golden_dir / f"{'pi05' if net.arch.pi05 else 'pi0'}_tiny" / "bf16_policy_dtypes.json").read_text()
    )
    half = PiNet(architecture(net.arch.pi05))
    half.load_state_dict(net.state_dict())
    half.apply_bf16_rule()
    ours = {name: str(t.dtype) for name, t in half.state_dict().items()}
    assert ours == {name: dtype for name, dtype in stored.items() if "lm_head" not in name}
    with torch.backends.mkldnn.flags(enabled=False):  # virtual machines may advertise bf16 instructions they lack
        prefix = tiny_prefix(half, io)
        got = half.velocity(half.suffix(prefix, io["state"], io["x_t"], half.times(io["time"])))
    assert got.dtype == torch.float32
    rms = (io["bf16policy.v_t"] - io["v_t"]).square().mean().sqrt()
    ours_rms = (got - io["v_t"]).square().mean().sqrt()
    print(f"rms error of bf16: stored {rms:.3f}, ours {ours_rms:.3f}")
    assert ours_rms < 2 * rms


def test_bundled_tokenizer_does_not_fit_a_smaller_vocabulary(golden_dir):
    with pytest.raises(ValueError, match="1000 pieces, the model embeds 320"):
        tiny_policy(golden_dir, pi05=False, tokenizer_file=BUNDLED)
