"""docs/config.md decides per model whether a key has an effect."""

from __future__ import annotations

import re

import pytest

from rlinf.commands.key_reference import names_read, page
from rlinf.models.config import available_models


@pytest.mark.parametrize("model", available_models())
def test_statistics_key_is_read_by_token_policies_only(model: str) -> None:
    (section,) = re.findall(rf"^## `actor\.model` with `model_type: {model}`\n(.*?)(?=^##|\Z)", page(), re.M | re.S)
    (row,) = [line for line in section.splitlines() if line.startswith("| `unnorm_key`")]
    assert ("No effect" in row) == (model == "openpi")
    assert ("unnorm_key" in names_read(model)) == (model != "openpi")
    assert names_read(model) < names_read()
