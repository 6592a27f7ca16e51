"""What a RoboTwin result names so that it can be repeated: setting, commit, assets, seeds and packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.simulators.contract import SetupError
from rlinf.simulators.robotwin.assets import are_others, asset_hash, commit_of, find_checkout, own_interpreter
from rlinf.simulators.robotwin.seeds import has_list, is_published
from rlinf.simulators.robotwin.suite import SETTINGS, Options, assets_root

PACKAGES = ("numpy", "sapien", "mplib", "toppra")
OF_NO_CONSEQUENCE = (  # keys of task_config that change no number, or stand elsewhere in the protocol
    *("task_name", "step_lim", "domain_randomization", "episode_num", "language_num", "use_seed", "collect_data"),
    *("save_path", "save_freq", "render_freq", "eval_video_log", "clear_cache_freq", "data_type"),
    *("pcd_crop", "pcd_down_sample_num"),
)


def setting_of(options: Options) -> str:
    """RoboTwin's name for what is randomised: demo_clean (Easy), demo_randomized (Hard), or `custom` for the rest."""
    given = {**SETTINGS["demo_clean"], **options.task_config.get("domain_randomization", {})}
    return next((name for name, values in SETTINGS.items() if values == given), "custom")


def protocol(options: Options) -> dict[str, Any]:
    """See simulators/contract.py; what is not on this machine is None."""
    root, setting = assets_root(options), setting_of(options)
    try:
        commit = commit_of(find_checkout(options.robotwin_path))
    except SetupError:
        commit = None
    kept = {key: value for key, value in options.task_config.items() if key not in OF_NO_CONSEQUENCE}
    randomised = options.task_config.get("domain_randomization", {}) if setting == "custom" else {}
    return {
        "setting": setting,
        "commit": commit,
        "assets": None if root is None else asset_hash(root),
        "seeds": seeds_origin(options),
        "task_config": {**kept, "embodiment": list(options.embodiment), "domain_randomization": randomised or None},
        "step_limits": {name: options.step_limit(name) for name in options.listed or (options.task,)},
        "shader": options.shader_pack,
        "max_growth_mb": None,
        "trials_per_task": None,  # which trials are played is told by itself
        **_versions(own_interpreter()),
    }


def seeds_origin(options: Options) -> str:
    """Where the seeds come from: the published lists, a file of one's own (with a digest of it), or all of a range."""
    if options.seeds_path is not None and not is_published(options.seeds_path):
        content = Path(options.seeds_path).expanduser().read_bytes()
        return f"{Path(options.seeds_path).name} {hashlib.sha256(content).hexdigest()[:16]}"
    tasks, root = options.listed or (options.task,), assets_root(options)
    others = root is not None and are_others(root)
    listed = [task for task in tasks if has_list(task, options.seeds_path, others=others)]
    if len(listed) == len(tasks):
        return "published"
    return f"published for {', '.join(listed)}, else every seed" if listed else "every seed"


def _versions(python: str | None) -> dict[str, str | None]:
    """`version.<package>` of the environment that an interpreter belongs to, without starting it."""
    path = None if python is None else [str(p) for p in Path(python).parents[1].glob("lib/python3*/site-packages")]
    where: Mapping[str, Any] = {} if path is None else {"path": path}
    found = {name: [d.version for d in importlib.metadata.distributions(name=name, **where)] for name in PACKAGES}
    return {f"version.{name}": next(iter(versions), None) for name, versions in found.items()}
