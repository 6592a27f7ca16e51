"""docs/architecture.md names every folder of the package and only files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlinf"
BACK_ENDS = {"cpu/world.py", "gpu/environment.py", "gpu/batched_judge.py"}  # named below their simulator's folder
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def table_rows() -> list[tuple[list[Path], list[str]]]:
    """Folders of the first column and file names of the third, row by row, of the table of folders."""
    rows = []
    for line in PAGE.splitlines():
        if line.startswith("| `rlinf/"):
            _, folders, _, files, _ = line.split("|")
            named = re.findall(r"`([\w/]+\.py)`", files)
            rows.append(([ROOT / name for name in re.findall(r"`(rlinf/[\w/]+)/`", folders)], named))
    return rows


def test_every_folder_of_the_package_has_its_row_and_no_other() -> None:
    packages = {file.parent for file in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    documented = [folder for folders, _ in table_rows() for folder in folders]
    assert sorted(documented) == sorted(packages | {PACKAGE / "recipes"})


def test_every_file_of_a_row_lies_in_its_folder() -> None:
    wrong = [
        f"{folder.relative_to(ROOT)}: {name}"
        for folders, names in table_rows()
        for name in names
        for folder in folders
        if not any((place / name).is_file() for place in (folder, folder.parent))
        and not (name == "assets.py" and "simulators" in folder.parts)  # only where a simulator reads files
    ]
    assert wrong == []


def test_every_module_beside_the_folders_is_named() -> None:
    own = {f"rlinf/{file.name}" for file in PACKAGE.glob("*.py")} - {"rlinf/__main__.py"}
    assert own <= set(re.findall(r"`(rlinf/\w+\.py)`", PAGE))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:rlinf|tests|requirements|examples)/[\w/.]+)`", PAGE))))
def test_every_path_exists_unless_it_is_of_something_new(path: str) -> None:
    assert "foo" in path or (ROOT / path).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(\w+/\w+\.py)`", PAGE)) - BACK_ENDS))
def test_every_short_path_is_one_of_the_package(path: str) -> None:
    assert (PACKAGE / path).is_file() or (ROOT / path).is_file()
