"""Values of the published recipes, and the guides, from the folder beside the golden vectors, where there is one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rlinf.config.compose import Tree, put

SHARED = Path(os.environ.get("RLINF_GOLDEN_DIR", Path(__file__).resolve().parents[2] / "shared/golden")).parent
RECIPES = SHARED / "spec/recipes.json"
GUIDES = SHARED / "seeds"
PLACEMENT = "cluster.component_placement."


def published_recipes() -> dict[str, dict[str, Any]]:
    """Name -> dotted key -> value, with nothing left to resolve; empty where the file is not at hand."""
    return json.loads(RECIPES.read_text()) if RECIPES.is_file() else {}


def nested(values: dict[str, Any]) -> Tree:
    """The tree of a published recipe, as its YAML file would have it."""
    tree: Tree = {}
    for key, value in values.items():
        if key.startswith(PLACEMENT):  # its keys are lists of components, which have no dots
            put(tree, PLACEMENT.rstrip("."), {key.removeprefix(PLACEMENT): value})
        else:
            put(tree, key, value)
    return tree


def guide(start: str) -> str:
    """The text of the guide whose first line starts so; empty where the guides are not at hand."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(GUIDES.glob("*.txt"))]
    return next((text for text in texts if text.lstrip().startswith(start)), "")
