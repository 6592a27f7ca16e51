"""The user's copy of CALVIN's files: where it is, whether it is complete, and the sentences in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlinf.simulators.calvin.starts import GEOMETRY
from rlinf.simulators.calvin.tasks import COLOURS, TASKS
from rlinf.simulators.contract import AbsentError, SetupError
from rlinf.simulators.installed import installed_folders, not_there

ROBOT = "data/franka_panda/panda_longer_finger.urdf"
PLANE = "data/plane/plane.urdf"
ANNOTATIONS = {"validation": "tasks/new_playtable_validation.yaml", "training": "tasks/new_playtable.yaml"}
LAYOUT = "it should hold data/ of mees/calvin_env and tasks/ of mees/calvin: bash requirements/envs/calvin.sh FOLDER"


def table_file(scene: str) -> str:
    """Path of the table of a scene (A to D) within the folder."""
    return f"data/calvin_table_{scene}/urdf/calvin_table_{scene}.urdf"


def block_files(scene: str) -> list[str]:
    """Paths of the red, blue and pink block of a scene within the folder."""
    sizes = zip(COLOURS, GEOMETRY[scene].sizes, strict=True)
    return [f"data/blocks/block_{colour}_{size}.urdf" for colour, size in sizes]


def find_folder(given: str | None) -> Path:
    """The folder that init_params.data_path or the variable CALVIN_PATH names, else the one install.sh laid out."""
    named = given or os.environ.get("CALVIN_PATH")
    if not named:
        found = [folder for folder in installed_folders("calvin") if (folder / ROBOT).is_file()]
        if not found:
            raise AbsentError(f"{not_there('CALVIN_PATH', 'calvin')}: no folder with CALVIN's files; {LAYOUT}")
        return found[0].resolve()
    folder, origin = Path(named).expanduser(), "data_path" if given else "CALVIN_PATH"
    if not folder.is_dir():
        raise SetupError(f"{origin}={named} is not a folder; {LAYOUT}")
    return folder.resolve()


def check_folder(folder: Path, scenes: Sequence[str]) -> None:
    """Raise SetupError where a file is missing that `scenes` need: Bullet would silently draw a world without it."""
    for path in needed_files(folder, scenes):
        if not path.is_file():
            raise SetupError(f"{folder} lacks {os.path.relpath(path, folder)}; {LAYOUT}")


def needed_files(folder: Path, scenes: Sequence[str]) -> Iterator[Path]:
    """Every file that `scenes` are made of, whether it is there or not."""
    wanted = [ROBOT, PLANE, *ANNOTATIONS.values()]
    wanted += [name for scene in scenes for name in (table_file(scene), *block_files(scene))]
    for name in wanted:
        yield from (folder / name, *_referenced(folder / name))


def _referenced(path: Path) -> Iterator[Path]:
    """The meshes, materials and textures that a URDF names."""
    if path.suffix != ".urdf" or not path.is_file():
        return
    for name in sorted(set(re.findall(r'filename="([^"]+)"', path.read_text()))):
        mesh = path.parent / name.removeprefix("package://")
        yield mesh
        if mesh.suffix != ".obj" or not mesh.is_file():
            continue
        with mesh.open() as lines:
            head = "".join(line for _, line in zip(range(20), lines, strict=False))
        for name in re.findall(r"^mtllib (.+)$", head, re.M):
            material = mesh.parent / name.strip()
            if mesh.parent.name != "collision":  # those name files their makers kept to themselves
                yield material
                yield from (mesh.parent / texture for texture in _textures(material))


def _textures(material: Path) -> list[str]:
    """The picture files that a material file names."""
    return re.findall(r"^\s*map_Kd (.+?)\s*$", material.read_text(), re.M) if material.is_file() else []


def read_annotations(folder: Path, kind: str) -> dict[str, tuple[str, ...]]:
    """The instructions of each task: `validation` has one per task, `training` 7 to 20."""
    import yaml

    path = folder / ANNOTATIONS[kind]
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SetupError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    missing = [task for task in TASKS if not isinstance(read, dict) or not read.get(task)]
    if missing:
        raise SetupError(f"{path} has no sentence for {', '.join(missing[:3])}{' ...' if missing[3:] else ''}")
    return {task: tuple(map(str, read[task])) for task in TASKS}
