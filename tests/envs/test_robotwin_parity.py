"""RoboTwin itself, where ROBOTWIN_PATH, ROBOTWIN_PYTHON and its assets are there: beside its own VectorEnv, and alone.

Everything runs in RoboTwin's interpreter, one process for each of the two, as both hold SAPIEN.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.robotwin_play import CASES

ROOT = Path(__file__).parents[2]
NEEDED = ("ROBOTWIN_PATH", "ROBOTWIN_PYTHON", "ASSETS_PATH")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(name not in os.environ for name in NEEDED), reason=f"{', '.join(NEEDED)} are not set"),
]


def play(*arguments: str) -> str:
    """Run tests/robotwin_play.py in RoboTwin's interpreter."""
    command = [os.environ["ROBOTWIN_PYTHON"], "tests/robotwin_play.py", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_chunks_are_those_of_vector_env(tmp_path: Path) -> None:
    names = ",".join(CASES)
    play("rlinf", names, str(tmp_path))
    play("vector", names, str(tmp_path))
    for case in CASES:
        with np.load(tmp_path / f"{case}_rlinf.npz") as ours, np.load(tmp_path / f"{case}_vector.npz") as theirs:
            off = np.abs(ours["states"] - theirs["states"]).max()
            print(f"{case}: {len(ours['success'])} chunks, states off by {off:.1e}")
            assert off < 1e-4
            assert ours["success"].tolist() == theirs["success"].tolist()
            assert ours["success"].any() == (case == "expert")
            assert str(ours["instruction"]) == str(theirs["instruction"])
            assert np.array_equal(ours["images"], theirs["images"])  # flickering light included
            for name, now in (("restored", ours["states"]), ("restored_image", ours["images"])):
                assert np.array_equal(ours[name], now[-1])  # get_state and set_state


def test_tasks_with_objects_reset_and_step(tmp_path: Path) -> None:
    for line in play("objects", "click_bell,place_empty_cup", str(tmp_path)).splitlines():
        if line.startswith("played "):
            told = json.loads(line.split(maxsplit=2)[2])
            assert told["moved"] > 0.05
            assert told["instruction"].endswith(".")


def test_pictures_do_not_change_by_what_is_not_drawn(tmp_path: Path) -> None:
    (line,) = [x for x in play("unseen", "stack_blocks_two", str(tmp_path)).splitlines() if x.startswith("drew ")]
    told = json.loads(line.removeprefix("drew "))
    print(told)
    assert told["pictures"] >= 10
    assert told["hidden"] > 0
    assert told["differ"] == 0


def test_memory_is_flat_over_200_resets(tmp_path: Path) -> None:
    (line,) = [x for x in play("resets", "200", str(tmp_path)).splitlines() if x.startswith("resident ")]
    after_20, after_200 = map(int, line.split()[1:])
    print(f"resident memory {after_20} MB after 20 resets, {after_200} MB after 200")
    assert after_200 < 1.1 * after_20
