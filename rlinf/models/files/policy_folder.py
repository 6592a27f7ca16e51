"""What a policy folder says of itself beside its weights: which policy it is, and which base its adapters need.

`config.json` holds the model block the policy was built with; `base.json`, beside adapters, a fingerprint of the weight
files they were trained on, by which a base that has changed since is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.storage.atomic_folder import TEMPORARY

CONFIG = "config.json"
SETTINGS = "rlinf"  # entry of config.json: the model block the policy was built with
BASE_FILE = "base.json"
Fingerprint = dict[str, dict[str, Any]]  # file name -> {"size": bytes, "sha256": of a sample}
_WHOLE, _ENDS, _SAMPLES, _SAMPLE = 8 << 20, 1 << 20, 64, 1 << 16  # bytes, bytes, blocks, bytes a block
# What config.json files, published ones too, call the policies that share a network.
_NETWORKS = {"openvla": "openvla", "openvla_oft": "openvla", "prismatic": "openvla"}
_NETWORKS |= dict.fromkeys(("openpi", "pi0", "pi05"), "openpi")


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:  # broken JSON or text encoding, or blocks in blocks without end
        raise UserError(f"{path} is not valid JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as a JSON file, one key a line; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object a JSON file holds; empty when there is no such file."""
    return read_json(path) if path.is_file() else {}


def saved_settings(folder: Path) -> dict[str, Any]:
    """The model block in a folder that rlinf saved; empty for a published one."""
    settings = read_json_if_there(folder / CONFIG).get(SETTINGS, {})
    if not isinstance(settings, dict):
        raise UserError(f"{folder / CONFIG}: {SETTINGS}={str(settings)[:60]} must be an object of settings")
    return settings


def check_model_type(folder: Path, model_type: str, *, network_only: bool = False) -> None:
    """Refuse a folder of another policy; a published one is known only by the network it shares with others."""
    saved = saved_settings(folder).get("model_type")
    if saved is not None and saved != model_type and not network_only:
        raise _other_policy(folder, saved, model_type)
    content = read_json_if_there(folder / CONFIG)
    said = saved or content.get("model_type") or content.get("type")  # LeRobot writes `type`
    network = _NETWORKS.get(said) if isinstance(said, str) else None
    if network is not None and network != _NETWORKS.get(model_type, model_type):
        raise _other_policy(folder, said, model_type)


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that rlinf saved from a policy built with other values of these keys."""
    saved = saved_settings(folder)
    for key, value in settings.items():
        if key in saved and saved[key] != value:
            raise UserError(
                f"{folder / CONFIG}: it was trained with {key}={saved[key]}, this configuration has "
                f"actor.model.{key}={value}"
            )


def refuse_run_folder(folder: Path) -> None:
    """global_step_N is not a policy, it contains one."""
    if (inside := folder / "actor" / "model").is_dir():
        raise UserError(
            f"actor.model.model_path={folder} is a run's checkpoint, its policy lies in {inside}: "
            f"set model_path to that, or runner.ckpt_path={folder}"
        )


def fingerprint(files: Iterable[Path]) -> Fingerprint:
    """Names, sizes and sha256 of a sample: 8 MiB or less whole, else both ends and 64 blocks between, for speed."""
    return {file.name: {"size": file.stat().st_size, "sha256": _sample_hash(file)} for file in files}


def save_fingerprint(folder: Path, of_base: Fingerprint) -> None:
    """Write base.json."""
    write_json(folder / BASE_FILE, {"files": of_base})


def recorded_fingerprint(folder: Path) -> Fingerprint | None:
    """The fingerprint in base.json; None in a folder without it."""
    path = folder / BASE_FILE
    if not path.is_file():
        return None
    files = read_json(path).get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise UserError(f"{path}: files={str(files)[:60]} must be an object per weight file; copy it again")
    return files


def fingerprint_difference(recorded: Fingerprint, found: Fingerprint) -> str | None:
    """What changed, for an error; None when nothing did."""
    for name in sorted(recorded.keys() | found.keys()):
        if name not in found or name not in recorded:
            return f"{name} is {'gone' if name in recorded else 'new'}"
        a, b = recorded[name], found[name]
        if a.get("size") != b["size"]:
            return f"{name} had {a.get('size')} bytes, now {b['size']}"
        if a != b:
            return f"the numbers of {name} differ"
    return None


def will_be_deleted(base: Path, folder: Path) -> bool:
    """Whether saving into `folder` may delete `base`: it lies in what is replaced, or among prunable checkpoints."""
    temporary = next((p for p in (folder, *folder.parents) if p.name.startswith(TEMPORARY)), None)
    replaced = folder
    if temporary is not None:
        replaced = temporary.with_name(temporary.name.removeprefix(TEMPORARY))
        if replaced.name.startswith("global_step_"):
            replaced = replaced.parent
    return base.resolve().is_relative_to(replaced.resolve())


def _other_policy(folder: Path, saved: object, model_type: str) -> UserError:
    return UserError(
        f"{folder / CONFIG}: it is a checkpoint of {saved}, this configuration is actor.model.model_type={model_type}"
    )


def _sample_hash(file: Path) -> str:
    size = file.stat().st_size
    spans = [(0, size)]
    if size > _WHOLE:
        spans = [(0, _ENDS), *((i * size // _SAMPLES, _SAMPLE) for i in range(1, _SAMPLES)), (size - _ENDS, _ENDS)]
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for start, length in spans:
            stream.seek(start)
            digest.update(stream.read(length))
    return digest.hexdigest()
