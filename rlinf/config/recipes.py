"""The recipes by name: where they lie, and the sentence each begins with. Imports nothing that takes time."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"


def default_config_dir() -> Path:
    """examples/embodiment/config of the working folder, else the recipes of the installed package."""
    here = Path("examples/embodiment/config")
    return here.absolute() if here.is_dir() else RECIPES


def recipe_sentences(config_dir: Path) -> dict[str, str]:
    """Name -> the comment in the first line of its file; empty where there is none."""
    found = {}
    for file in sorted(config_dir.glob("*.yaml")):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        found[file.stem] = first.lstrip("# ") if first.startswith("#") else ""
    return found
