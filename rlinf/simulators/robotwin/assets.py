"""The user's RoboTwin: its checkout, its assets, whether what a run needs is there, and what names both in a result."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rlinf.simulators.contract import AbsentError, SetupError
from rlinf.simulators.installed import installed_folders, not_there

COMMIT = "0008ae6800df9f75fc8de7098bacb01735fd8fd2"  # of branch RLinf_support, which this adapter was written against
CLONE = "git clone https://github.com/RoboTwin-Platform/RoboTwin.git -b RLinf_support"
INSTALL = "bash requirements/install.sh embodied --model openpi --env robotwin"
PLATFORM = "ALOHA"  # ROBOT_PLATFORM of a robot with two arms, 14 columns
NEEDED = ("robotwin/envs/vector_env.py", "envs/_base_task.py", "description/task_instruction", "task_config")
CLUTTER = "assets/objects/objaverse/list.json"
TEXTURES = "assets/background_texture"
PLACEHOLDER = "/path/to/"  # how assets_path begins in the guides' files
SMALL = 1 << 16  # bytes: of files up to this size the hash reads the content, of others the name and size

logger = logging.getLogger(__name__)


def find_checkout(given: str | None) -> Path:
    """The folder of init_params.robotwin_path or ROBOTWIN_PATH, else the one that install.sh cloned."""
    named = given or os.environ.get("ROBOTWIN_PATH")
    origin = "robotwin_path" if given else "ROBOTWIN_PATH"
    if not named:
        found = [folder for folder in installed_folders("robotwin") if (folder / NEEDED[0]).is_file()]
        if not found:
            absent = not_there("ROBOTWIN_PATH", "robotwin")
            raise AbsentError(f"{absent} with a checkout of RoboTwin: {INSTALL}, or {CLONE} and set ROBOTWIN_PATH")
        return found[0].resolve()
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise SetupError(f"{origin}={named} is not a folder; it should be a checkout of RoboTwin: {CLONE}")
    lacking = [name for name in NEEDED if not (folder / name).exists()]
    if lacking:
        raise SetupError(
            f"{origin}={named} holds no {lacking[0]}: it must be RoboTwin's branch RLinf_support (commit "
            f"{COMMIT[:8]}), other branches have another layout: {CLONE}"
        )
    return folder.resolve()


def find_assets(given: str | None, checkout: Path) -> Path:
    """The folder that holds assets/: that of assets_path or ASSETS_PATH, else an installed one or the checkout.

    The guides' placeholder stands for no path.
    """
    if given is not None and given.startswith(PLACEHOLDER):
        given = None
    named = given or os.environ.get("ASSETS_PATH")
    origin = "assets_path" if given else "ASSETS_PATH"
    folders = [Path(named).expanduser()] if named else [*installed_folders("robotwin_assets"), checkout]
    for folder in folders:
        for root in (folder, folder.parent) if folder.name == "assets" else (folder,):
            if (root / "assets" / "embodiments").is_dir():
                return root.resolve()
    where = f"{origin}={named}" if named else f"none of {', '.join(map(str, folders))}"
    raise SetupError(
        f"{where} holds {'no ' if named else ''}assets/embodiments: it must be the folder in which RoboTwin's assets/ "
        f"lies; {INSTALL}, or script/_download_assets.sh of RoboTwin"
    )


def own_interpreter() -> str | None:
    """The interpreter of RoboTwin's environment: that of ROBOTWIN_PYTHON, else the one install.sh made, or None."""
    named = os.environ.get("ROBOTWIN_PYTHON")
    found = [str(folder / "bin/python") for folder in installed_folders("robotwin_venv")]
    return named or next(iter(found), None)


def check_platform() -> None:
    """Raise SetupError where ROBOT_PLATFORM, by which the published code reads actions, names another robot."""
    named = os.environ.get("ROBOT_PLATFORM") or PLATFORM
    if named != PLATFORM:
        raise SetupError(
            f"ROBOT_PLATFORM={named} must be {PLATFORM}, two arms of seven columns each: export "
            f"ROBOT_PLATFORM={PLATFORM}, or unset it"
        )


def check_files(root: Path, embodiment: Sequence[object], *, textures: bool) -> None:
    """Raise SetupError where a robot, or what domain randomisation shows, is missing from the assets."""
    for name in dict.fromkeys(str(part) for part in embodiment if isinstance(part, str)):
        if not (root / "assets/embodiments" / name / "config.yml").is_file():
            there = sorted(p.parent.name for p in (root / "assets/embodiments").glob("*/config.yml"))
            raise SetupError(
                f"assets/embodiments/{name}/config.yml is missing from assets_path={root} "
                f"(task_config.embodiment); there are: {', '.join(there) or 'none'}"
            )
    for name in (CLUTTER, "assets/objects/same.json"):
        if not (root / name).is_file():
            raise SetupError(f"{name} is missing from assets_path={root}; {INSTALL}")
    if textures and not any((root / TEXTURES).glob("*/*")):
        raise SetupError(
            f"{TEXTURES} is missing from assets_path={root}; fetch it, or set "
            "task_config.domain_randomization.random_background: false"
        )


def commit_of(checkout: Path) -> str | None:
    """The commit that is checked out; None where that cannot be told."""
    git = checkout / ".git"
    try:
        if git.is_file():  # of a worktree
            git = (checkout / git.read_text().split("gitdir:")[1].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        ref = head.split()[1]
        common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        if (common / ref).is_file():
            return (common / ref).read_text().strip()
        packed = (common / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), None)
    except (OSError, IndexError):
        return None


@cache
def warn_of_commit(checkout: Path) -> None:
    """Say, once, where another commit is checked out than the one that was compared with RoboTwin's own VectorEnv."""
    found = commit_of(checkout)
    if found != COMMIT:
        what = f"commit {found[:8]}" if found else "of an unknown commit"
        logger.warning("RoboTwin in %s is %s, not %s: results may differ from others'", checkout, what, COMMIT[:8])


@cache
def asset_hash(root: Path) -> str:
    """16 hex digits that change with the robots and objects: names and sizes of files, and what is in small ones."""
    digest = hashlib.sha256()
    for kind in ("embodiments", "objects"):
        for path in sorted((root / "assets" / kind).rglob("*")):
            if path.is_file():
                size = path.stat().st_size
                digest.update(f"{path.relative_to(root)} {size}\n".encode())
                if size <= SMALL:
                    digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def are_others(root: Path) -> bool:
    """Whether these assets are known not to be the published ones, which list hundreds of objects for clutter."""
    try:
        listed = json.loads((root / CLUTTER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return not any(listed.values()) if isinstance(listed, dict) else not listed
