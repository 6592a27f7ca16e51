"""Lines that are put into a study which is there (benchmarks/study.py --add)."""

from dataclasses import replace
from pathlib import Path

import pytest
from study import FLOW, NAME, NOISE_FOR, RECIPE, joined

from rlinf.results.study import Study, Trial, write_study

RECIPE_LINE = Trial("the recipe", [], [30, 128], [106, 128], 0.7, 24, 100.0)
LEVEL = Trial("noise level", [f"{FLOW}noise_level=0.5"], [30, 128], [109, 128], 0.8, 24, 100.0)
NEW = Trial(NOISE_FOR, [f"{FLOW}noise_per=chunk", f"{FLOW}noise_level=0.5"], [30, 128], [117, 128], 0.8, 24, 100.0)


def test_lines_stand_in_the_order_of_the_study_and_replace_their_own(tmp_path: Path) -> None:
    there = Study(NAME, RECIPE, "a note", "a command", "a CPU", "0123", (RECIPE_LINE, LEVEL))
    write_study(there, tmp_path)
    again = replace(RECIPE_LINE, after=[110, 128])
    assert joined([NEW, again], tmp_path) == replace(there, trials=(again, LEVEL, NEW))


def test_lines_of_another_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no study quickstart"):
        joined([NEW], tmp_path)
    write_study(Study(NAME, RECIPE, "a note", "a command", "a CPU", "0123", (RECIPE_LINE,)), tmp_path)
    with pytest.raises(SystemExit, match="began with another policy"):
        joined([replace(NEW, before=[40, 128])], tmp_path)
