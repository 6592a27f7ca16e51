"""Loading weights into any module, for tests; policies load by `load_pretrained` and `load_weights`."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from rlinf.models.files.weights import Rename, plain_state, prepare_load


def load_weights(
    module: nn.Module, source: Path, *, rename: Rename = lambda name: name, optional: tuple[str, ...] = ()
) -> set[str]:
    """Copy the tensors of a folder or file into `module`; returns the optional names that were not found."""
    load = prepare_load(plain_state(module), source, rename=rename, optional=optional)
    load.run()
    return load.missing
