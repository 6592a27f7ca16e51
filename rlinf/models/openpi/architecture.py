"""Sizes of the π0 / π0.5 network, torch-free: the published one and two of our own.

Letters: D model action columns (actions and state are zero-padded to it), H actions the network denoises at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlinf.models.files.adapters import Layer

VLM = "paligemma_with_expert.paligemma."  # names of everything `train_expert_only` freezes start with this
SMALL_VOCAB = 1000  # pieces of models/files/tokenizer_compact.model


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Every size of the network; any numbers work, the three named sizes are made by `Config.architecture`."""

    pi05: bool
    image_size: int
    patch_size: int
    vit_width: int
    vit_depth: int
    vit_mlp: int
    vit_heads: int
    vocab_size: int
    vlm_width: int
    vlm_mlp: int
    expert_width: int
    expert_mlp: int
    depth: int  # layers of the language model and of the expert, one to one
    num_heads: int
    num_kv_heads: int
    head_dim: int
    action_dim: int  # D
    action_horizon: int  # H
    max_token_len: int

    @property
    def image_tokens(self) -> int:
        """Tokens of one camera."""
        return (self.image_size // self.patch_size) ** 2

    def num_parameters(self) -> dict[str, int]:
        """Exact parameter counts by part, without the heads a policy adds."""
        v, m = self.vit_width, self.vit_mlp
        vit_layer = 4 * (v * v + v) + (v * m + m) + (m * v + v) + 4 * v
        patches = 3 * self.patch_size**2 * v + v + self.image_tokens * v
        w, e, q, kv = (
            self.vlm_width,
            self.expert_width,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        vlm_layer = 2 * w * q + 2 * w * kv + 3 * w * self.vlm_mlp + 2 * w
        norm = 3 * e * e + 3 * e if self.pi05 else e
        expert_layer = 2 * e * q + 2 * e * kv + 3 * e * self.expert_mlp + 2 * norm
        d = self.action_dim
        action = (d * e + e) + (e * d + d) + 2 * (e * e + e)
        if not self.pi05:
            action += (d * e + e) + e * e  # state_proj; action_time_mlp_in reads action and time side by side
        return {
            "vision": patches + self.vit_depth * vit_layer + 2 * v,
            "projector": v * w + w,
            "embedding": self.vocab_size * w,
            "language": self.depth * vlm_layer + w,
            "expert": self.depth * expert_layer + norm,
            "action": action,
        }

    def layers(self) -> Iterator[Layer]:
        """Every layer that LoRA can adapt, as the network names them."""
        v, w, e, d = self.vit_width, self.vlm_width, self.expert_width, self.action_dim
        vision = f"{VLM}model.vision_tower.vision_model"
        yield Layer(f"{vision}.embeddings.patch_embedding", 3 * self.patch_size**2, v, linear=False)
        for i in range(self.vit_depth):
            block = f"{vision}.encoder.layers.{i}"
            yield from (Layer(f"{block}.self_attn.{name}_proj", v, v) for name in ("q", "k", "v", "out"))
            yield Layer(f"{block}.mlp.fc1", v, self.vit_mlp)
            yield Layer(f"{block}.mlp.fc2", self.vit_mlp, v)
        yield Layer(f"{VLM}model.multi_modal_projector.linear", v, w)
        yield from self._gemma_layers(f"{VLM}model.language_model", w, self.vlm_mlp, adaptive=False)
        expert = "paligemma_with_expert.gemma_expert.model"
        yield from self._gemma_layers(expert, e, self.expert_mlp, adaptive=self.pi05)
        yield Layer("action_in_proj", d, e)
        yield Layer("action_out_proj", e, d)
        if self.pi05:
            yield from (Layer("time_mlp_in", e, e), Layer("time_mlp_out", e, e))
        else:
            yield from (Layer("state_proj", d, e), Layer("action_time_mlp_in", 2 * e, e))
            yield Layer("action_time_mlp_out", e, e)

    def _gemma_layers(self, prefix: str, width: int, hidden: int, *, adaptive: bool) -> Iterator[Layer]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for i in range(self.depth):
            block = f"{prefix}.layers.{i}"
            yield Layer(f"{block}.self_attn.q_proj", width, q)
            yield Layer(f"{block}.self_attn.k_proj", width, kv)
            yield Layer(f"{block}.self_attn.v_proj", width, kv)
            yield Layer(f"{block}.self_attn.o_proj", q, width)
            yield Layer(f"{block}.mlp.gate_proj", width, hidden)
            yield Layer(f"{block}.mlp.up_proj", width, hidden)
            yield Layer(f"{block}.mlp.down_proj", hidden, width)
            if adaptive:
                yield Layer(f"{block}.input_layernorm.dense", width, 3 * width)
                yield Layer(f"{block}.post_attention_layernorm.dense", width, 3 * width)
        if adaptive:
            yield Layer(f"{prefix}.norm.dense", width, 3 * width)


BASE = Architecture(
    pi05=False,
    image_size=224,
    patch_size=14,
    vit_width=1152,
    vit_depth=27,
    vit_mlp=4304,
    vit_heads=16,
    vocab_size=257152,
    vlm_width=2048,
    vlm_mlp=16384,
    expert_width=1024,
    expert_mlp=4096,
    depth=18,
    num_heads=8,
    num_kv_heads=1,
    head_dim=256,
    action_dim=32,
    action_horizon=50,
    max_token_len=48,
)
SMALL = replace(
    BASE,
    image_size=112,
    vit_width=384,
    vit_depth=6,
    vit_mlp=1536,
    vit_heads=6,
    vocab_size=SMALL_VOCAB,
    vlm_width=384,
    vlm_mlp=1024,
    expert_width=256,
    expert_mlp=768,
    depth=6,
    num_heads=6,
    head_dim=64,
)
COMPACT = replace(
    BASE,
    image_size=64,
    patch_size=16,
    vit_width=64,
    vit_depth=1,
    vit_mlp=128,
    vit_heads=4,
    vocab_size=SMALL_VOCAB,
    vlm_width=64,
    vlm_mlp=128,
    expert_width=64,
    expert_mlp=128,
    depth=2,
    num_heads=4,
    head_dim=16,
    action_dim=8,
)
SIZES = {"base": BASE, "small": SMALL, "compact": COMPACT}
