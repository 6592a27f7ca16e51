"""A dataset by folder, or by its id on the Hugging Face Hub: what was downloaded before is taken from its caches."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlinf.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
INFO = "meta/info.json"


def find_dataset(name: str, key: str) -> Path:
    """The folder of a dataset; `key` names the setting in errors.

    A Hub id is looked for in the caches of the lerobot and huggingface_hub packages, then downloaded where the latter
    is installed and may go online.
    """
    folder = Path(name).expanduser()
    is_local = folder.exists() or folder.parent.is_dir() or folder.parts[:1] == ("data",)  # of which `data` is usual
    if is_local or not HUB_ID.fullmatch(name):
        return folder
    cached = _in_caches(name)
    return cached if cached is not None else _download(name, key)


def _in_caches(name: str) -> Path | None:
    """A copy of the dataset that an earlier download left on this machine."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    of_lerobot = Path(os.environ.get("HF_LEROBOT_HOME", home / "lerobot")).expanduser() / name
    if (of_lerobot / INFO).is_file():
        return of_lerobot
    of_hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser() / f"datasets--{name.replace('/', '--')}"
    snapshots = sorted((of_hub / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    main = of_hub / "refs/main"
    if main.is_file():
        snapshots.insert(0, of_hub / "snapshots" / main.read_text().strip())
    return next((path for path in snapshots if (path / INFO).is_file()), None)


def _download(name: str, key: str) -> Path:
    """Fetch the dataset into the Hub's cache; an error says how to get it by hand."""
    by_hand = (
        f"on a machine with network: hf download {name} --repo-type dataset --local-dir data/{name.split('/')[1]}; "
        f"then {key}=data/{name.split('/')[1]}"
    )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{key}={name} is neither a folder nor in the Hub's cache, and huggingface_hub is not installed; {by_hand}"
        ) from None
    print(f"downloading {name} from the Hub")
    try:
        return Path(snapshot_download(name, repo_type="dataset"))
    except Exception as error:  # no network, no such dataset, no permission: the package has a type for each
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:160] or type(error).__name__
        raise UserError(f"{key}={name} is neither a folder nor in the Hub's cache: {reason}; {by_hand}") from None
