"""The user's copy of the published assets: where it is, whether what a run needs is there, and what it says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.simulators.contract import AbsentError, SetupError
from rlinf.simulators.installed import installed_folders, not_there
from rlinf.simulators.maniskill.tasks import NUM_IMAGES, NUM_OBJECTS, NUM_PLATES, BodyKey, Episode, Variant, variant

INSTALL = "`bash requirements/envs/maniskill.sh` fetches everything into data/maniskill"
URDF, TABLE = "data/robots/widowx/wx250s.urdf", "data/tasks/bridge_v2_real2sim_dataset/stages/bridge_table_1_v1.glb"
VISUALS = ("textured.obj", "textured.dae", "textured.glb")  # the first that is there is drawn


@dataclass(frozen=True)
class Model:
    """The files and measures of one of the objects or plates."""

    name: str  # as the instruction says it
    folder: Path
    size: tuple[float, float, float]  # of its bounding box, m
    density: float  # kg/m³

    @property
    def collision(self) -> Path:
        """File with the convex parts that collide."""
        return self.folder / "collision.obj"

    @property
    def visual(self) -> Path:
        """File with the mesh that is drawn."""
        return next((self.folder / n for n in VISUALS if (self.folder / n).is_file()), self.folder / VISUALS[-1])


@dataclass(frozen=True)
class TableImage:
    """A picture that replaces everything behind robot, object and plate, and the texture that goes with it."""

    picture: Path
    texture: Path
    mix: float  # scales how much of the texture is seen


@dataclass(frozen=True)
class Assets:
    """The files of robot, table, objects, plates and images."""

    urdf: Path
    table: Path
    objects: tuple[Model, ...]
    plates: tuple[Model, ...]
    images: tuple[TableImage, ...]

    def model(self, key: BodyKey) -> Model:
        """The model of an object or plate."""
        kind, index = key
        return (self.objects if kind == "object" else self.plates)[index]

    def instruction(self, episode: Episode) -> str:
        """The sentence the policy is told."""
        names = self.objects[episode.object.index].name, self.plates[episode.plate.index].name
        return episode.instruction(*names)

    def check(self, variants: Sequence[Variant]) -> None:
        """Raise SetupError where a file is missing that these variants need."""
        for path in (*self.files(variants), self.pairs_that_pass):
            if not path.is_file():
                raise SetupError(f"{path} is missing; {INSTALL}")

    @property
    def pairs_that_pass(self) -> Path:
        """Names the pairs of links that may overlap; SAPIEN loads a robot without it too, which then grasps nothing."""
        return self.urdf.with_suffix(".srdf")

    def files(self, variants: Sequence[Variant]) -> Iterable[Path]:
        """Every file that these variants are made of, whether it is there or not."""
        return (self.urdf, *self._needed(variants), *_meshes(self.urdf), self.table)

    def _needed(self, variants: Sequence[Variant]) -> Iterable[Path]:
        """The files of the bodies and images that these variants may show."""
        for v in variants:
            for model in map(self.model, v.bodies):
                yield from (model.collision, model.visual)
            for i in v.images.members:
                yield self.images[i].picture
                if v.texture is not None:
                    yield self.images[i].texture


def find_assets(rows: Sequence[tuple[str, str]]) -> Assets:
    """The assets under MANISKILL_ASSET_DIR and MS_ASSET_DIR or where they are installed, complete for these rows.

    A row is (id, obj_set).
    """
    carrot = carrot_folder()
    ours = Assets(
        urdf=_ms_folder() / URDF,
        table=_ms_folder() / TABLE,
        objects=_models(carrot / "more_carrot", NUM_OBJECTS),
        plates=_models(carrot / "more_plate", NUM_PLATES),
        images=_images(carrot / "more_table"),
    )
    ours.check([variant(*row) for row in rows])
    return ours


def carrot_folder() -> Path:
    """The folder carrot/ in MANISKILL_ASSET_DIR, or that itself (both have been called so); else an installed one."""
    named = os.environ.get("MANISKILL_ASSET_DIR")
    folders = [Path(named).expanduser().resolve()] if named else installed_folders("maniskill")
    for folder in folders:
        for carrot in (folder / "carrot", folder):
            if (carrot / "more_carrot").is_dir():
                return carrot
    if named:
        raise SetupError(f"MANISKILL_ASSET_DIR={named} holds no carrot/more_carrot; {INSTALL}")
    absent = not_there("MANISKILL_ASSET_DIR", "maniskill")
    raise AbsentError(f"{absent} that holds the objects of the tasks; {INSTALL}")


def _ms_folder() -> Path:
    """What ManiSkill itself takes, MS_ASSET_DIR; else a folder that holds the robot: beside the objects, or installed.

    If there is none, ManiSkill's own ~/.maniskill.
    """
    if named := os.environ.get("MS_ASSET_DIR"):
        return Path(named).expanduser().resolve()
    beside = os.environ.get("MANISKILL_ASSET_DIR")
    folders = [Path(beside).expanduser().resolve()] if beside else []
    folders += installed_folders("maniskill")
    own = Path("~/.maniskill").expanduser().resolve()
    return next((folder for folder in folders if (folder / URDF).is_file()), own)


def _read(path: Path, count: int) -> dict[str, Any]:
    """Read a model_db.json, in which the order of entries numbers them."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise SetupError(f"{path} is missing; {INSTALL}") from None
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}") from None
    if not isinstance(read, dict) or len(read) != count:
        raise SetupError(f"{path} must list {count} entries; {INSTALL}")
    return read


def _models(folder: Path, count: int) -> tuple[Model, ...]:
    """The objects or plates of a folder."""
    found = []
    for name, entry in _read(folder / "model_db.json", count).items():
        try:
            low, high = entry["bbox"]["min"], entry["bbox"]["max"]
            size = tuple(float(b - a) for a, b in zip(low, high, strict=True))
            found.append(Model(entry["name"], folder / name, size, float(entry["density"])))  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise SetupError(f"{folder / 'model_db.json'}: entry {name!r} is damaged ({error!r}); {INSTALL}") from None
    return tuple(found)


def _images(folder: Path) -> tuple[TableImage, ...]:
    """The table images of a folder."""
    entries = _read(folder / "model_db.json", NUM_IMAGES)
    return tuple(
        TableImage(folder / "imgs" / name, folder / "textures" / entry["texture"], float(entry["mix"]))
        for name, entry in entries.items()
    )


def _meshes(urdf: Path) -> Iterable[Path]:
    """The mesh files that a URDF names."""
    if urdf.is_file():
        for name in sorted(set(re.findall(r'filename="([^"]+)"', urdf.read_text(encoding="utf-8")))):
            yield urdf.parent / name.removeprefix("package://")
