"""The version of the package, for `rlinf --version`; pyproject.toml holds the same."""

from __future__ import annotations

__version__ = "0.1.0"
