"""RLinf: reinforcement-learning post-training for vision-language-action robot policies.

    import rlinf
    cfg = rlinf.load_config("quickstart", ["runner.max_steps=2"])
    result = rlinf.train(cfg)

Names are imported when they are first used: `import rlinf` loads neither torch nor a simulator.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rlinf.version import __version__

LEAST_PYTHON = (3, 11)  # requires-python of pyproject.toml
if sys.version_info < LEAST_PYTHON:  # before anything that an older one cannot read
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"rlinf needs Python 3.11 or newer; {sys.executable} is {found}")

if TYPE_CHECKING:
    from rlinf.api import (
        Comparison,
        Episode,
        Evaluation,
        LoadedPolicy,
        TrainResult,
        compare,
        evaluate,
        load_config,
        load_policy,
        make_env,
        train,
    )

__all__ = [
    "Comparison",
    "Episode",
    "Evaluation",
    "LoadedPolicy",
    "TrainResult",
    "__version__",
    "compare",
    "evaluate",
    "load_config",
    "load_policy",
    "make_env",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rlinf' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("rlinf.api"), name)


def __dir__() -> list[str]:
    return __all__
