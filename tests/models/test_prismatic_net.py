"""The OpenVLA network against itself: cached against whole, batched against single, counted against allocated."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from rlinf.errors import UserError
from rlinf.models.files.weights import plain_state, prepare_load, save_weights
from rlinf.models.nn.packed import pack
from rlinf.models.nn.recompute import set_checkpointing
from rlinf.models.prismatic.architecture import COMPACT, SIZES, Parts
from rlinf.models.prismatic.model import PrismaticNet
from rlinf.models.prismatic.weights import SIDE, SIDE_PARTS, initialize, published_names, side_files

EXTRAS = {"proprio_dim": 5, "film": True, "regression": (3, 4)}


def make_net(**options) -> PrismaticNet:
    net = PrismaticNet(replace(COMPACT, dino=replace(COMPACT.dino, depth=3)), Parts(**options))
    initialize(net, torch.Generator().manual_seed(0))
    return net


@pytest.fixture(scope="module")
def net() -> PrismaticNet:
    return make_net()


def draw_images(b: int, n: int, seed: int = 0) -> torch.Tensor:
    size = (b, n, COMPACT.image_size, COMPACT.image_size, 3)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def draw_rows(b: int, s: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings [B, S, W], their validity (BOS first, then pads), positions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, s, COMPACT.width, generator=generator)
    valid = torch.ones(b, s, dtype=torch.bool)
    for row in range(b):
        valid[row, 1 : 1 + 2 * row] = False
    return x, valid, valid.cumsum(1) - 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_cached_decoding_equals_one_whole_pass(padded, packed, max_delta):
    net = make_net()
    if packed:
        pack(net)
    b, s, more = 3, 19, 6
    ids = torch.randint(0, COMPACT.vocab_size, (b, more), generator=torch.Generator().manual_seed(1))
    x, valid, _ = draw_rows(b, s)
    every = torch.cat((valid, torch.ones(b, more, dtype=torch.bool)), 1) if padded else None
    positions = torch.arange(s + more).expand(b, -1) if every is None else every.cumsum(1) - 1
    whole = net.hidden(torch.cat((x, net.embed_tokens(ids)), 1), positions, every, causal=True)
    cache = net.new_cache(b, s + more)
    for _ in range(2):  # a used cache starts afresh
        start = net.hidden(x, positions[:, :s], valid if padded else None, causal=True, cache=cache)
        steps = [net.decode(ids[:, i], positions[:, s + i], cache, s + i) for i in range(more)]
        keep = valid if padded else torch.ones_like(valid)
        max_delta("prefill", start[keep], whole[:, :s][keep], 2e-5)
        max_delta("decode", torch.stack(steps, 1), whole[:, s:], 2e-5)


def test_a_decoding_step_never_waits_for_its_numbers():
    """On the meta device every read of a value fails: what runs there can be recorded as a CUDA graph."""
    with torch.device("meta"):
        net = PrismaticNet(COMPACT)
        cache = net.new_cache(2, 13)
        out = net.decode(torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long), cache, 9)
    assert out.shape == (2, COMPACT.width)


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_padding_and_batch_order_change_nothing(net, causal, max_delta):
    x, valid, positions = draw_rows(4, 21)
    out = net.hidden(x, positions, valid, causal=causal)
    order = torch.tensor([2, 0, 3, 1])
    max_delta("order", net.hidden(x[order], positions[order], valid[order], causal=causal), out[order], 2e-5)
    for row in range(4):
        keep = valid[row]
        alone = net.hidden(x[row : row + 1, keep], torch.arange(int(keep.sum()))[None], None, causal=causal)
        max_delta(f"row {row} without its pads", alone[0], out[row, keep], 2e-5)


@torch.no_grad()
def test_no_token_sees_a_later_one_unless_told(net):
    x, _, _ = draw_rows(1, 9)
    changed = x.clone()
    changed[:, -1] += 1.0
    positions = torch.arange(9)[None]
    for causal in (True, False):
        a, b = (net.hidden(y, positions, None, causal=causal) for y in (x, changed))
        assert torch.equal(a[:, :-1], b[:, :-1]) == causal


@torch.no_grad()
def test_cameras_in_one_pass_equal_one_by_one(max_delta):
    net = make_net(film=True)
    images = draw_images(2, 3)
    language = torch.randn(2, COMPACT.width, generator=torch.Generator().manual_seed(2))
    together = net.embed_images(images, language)
    t = COMPACT.image_tokens
    assert together.shape == (2, 3 * t, COMPACT.width)
    for camera in range(3):
        alone = net.embed_images(images[:, camera : camera + 1], language)
        max_delta(f"camera {camera}", together[:, camera * t : (camera + 1) * t], alone, 2e-5)
    assert not torch.allclose(together, net.embed_images(images, language + 1.0), atol=1e-3)


@torch.no_grad()
def test_bytes_are_normalised_for_each_tower(net, max_delta):
    images = draw_images(2, 1)
    pixels = images.permute(0, 1, 4, 2, 3).double() / 255.0
    parts = []
    for tower in (COMPACT.dino, COMPACT.siglip):
        mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (tower.mean, tower.std))
        parts.append((pixels - mean) / std)
    given = torch.cat(parts, 2).float()  # [B, n, 6, S, S]
    max_delta("embed_images", net.embed_images(images), net.embed_images(given), 2e-5)


def test_checkpointing_gives_the_same_gradients(max_delta):
    net = make_net(**EXTRAS)

    def gradients() -> dict[str, torch.Tensor]:
        net.zero_grad()
        ids = torch.arange(6).expand(2, -1)
        tokens = net.embed_tokens(ids)
        parts = (tokens, net.embed_images(draw_images(2, 2), tokens.mean(1)), net.embed_proprio(torch.ones(2, 5)))
        x = torch.cat(parts, 1)
        positions = torch.arange(x.shape[1]).expand(2, -1)
        hidden = net.hidden(x, positions, None, causal=False)[:, :12]
        (net.regress(hidden).square().sum() + net.action_logits(hidden).logsumexp(-1).sum()).backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    kept = gradients()
    set_checkpointing(net, True)
    assert net.language_model.model.checkpointing
    assert net.vision_backbone.featurizer.checkpointing
    again = gradients()
    assert all(float(g.abs().max()) > 0 for g in kept.values())
    for name in ("vision_backbone.featurizer.patch_embed.proj.weight", "language_model.model.embed_tokens.weight"):
        max_delta(name, again[name], kept[name], 1e-6)
    assert all(torch.allclose(again[name], g, atol=1e-6) for name, g in kept.items())


@torch.no_grad()
def test_action_logits_are_the_rows_of_the_bins(net, max_delta):
    hidden = torch.randn(2, 5, COMPACT.width, generator=torch.Generator().manual_seed(3))
    whole = net.language_model.lm_head(hidden)
    max_delta("logits", net.action_logits(hidden), whole[..., COMPACT.action_end - 256 : COMPACT.action_end], 1e-6)


@torch.no_grad()
def test_a_random_network_prefers_no_bin_and_knows_their_order(net):
    rows = net.language_model.lm_head.weight[COMPACT.action_begin : COMPACT.action_end]
    unit = torch.nn.functional.normalize(rows, dim=-1)
    alike = (unit @ unit.T).abs()
    assert float(alike.diagonal(1).min()) > 0.95  # neighbours
    assert float(alike.diagonal(64).mean()) < 0.5
    hidden = torch.randn(64, COMPACT.width, generator=torch.Generator().manual_seed(4))
    entropy = torch.distributions.Categorical(logits=net.action_logits(hidden)).entropy()
    print(f"entropy {float(entropy.mean()):.3f} of {math.log(256):.3f}")
    assert float(entropy.mean()) > 5.3


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@torch.no_grad()
def test_bf16_keeps_logits_and_pixels_precise(net):
    half = PrismaticNet(net.arch)
    half.load_state_dict(net.state_dict())
    half.to(torch.bfloat16)
    images, ids = draw_images(2, 1), torch.arange(8).expand(2, -1)
    outputs = []
    with torch.backends.mkldnn.flags(enabled=False):  # virtual machines may advertise bf16 instructions they lack
        for n in (net, half):
            x = torch.cat((n.embed_tokens(ids), n.embed_images(images)), 1)
            hidden = n.hidden(x, torch.arange(x.shape[1]).expand(2, -1), None, causal=True)
            outputs.append((hidden, n.action_logits(hidden)))
    (hidden, logits), (rough, rough_logits) = outputs
    assert (rough.dtype, rough_logits.dtype) == (torch.bfloat16, torch.float32)
    error = float((rough.float() - hidden).square().mean().sqrt() / hidden.square().mean().sqrt())
    print(f"relative rms error of bf16: hidden {error:.4f}, logits {float((rough_logits - logits).abs().max()):.4f}")
    assert error < 0.02


@pytest.mark.parametrize("options", [{}, EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_counted_exactly(size, options):
    with torch.device("meta"):
        net = PrismaticNet(SIZES[size], Parts(**options))
    counts = SIZES[size].num_parameters(Parts(**options))
    assert sum(counts.values()) == sum(p.numel() for p in net.parameters())
    vision = sum(
        p.numel() for n, p in net.vision_backbone.named_parameters() if ".scale." not in n and ".shift." not in n
    )
    language = sum(p.numel() for n, p in net.language_model.named_parameters() if "embed" not in n)
    assert (counts["vision"], counts["language"]) == (vision, language)
    print(size, counts)


def test_named_sizes_keep_their_promises():
    totals = {size: sum(arch.num_parameters().values()) for size, arch in SIZES.items()}
    assert totals["compact"] < 600_000
    assert 30_000_000 < totals["small"] < 60_000_000
    assert 5_000_000 < totals["light"] < 12_000_000
    assert totals["base"] == 7_498_156_704
    for arch in SIZES.values():
        assert arch.action_end <= arch.vocab_size
        assert arch.image_size % arch.patch_size == 0


def published_film_name(name: str) -> str:
    """A tensor of the backbone as a FiLM run's own file names it."""
    wrapped = re.sub(r"(blocks\.\d+\.)(?!scale\.|shift\.)", r"\1block.", name)
    return f"module.vision_backbone.{wrapped}"


