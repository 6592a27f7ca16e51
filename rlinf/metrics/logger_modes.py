"""Whether Weights & Biases and SwanLab send a run to their servers or keep it in log_path."""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class ChosenMode(NamedTuple):
    """A mode as the service names it, and the line that tells the user about a choice made for them."""

    mode: str
    note: str = ""


def wandb_login() -> bool:
    """Whether this user has logged in to Weights & Biases: a key in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    named = os.environ.get("NETRC")
    files = [Path(named).expanduser()] if named else [Path.home() / name for name in (".netrc", "_netrc")]
    return any(host in _netrc_hosts(file) for file in files)


def swanlab_login() -> bool:
    """Whether this user has logged in to SwanLab: a key in the environment or in SwanLab's own netrc file."""
    if os.environ.get("SWANLAB_API_KEY"):
        return True
    home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab"
    return any(_netrc_hosts(Path(folder) / ".netrc") for folder in (Path.cwd() / ".swanlab", home))


LOGINS: dict[str, Callable[[], bool]] = {"wandb": wandb_login, "swanlab": swanlab_login}


def choose_mode(service: str, asked: str) -> ChosenMode:
    """The mode of `runner.logger.<service>_mode`; auto is online after a login, else offline.

    The service's own variable (WANDB_MODE, SWANLAB_MODE) decides before the login does.
    """
    if asked != "auto":
        return ChosenMode(asked)
    if named := os.environ.get(f"{service.upper()}_MODE"):
        return ChosenMode(named)
    if LOGINS[service]():
        return ChosenMode("online")
    return ChosenMode("offline", offline_note(service, "there is no login on this machine"))


def offline_note(service: str, reason: str) -> str:
    """One line for a run that stays on this machine though nobody asked for that."""
    key = f"runner.logger.{service}_mode"
    return (
        f"{service}: offline, since {reason}; the run is kept in log_path and `{service} sync` sends it later "
        f"(`{service} login` or {key}=online goes online, {key}=offline silences this line)"
    )


def _netrc_hosts(file: Path) -> set[str]:
    """The hosts of a netrc file; a file that is absent or damaged names none."""
    try:
        return set(netrc.netrc(file).hosts)
    except (OSError, netrc.NetrcParseError):
        return set()
