"""`rlinf seeds`: which seeds are found, what the file says, and what is never overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf.commands.seeds import env_block, find_seeds
from rlinf.envs.spec import env_spec
from rlinf.errors import UserError
from rlinf.simulators.robotwin.assets import asset_hash
from tests.robotwin_double import write_double

FIRST = 100_100_000


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("ROBOTWIN_PATH", "ASSETS_PATH", "ROBOTWIN_PYTHON", "ROBOT_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    double = write_double(tmp_path / "double", {FIRST: "unstable", FIRST + 2: "die"})
    return [
        f"init_params.robotwin_path={double}",
        "env.train.init_params.render=fast",
        "task_config.embodiment=[piper, piper, 0.6]",
        "num_processes=2",
    ]


def test_seeds_that_the_expert_solves_are_found_and_used(tmp_path: Path, settings: list[str]) -> None:
    cfg, output, said = env_block("robotwin", "stack_blocks_two", settings), tmp_path / "seeds.json", []
    found = find_seeds(cfg, splits=("eval",), count=3, output=output, on_progress=said.append)
    assert found == {"eval": [FIRST + 1, FIRST + 3, FIRST + 4]}  # the first is unstable, the third kills its process
    assert said == ["eval: 3 seeds solved of 6 tried"]
    written = json.loads(output.read_text())
    assert written["assets"] == asset_hash((tmp_path / "double").resolve())
    assert written["tasks"]["stack_blocks_two"]["seeds"] == found["eval"]
    again = env_block("robotwin", "stack_blocks_two", [*settings, f"seeds_path={output}"])
    assert env_spec(again).reset_ids["eval"] == found["eval"]
    with pytest.raises(UserError, match="has seeds of stack_blocks_two"):
        find_seeds(cfg, splits=("eval",), count=1, output=output)
    bell = env_block("robotwin", "click_bell", settings)
    find_seeds(bell, splits=("train",), count=1, output=output, on_progress=said.append)
    assert list(json.loads(output.read_text())["tasks"]) == ["stack_blocks_two", "click_bell"]


def test_what_is_refused_before_anything_starts(tmp_path: Path, settings: list[str]) -> None:
    with pytest.raises(UserError, match="'metaworld' has no seeds to look for; these have: robotwin"):
        env_block("metaworld", "reach-v3", [])
    with pytest.raises(UserError, match="must be KEY=VALUE"):
        env_block("robotwin", "click_bell", ["python"])
    with pytest.raises(UserError, match="not supported"):
        env_spec(env_block("robotwin", "open_laptop", []))
    mine = tmp_path / "notes.json"
    mine.write_text("{}")
    with pytest.raises(UserError, match="is there and is no file of seeds"):
        find_seeds(env_block("robotwin", "click_bell", settings), splits=("eval",), count=1, output=mine)
    assert mine.read_text() == "{}"
