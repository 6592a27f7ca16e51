"""What a checkpoint folder says beside its weights, in the published files: sizes and pixel statistics."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.models.files.column_statistics import read_json
from rlinf.models.files.policy_folder import check_model_type
from rlinf.models.prismatic.architecture import Architecture, Rgb

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"


def read_architecture(folder: Path, arch: Architecture) -> Architecture:
    """`arch` with the folder's norm epsilon and pixel statistics; sizes that differ are an error."""
    check_model_type(folder, "openvla", family_only=True)
    config = _object(folder / CONFIG)
    text, sizes = config.get("text_config") or {}, config.get("image_sizes")
    if not isinstance(text, dict):
        raise UserError(f"{folder / CONFIG}: text_config={str(text)[:60]} must be an object")
    epsilon = text.get("rms_norm_eps", arch.norm_eps)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float):
        raise UserError(f"{folder / CONFIG}: text_config.rms_norm_eps={str(epsilon)[:60]} must be a number")
    said = {key: text.get(key) for key in _text_sizes(arch)} | {"n_action_bins": config.get("n_action_bins")}
    said["image_sizes"] = sizes[0] if isinstance(sizes, list) and sizes else sizes
    ours = _text_sizes(arch) | {"n_action_bins": arch.num_bins, "image_sizes": arch.image_size}
    for key, value in said.items():
        if value is not None and value != ours[key]:
            raise UserError(
                f"{folder / CONFIG} says {key}={value}, this configuration needs {ours[key]}: another actor.model.size?"
            )
    (dino_mean, siglip_mean), (dino_std, siglip_std) = _pixel_statistics(folder / PREPROCESSOR, arch)
    return replace(
        arch,
        norm_eps=float(epsilon),
        dino=replace(arch.dino, mean=dino_mean, std=dino_std),
        siglip=replace(arch.siglip, mean=siglip_mean, std=siglip_std),
    )


def config_json(arch: Architecture) -> dict[str, Any]:
    """config.json in the published layout; norm_stats stay in dataset_statistics.json beside it."""
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "image_sizes": [arch.image_size] * 2,
        "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": True,
        "n_action_bins": arch.num_bins,
        "text_config": {"model_type": "llama", "rms_norm_eps": arch.norm_eps} | _text_sizes(arch),
        "architecture": asdict(arch),
    }


def preprocessor_json(arch: Architecture) -> dict[str, Any]:
    """preprocessor_config.json in the published layout."""
    towers = (arch.dino, arch.siglip)
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, arch.image_size, arch.image_size]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": [list(tower.mean) for tower in towers],
        "stds": [list(tower.std) for tower in towers],
        "use_fused_vision_backbone": True,
    }


def _text_sizes(arch: Architecture) -> dict[str, int]:
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "intermediate_size": arch.mlp,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.num_heads,
    }


def _pixel_statistics(path: Path, arch: Architecture) -> tuple[tuple[Rgb, Rgb], tuple[Rgb, Rgb]]:
    """Means and deviations of both towers, from the file where it has them."""
    content = _object(path)
    towers = (arch.dino, arch.siglip)
    found = []
    for key, own in (("means", [t.mean for t in towers]), ("stds", [t.std for t in towers])):
        rows = content.get(key, own)
        try:
            (a, b, c), (d, e, f) = ((float(x) for x in row) for row in rows)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: {key}={rows!r} must be three numbers for each of two towers") from error
        found.append(((a, b, c), (d, e, f)))
    return found[0], found[1]


def _object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
