"""Memory that `compat: rlinf-0.4` needs beyond a model's own count; torch-free."""

from __future__ import annotations

from dataclasses import replace

from rlinf.models.config import ModelConfig
from rlinf.models.openpi.config import ALL_CAMERAS
from rlinf.models.openpi.config import Config as OpenPi


def cache_bytes_per_sample(model: ModelConfig, compat: str | None) -> int:
    """Bytes of one sample's row in the prefix cache: π as published also keeps the cameras that are absent."""
    if compat is not None and isinstance(model, OpenPi):
        model = replace(model, openpi=replace(model.openpi, num_images_in_input=ALL_CAMERAS))
    return model.cache_bytes_per_sample()
