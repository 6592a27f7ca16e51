"""Sizes of the π0 / π0.5 network, torch-free: `base` (published), `small`, `light`, `compact`; every layer by name.

Letters: D model action columns (actions and state are zero-padded to it), H actions the network denoises at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlinf.models.nn.sizes import Layer

VLM = "paligemma_with_expert.paligemma."  # names of everything `train_expert_only` freezes start with this
SMALL_VOCAB = 1000  # pieces of models/files/tokenizer_compact.model
_VISION = f"{VLM}model.vision_tower.vision_model"
_PROJECTOR = f"{VLM}model.multi_modal_projector"
_LANGUAGE = f"{VLM}model.language_model"
_EXPERT = "paligemma_with_expert.gemma_expert.model"
_PARTS = {_VISION: "vision", _PROJECTOR: "projector", _LANGUAGE: "language", _EXPERT: "expert"}  # the rest: action


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Every size of the network; any numbers work, the named sizes are made by `Config.architecture`."""

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
        norms = 2 * self.depth + 1  # of a Gemma
        counts = {
            "vision": (self.image_tokens + 2 * (2 * self.vit_depth + 1)) * self.vit_width,  # positions and norms
            "projector": 0,
            "embedding": self.vocab_size * self.vlm_width,
            "language": norms * self.vlm_width,
            "expert": 0 if self.pi05 else norms * self.expert_width,  # adaptive norms are layers
            "action": 0,
        }
        for layer in self.layers():
            part = next((part for name, part in _PARTS.items() if layer.name.startswith(name)), "action")
            counts[part] += layer.num_parameters
        return counts

    def layers(self) -> Iterator[Layer]:
        """Every linear layer and convolution, as the network names them."""
        v, w, e, d = self.vit_width, self.vlm_width, self.expert_width, self.action_dim
        yield Layer(f"{_VISION}.embeddings.patch_embedding", 3 * self.patch_size**2, v, bias=True, linear=False)
        for i in range(self.vit_depth):
            block = f"{_VISION}.encoder.layers.{i}"
            yield from (Layer(f"{block}.self_attn.{name}_proj", v, v, True) for name in ("q", "k", "v", "out"))
            yield Layer(f"{block}.mlp.fc1", v, self.vit_mlp, True)
            yield Layer(f"{block}.mlp.fc2", self.vit_mlp, v, True)
        yield Layer(f"{_PROJECTOR}.linear", v, w, True)
        yield from self._gemma_layers(_LANGUAGE, w, self.vlm_mlp, adaptive=False)
        yield from self._gemma_layers(_EXPERT, e, self.expert_mlp, adaptive=self.pi05)
        yield Layer("action_in_proj", d, e, True)
        yield Layer("action_out_proj", e, d, True)
        if self.pi05:
            yield from (Layer("time_mlp_in", e, e, True), Layer("time_mlp_out", e, e, True))
        else:  # action_time_mlp_in reads action and time side by side
            yield from (Layer("state_proj", d, e, True), Layer("action_time_mlp_in", 2 * e, e, True))
            yield Layer("action_time_mlp_out", e, e, True)

    def _gemma_layers(self, prefix: str, width: int, hidden: int, *, adaptive: bool) -> Iterator[Layer]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for i in range(self.depth):
            block = f"{prefix}.layers.{i}"
            yield Layer(f"{block}.self_attn.q_proj", width, q)
            yield from (Layer(f"{block}.self_attn.{name}_proj", width, kv) for name in "kv")
            yield Layer(f"{block}.self_attn.o_proj", q, width)
            yield from (Layer(f"{block}.mlp.{name}_proj", width, hidden) for name in ("gate", "up"))
            yield Layer(f"{block}.mlp.down_proj", hidden, width)
            norms = ("input_layernorm", "post_attention_layernorm") if adaptive else ()
            yield from (Layer(f"{block}.{norm}.dense", width, 3 * width, True) for norm in norms)
        if adaptive:
            yield Layer(f"{prefix}.norm.dense", width, 3 * width, True)


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
LIGHT = replace(
    SMALL,
    vit_width=256,
    vit_depth=4,
    vit_mlp=768,
    vit_heads=4,
    vlm_width=256,
    vlm_mlp=768,
    expert_width=192,
    expert_mlp=576,
    depth=4,
    num_heads=4,
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
SIZES = {"base": BASE, "small": SMALL, "light": LIGHT, "compact": COMPACT}
