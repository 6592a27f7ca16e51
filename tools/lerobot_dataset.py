"""Write or read a dataset with the lerobot package, in an environment of its own (nothing of rlinf is imported).

    LEROBOT/bin/python tools/lerobot_dataset.py write FOLDER --kind video
    LEROBOT/bin/python tools/lerobot_dataset.py read FOLDER --json frames.json

lerobot 0.4 writes layout v3.0, lerobot 0.3.3 layout v2.1. `read` prints what the package makes of a dataset, and writes
every frame's state, action, task and mean pixel per camera. tests/demos/test_lerobot_package.py does both.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import CODEBASE_VERSION, LeRobotDataset

JOINTS = [f"joint_{i}" for i in range(6)]
CAMERAS = {"observation.images.top": (64, 96), "observation.images.wrist": (64, 64)}
TASKS = ("pick the cube", "push the cube")


def write(folder: Path, kind: str) -> None:
    """Five short episodes of an arm with two cameras, whose grey levels tell the frames apart."""
    features = {n: {"dtype": "float32", "shape": (6,), "names": JOINTS} for n in ("observation.state", "action")}
    for name, size in CAMERAS.items():
        features[name] = {"dtype": kind, "shape": (*size, 3), "names": ["height", "width", "channels"]}
    data = LeRobotDataset.create(
        "me/own", fps=30, features=features, root=folder, robot_type="so100", use_videos=kind == "video"
    )
    rng = np.random.default_rng(0)
    task_is_an_argument = "task" in inspect.signature(data.add_frame).parameters  # until layout v2.1
    for episode in range(5):
        for t in range(20 + episode):
            level = (40 * episode + 7 * t) % 256
            frame = {name: np.full((*size, 3), level, np.uint8) for name, size in CAMERAS.items()}
            frame["observation.state"] = rng.standard_normal(6).astype(np.float32)
            frame["action"] = rng.uniform(-1, 1, 6).astype(np.float32)
            task = TASKS[episode % 2]
            if task_is_an_argument:
                data.add_frame(frame, task=task)
            else:
                data.add_frame({**frame, "task": task})
        data.save_episode()
    if "finalize" in dir(data):
        data.finalize()
    print(f"lerobot wrote {data.num_episodes} episodes, {data.num_frames} frames, layout {CODEBASE_VERSION}")


def read(folder: Path, output: Path | None) -> None:
    """Open a dataset, and take every frame of it."""
    data = LeRobotDataset("local/dataset", root=folder, video_backend="pyav")
    frames = []
    for i in range(len(data)):
        item = data[i]
        pixels = {name: 255 * float(item[name].mean()) for name in data.meta.camera_keys}
        numbers = {name: item[name].tolist() for name in ("observation.state", "action")}
        frames.append({"task": item["task"], "pixels": pixels, **numbers})
    if output is not None:
        output.write_text(json.dumps(frames))
    print(f"lerobot opened {data.num_episodes} episodes, {data.num_frames} frames, fps {data.fps}")
    tasks = sorted(set(_tasks(data)))
    print(f"robot {data.meta.robot_type}, cameras {', '.join(data.meta.camera_keys)}, tasks {tasks}")
    print(f"action names {data.features['action']['names']}, mean {np.round(data.meta.stats['action']['mean'], 3)}")


def _tasks(data: LeRobotDataset) -> list[str]:
    tasks = data.meta.tasks
    return list(tasks.values()) if isinstance(tasks, dict) else tasks.index.tolist()


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["write", "read"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=["image", "video"], default="video")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.job == "write":
        write(options.folder, options.kind)
    else:
        read(options.folder, options.json)


if __name__ == "__main__":
    main()