def test_side_files_load_under_their_published_names(tmp_path):
    source = make_net(**EXTRAS)
    state = source.state_dict()
    side = ("action_head.", "proprio_projector.")
    main = {n: t for n, t in state.items() if not n.startswith(side) and ".scale." not in n and ".shift." not in n}
    main["vision_backbone.fused_featurizer.attn_pool.latent"] = torch.zeros(1, 1, 64)
    main["vision_backbone.featurizer.pos_embed"] = torch.zeros_like(state["vision_backbone.featurizer.pos_embed"])
    save_weights({f"module.{name}": tensor for name, tensor in main.items()}, tmp_path)
    net = make_net(**EXTRAS)
    for p in net.parameters():
        torch.nn.init.constant_(p, 7.0)

    def load() -> None:
        files = side_files(tmp_path)
        rename = published_names(net.arch, prefix="", side=files)
        side = [(file, f"{SIDE}{part}.") for part, file in files.items()]
        prepare_load(plain_state(net), tmp_path, rename=rename, side=side).run()

    with pytest.raises(UserError, match=r"lacks 32 tensors of this model: action_head"):
        load()
    for part in SIDE_PARTS:
        tensors = source.get_submodule(part).state_dict()
        name = published_film_name if part == "vision_backbone" else "module.{}".format
        last = {name(key): tensor for key, tensor in tensors.items()}
        torch.save({key: torch.zeros_like(t) for key, t in last.items()}, tmp_path / f"{part}--900_checkpoint.pt")
        torch.save(last, tmp_path / f"{part}--10000_checkpoint.pt")
    load()
    for key, want in state.items():
        assert torch.equal(net.state_dict()[key], want), key


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("module.language_model.lm_head.weight", "net.language_model.lm_head.weight"),
        ("base_model.model.projector.fc1.bias", "net.projector.fc1.bias"),
        ("vision_backbone.featurizer.blocks.1.ls2.gamma", "net.vision_backbone.featurizer.blocks.1.ls2.scale_factor"),
        ("vision_backbone.featurizer.norm.weight", None),
        ("vision_backbone.fused_featurizer.blocks.1.norm1.weight", None),  # the last of two
        ("vision_backbone.fused_featurizer.attn_pool.q.weight", None),
        ("language_model.model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("value_head.mlp.0.weight", "value_head.mlp.0.weight"),
        ("side.proprio_projector.module.fc1.weight", "net.proprio_projector.fc1.weight"),
    ],
)
def test_published_names(net, stored, ours):
    assert published_names(net.arch)(stored) == ours
