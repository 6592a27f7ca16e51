"""What one policy call must at least compute and move, from the sizes of its network; torch-free.

A call's floor is the sum over its phases of max(FLOPs / GEMM rate, bytes / bandwidth). FLOPs are those of matrix
products (multiply-adds x 2), bytes are the weights of a phase, read once per step, and the keys and values it writes or
reads; activations are assumed to stay on the chip. Heads of a critic are too small to count.

Letters: B rows, n cameras, T tokens a camera, P tokens of a prefix or sequence, H actions, S suffix tokens, N steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.models.config import ModelConfig
from rlinf.models.nn.sizes import Tower
from rlinf.models.openpi.architecture import Architecture as PiArchitecture
from rlinf.models.openpi.config import Config as PiConfig
from rlinf.models.openvla.config import Config as OpenVlaConfig
from rlinf.models.prismatic.architecture import Architecture as PrismaticArchitecture
from rlinf.models.prismatic.base_config import PrismaticConfig

BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at most."""

    flops: float  # per second
    bandwidth: float  # bytes per second, reads and writes together


@dataclass(frozen=True)
class Phase:
    """A part of a call whose steps are alike."""

    name: str
    products: float  # FLOPs of products with weights
    attention: float  # FLOPs of scores and of mixing values
    weight_bytes: float
    cache_bytes: float = 0.0  # keys and values written or read

    @property
    def flops(self) -> float:
        return self.products + self.attention

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor of this phase."""
        moved = (self.weight_bytes + self.cache_bytes) / ceilings.bandwidth
        return max(self.flops / ceilings.flops, moved)


def floor_seconds(phases: Sequence[Phase], ceilings: Ceilings) -> float:
    """The floor of a call."""
    return sum(phase.seconds(ceilings) for phase in phases)


def phases_of(cfg: ModelConfig, *, rows: int, prompt: int) -> list[Phase]:
    """The phases of `Policy.predict` for `rows` observations whose prompts have `prompt` tokens."""
    if isinstance(cfg, PiConfig):
        return pi_phases(
            cfg.architecture(),
            rows=rows,
            cameras=cfg.num_cameras,
            prompt=prompt,
            steps=cfg.denoise_steps,
            output=cfg.value_input == "vlm",
            precision=BYTES[cfg.stored_precision],
        )
    if isinstance(cfg, PrismaticConfig) and not cfg.parts().film and cfg.regression is None:
        return prismatic_phases(
            cfg.architecture(),
            rows=rows,
            cameras=cfg.num_images_in_input,
            prompt=prompt,
            tokens=cfg.num_tokens,
            one_by_one=isinstance(cfg, OpenVlaConfig),
            state=cfg.state_columns,
            stop=cfg.has_stop_token,
            precision=BYTES[cfg.stored_precision],
        )
    raise ValueError(f"no counts for {cfg.model_type} with FiLM or an L1 head")


# ---------------------------------------------------------------------- π0, π0.5
def pi_phases(
    arch: PiArchitecture, *, rows: int, cameras: int, prompt: int, steps: int, output: bool, precision: int = 2
) -> list[Phase]:
    """Vision, prefix, denoising (and π0.5's times, of all steps at once).

    Without `output` (nobody reads what the language model says) its last layer stops at keys and values.
    """
    tokens, inner, depth = arch.image_tokens, arch.num_heads * arch.head_dim, arch.depth
    prefix, suffix = cameras * tokens + prompt, arch.action_horizon + (not arch.pi05)
    read = depth if output else depth - 1  # language layers that are computed whole
    kept = rows * prefix * depth * 2 * arch.num_kv_heads * arch.head_dim * precision  # bytes of keys and values
    vision, language, expert = pi_vision_weights(arch), pi_language_weights(arch, output), pi_expert_weights(arch)
    action, time, state = action_weights(arch).values()
    once = 2 * rows * state + (2 * steps + arch.action_dim) * time  # the latter: see PiNet.noisy_tokens
    phases = [
        Phase(
            "vision",
            products=2 * rows * cameras * tokens * vision,
            attention=rows * cameras * arch.vit_depth * _attention(tokens, tokens, arch.vit_width),
            weight_bytes=vision * precision,
        ),
        Phase(
            "prefix",
            products=2 * rows * prefix * language,
            attention=rows * read * _attention(prefix, prefix, inner),
            weight_bytes=language * precision,
            cache_bytes=kept,
        ),
        Phase(
            "denoise",
            products=2 * steps * rows * (suffix * expert + arch.action_horizon * action) + once,
            attention=steps * rows * depth * _attention(suffix, prefix + suffix, inner),
            weight_bytes=steps * (expert * precision + 4 * action) + 4 * (time + state),  # projections are fp32
            cache_bytes=steps * kept,
        ),
    ]
    if arch.pi05:
        times = time_weights(arch)
        phases.append(Phase("times", products=2 * steps * times, attention=0.0, weight_bytes=4 * times))
    return phases


def pi_vision_weights(arch: PiArchitecture) -> int:
    """Matrix entries a patch meets, projector included."""
    patch = 3 * arch.patch_size**2 * arch.vit_width
    return patch + arch.vit_depth * _vit_block(arch.vit_width, arch.vit_mlp) + arch.vit_width * arch.vlm_width


def pi_language_weights(arch: PiArchitecture, output: bool) -> int:
    """Matrix entries a prefix token meets."""
    keys_values = 2 * arch.vlm_width * arch.num_kv_heads * arch.head_dim
    last = _gemma_layer(arch, arch.vlm_width, arch.vlm_mlp) if output else keys_values
    return (arch.depth - 1) * _gemma_layer(arch, arch.vlm_width, arch.vlm_mlp) + last


def pi_expert_weights(arch: PiArchitecture) -> int:
    """Matrix entries a suffix token meets, adaptive norms apart."""
    return arch.depth * _gemma_layer(arch, arch.expert_width, arch.expert_mlp)


def action_weights(arch: PiArchitecture) -> dict[str, int]:
    """Matrix entries every action meets at every step on its way in and out of the expert; others a call meets once.

    The latter are π0's: the layer that joins actions and times, and the one of the state.
    """
    width, columns = arch.expert_width, arch.action_dim
    if arch.pi05:
        return {"action": 2 * width * columns, "time": 0, "state": 0}
    return {"action": 2 * width * columns + width * width, "time": 2 * width * width, "state": width * columns}


def time_weights(arch: PiArchitecture) -> int:
    """π0.5: matrix entries a time meets: its MLP, and the modulation of every norm of the expert."""
    width = arch.expert_width
    return 2 * width**2 + (2 * arch.depth + 1) * 3 * width**2


def _gemma_layer(arch: PiArchitecture, width: int, hidden: int) -> int:
    heads = 2 * arch.num_heads + 2 * arch.num_kv_heads
    return width * heads * arch.head_dim + 3 * width * hidden


# ---------------------------------------------------------------------- OpenVLA, OpenVLA-OFT
def prismatic_phases(
    arch: PrismaticArchitecture,
    *,
    rows: int,
    cameras: int,
    prompt: int,
    tokens: int,
    one_by_one: bool,
    state: int = 0,
    stop: bool = False,
    precision: int = 2,
) -> list[Phase]:
    """Vision and, for `tokens` action tokens, a prefill and decoding steps (`one_by_one`) or one parallel pass."""
    images, width, depth = cameras * arch.image_tokens, arch.width, arch.depth
    length = prompt + images + (state > 0) + (0 if one_by_one else tokens + stop)
    layers, head = prismatic_language_weights(arch), arch.num_bins * width  # only rows of the bins are read
    readouts = 1 if one_by_one else tokens
    proprio = (state + width) * width if state else 0
    pairs = _attention(length, length, width) * ((length + 1) / (2 * length) if one_by_one else 1.0)  # a triangle
    towers = (arch.dino, arch.siglip)
    vision = Phase(
        "vision",
        products=2 * rows * cameras * prismatic_vision_products(arch),
        attention=rows * cameras * sum(t.blocks * _attention(*_tower_tokens(arch, t), t.width) for t in towers),
        weight_bytes=prismatic_vision_weights(arch) * precision,
    )
    kept = 2 * depth * width * precision  # bytes of one token's keys and values
    language = Phase(
        "prefill" if one_by_one else "parallel",
        products=2 * rows * (length * layers + readouts * head + proprio),
        attention=rows * depth * pairs,
        weight_bytes=(layers + head + proprio) * precision,
        cache_bytes=rows * length * kept if one_by_one else 0.0,
    )
    if not one_by_one:
        return [vision, language]
    seen = [length + i + 1 for i in range(tokens - 1)]  # the first token comes from the prefill
    decode = Phase(
        "decode",
        products=2 * rows * len(seen) * (layers + head),
        attention=rows * depth * sum(_attention(1, keys, width) for keys in seen),
        weight_bytes=len(seen) * (layers + head) * precision,
        cache_bytes=rows * sum(seen) * kept,
    )
    return [vision, language, decode]


def prismatic_language_weights(arch: PrismaticArchitecture) -> int:
    """Matrix entries a token meets, without the vocabulary."""
    return arch.depth * (4 * arch.width**2 + 3 * arch.width * arch.mlp)


def prismatic_vision_weights(arch: PrismaticArchitecture) -> int:
    """Matrix entries of both towers and the projector."""
    patch = 3 * arch.patch_size**2
    towers = (arch.dino, arch.siglip)
    return sum(patch * t.width + t.blocks * _vit_block(t.width, t.mlp) for t in towers) + _projector(arch)


def prismatic_vision_products(arch: PrismaticArchitecture) -> int:
    """Multiply-adds of one image: prefix tokens pass the blocks too, but neither patches nor projector."""
    total = arch.image_tokens * _projector(arch)
    for tower in (arch.dino, arch.siglip):
        total += arch.image_tokens * 3 * arch.patch_size**2 * tower.width
        total += (arch.image_tokens + tower.prefix_tokens) * tower.blocks * _vit_block(tower.width, tower.mlp)
    return total


def _projector(arch: PrismaticArchitecture) -> int:
    vision, width = arch.vision_width, arch.width
    return 4 * vision**2 + 4 * vision * width + width**2


def _tower_tokens(arch: PrismaticArchitecture, tower: Tower) -> tuple[int, int]:
    tokens = arch.image_tokens + tower.prefix_tokens
    return tokens, tokens


# ---------------------------------------------------------------------- shared
def _vit_block(width: int, hidden: int) -> int:
    return 4 * width**2 + 2 * width * hidden


def _attention(queries: int, keys: int, width: int) -> float:
    """FLOPs of scores and mixed values of one layer and row, `width` over all query heads."""
    return 4.0 * queries * keys * width
