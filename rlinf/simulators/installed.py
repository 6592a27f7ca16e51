"""Where requirements/install.sh and the guides put a simulator's files, so that no variable has to name them."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]  # of a checkout; install.sh works in one
FOLDERS = {
    "calvin": ("data/calvin",),
    "maniskill": ("data/maniskill", "rlinf/envs/maniskill/assets"),  # install.sh's, and where the guide downloads to
    "robotwin": ("data/robotwin",),  # a checkout, in which assets/ may lie
    "robotwin_assets": ("data/robotwin_assets",),
    "robotwin_venv": ("data/robotwin_venv",),  # the environment that its planner needs
}


def installed_folders(simulator: str) -> list[Path]:
    """The folders that are there, install.sh's first; data/NAME may be a link to where a variable pointed then."""
    return [folder for name in FOLDERS[simulator] if (folder := REPOSITORY / name).is_dir()]


def not_there(variable: str, simulator: str) -> str:
    """The beginning of a message for a simulator without files, e.g. `CALVIN_PATH is not set and there is no ...`."""
    return f"{variable} is not set and there is no {' or '.join(FOLDERS[simulator])} in {REPOSITORY}"
