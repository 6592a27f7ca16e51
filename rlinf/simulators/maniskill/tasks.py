"""The put-on-plate tasks: one table of the published environments, and what an episode id of each means.

An episode id is a mixed-radix number; from the most significant digit: object, plate, extra, table image, places, yaw.
The extra digit is whatever the task varies besides (a second object, a second plate, an instruction, an arm pose).
Positions are in metres in the world frame, quaternions w x y z, joint angles in radians. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from rlinf.errors import did_you_mean

PREFIX = "PutOnPlateInScene25"
NUM_OBJECTS, NUM_PLATES, NUM_IMAGES = 25, 17, 21
TEMPLATES: tuple[str, ...] = tuple(json.loads(Path(__file__).with_name("templates.json").read_text(encoding="utf-8")))
# $C$ is the object, $P$ the plate; the first is the training sentence, the next 16 are Instruct-v1's
START_QPOS = (-0.01840777, 0.0398835, 0.22242722, -0.00460194, 1.36524296, 0.00153398, 0.037, 0.037)
TELEPORT_STEP = 5  # PositionChangeTo-v1 moves the object when this many actions have been executed
YAWS = tuple(math.radians(a) for a in (0, 45, 90, 135))
RING_YAWS = tuple(math.radians(a) for a in (-22.5, -67.5, -112.5, -157.5))
UPRIGHT = (1.0, 0.0, 0.0, 0.0)
CENTRE, HALF_EDGE, CELLS = (-0.16, 0.0), 0.075, 6
NEAR, FAR = 0.07, 0.15  # what lies in one scene must be further apart than this, m

Layout = Literal["pair", "ring", "pair or ring", "second_object", "second_plate"]
Extra = Literal["none", "unused", "template", "object", "plate", "qpos"]
Cell = tuple[float, float]
BodyKey = tuple[str, int]  # "object" or "plate", and its index


@dataclass(frozen=True)
class Body:
    """One of the objects or plates and where it starts; quaternions default to standing upright."""

    index: int  # into the asset folder's model_db
    position: tuple[float, float, float]
    quaternion: tuple[float, float, float, float] = UPRIGHT


class Teleport(NamedTuple):
    """Where the object is put while the episode runs."""

    step: int  # after this many actions
    position: tuple[float, float, float]
    quaternion: tuple[float, float, float, float]


class Texture(NamedTuple):
    """A picture blended over the camera image; which one, and how much of it, goes with the table image."""

    area: Literal["bodies", "whole"]  # robot and objects only, or the whole image
    ratio: float


@dataclass(frozen=True)
class Episode:
    """What is played under one episode id."""

    env_id: str
    obj_set: str
    episode_id: int
    object: Body
    plate: Body
    extra_object: Body | None
    extra_plate: Body | None
    image: int  # table image behind the robot, and texture
    texture: Texture | None
    template: int  # of the instruction
    qpos: tuple[float, ...]  # 6 arm joints, 2 fingers
    teleport: Teleport | None

    def instruction(self, object_name: str, plate_name: str) -> str:
        """The sentence the policy is told."""
        return TEMPLATES[self.template].replace("$C$", object_name).replace("$P$", plate_name)

    @property
    def bodies(self) -> dict[BodyKey, Body]:
        """The objects and plates that the episode shows."""
        objects, plates = (self.object, self.extra_object), (self.plate, self.extra_plate)
        shown = {("object", body.index): body for body in objects if body is not None}
        return shown | {("plate", body.index): body for body in plates if body is not None}


def hidden_bodies() -> dict[BodyKey, Body]:
    """Where the published layout keeps the objects and plates that an episode does not show: behind the camera."""
    objects = {("object", i): Body(i, (1.0, 0.3 * i, 1.0)) for i in range(NUM_OBJECTS)}
    return objects | {("plate", i): Body(i, (2.0, 0.3 * i, 1.0)) for i in range(NUM_PLATES)}


@dataclass(frozen=True)
class Range:
    """A digit below `count` stands for the member `first + digit`."""

    count: int
    first: int = 0

    @property
    def members(self) -> range:
        """The members that its digits stand for."""
        return range(self.first, self.first + self.count)


ONE, SEEN, UNSEEN_OBJECTS, UNSEEN_IMAGES, UNSEEN_PLATES = Range(1), Range(16), Range(9, 16), Range(5, 16), Range(16, 1)
ALL_OBJECTS, ALL_PLATES, ALL_IMAGES = Range(NUM_OBJECTS), Range(NUM_PLATES), Range(NUM_IMAGES)


@dataclass(frozen=True)
class Variant:
    """One environment id with one obj_set."""

    objects: Range = SEEN
    plates: Range = ONE
    images: Range = SEEN
    layout: Layout = "pair"
    heights: tuple[float, float, float] = (0.90, 0.90, 0.0)  # where object, plate and what is extra are let go
    yaws: tuple[float, ...] = YAWS
    extra: Extra = "none"
    extras: Range = ONE
    texture: Texture | None = None
    teleports: bool = False

    @property
    def radices(self) -> tuple[int, ...]:
        """Sizes of the digits, most significant first."""
        chosen = (self.objects, self.plates, self.extras, self.images)
        return (*(digit.count for digit in chosen), len(places_of(self.layout)), len(self.yaws))

    @property
    def bodies(self) -> list[BodyKey]:
        """The objects and plates that an episode may show; beside a single plate, the extra digit may choose any."""
        plates = Range(NUM_PLATES) if self.extra == "plate" and self.plates.count == 1 else self.plates
        return [*(("object", i) for i in self.objects.members), *(("plate", i) for i in plates.members)]

    @property
    def total(self) -> int:
        """Number of episode ids."""
        return math.prod(self.radices)


_MAIN = Variant()
_TWO_OBJECTS = replace(_MAIN, layout="second_object", heights=(0.95, 0.92, 1.00))
_TWO_PLATES = replace(_MAIN, layout="second_plate", heights=(1.00, 0.92, 0.96), images=ALL_IMAGES, extra="plate")
_HIGH = replace(_MAIN, heights=(0.95, 0.95, 0.0))
NUM_ARM_POSES = 1 + 14375  # the usual start, then EEPose-v1's others


def _textured(area: Literal["bodies", "whole"], ratio: float) -> dict[str, Variant]:
    """The published texture tasks: their extra digit changes nothing, the texture goes with the image."""
    test = replace(_MAIN, extra="unused", extras=Range(16), texture=Texture(area, ratio))
    return {"train": _MAIN, "test": test, "all": replace(test, extras=Range(17))}


def _extras(base: Variant, extra: Extra, count: int) -> dict[str, Variant]:
    """Tasks whose extra digit is 0 in training and anything else in the test."""
    ranges = {"test": Range(count - 1, 1), "all": Range(count)}
    return {"train": base} | {name: replace(base, extra=extra, extras=extras) for name, extras in ranges.items()}


# The training set of an id whose variation is a test is that of Main-v3, but for the places and heights of
# Position-v1 and PositionChangeTo-v1. In `all` each digit takes what it takes in training and in the test.
# MainImage-v3 does not start as published; here it mirrors MainCarrot-v3: one object before unseen images.
_TABLE: dict[str, dict[str, Variant]] = {
    "Main-v3": {
        "train": _MAIN,
        "test": replace(_MAIN, objects=UNSEEN_OBJECTS, images=UNSEEN_IMAGES),
        "all": replace(_MAIN, objects=ALL_OBJECTS, images=ALL_IMAGES),
    },
    "VisionImage-v1": {
        "train": _MAIN,
        "test": replace(_MAIN, images=UNSEEN_IMAGES),
        "all": replace(_MAIN, images=ALL_IMAGES),
    },
    "VisionTexture03-v1": _textured("bodies", 0.3),
    "VisionTexture05-v1": _textured("bodies", 0.5),
    "VisionWhole03-v1": _textured("whole", 0.3),
    "VisionWhole05-v1": _textured("whole", 0.5),
    "Carrot-v1": {
        "train": _MAIN,
        "test": replace(_MAIN, objects=UNSEEN_OBJECTS),
        "all": replace(_MAIN, objects=ALL_OBJECTS),
    },
    "Plate-v1": {
        "train": _MAIN,
        "test": replace(_MAIN, plates=UNSEEN_PLATES),
        "all": replace(_MAIN, plates=ALL_PLATES),
    },
    "Instruct-v1": _extras(_MAIN, "template", 17),
    "MultiCarrot-v1": {
        "train": replace(_TWO_OBJECTS, extra="object", extras=Range(15)),
        "test": replace(_TWO_OBJECTS, objects=UNSEEN_OBJECTS, extra="object", extras=Range(8)),
        "all": replace(_TWO_OBJECTS, objects=ALL_OBJECTS, extra="object", extras=Range(24)),
    },
    "MultiPlate-v1": {
        "train": replace(_TWO_PLATES, extras=Range(16)),
        "test": replace(_TWO_PLATES, plates=UNSEEN_PLATES, extras=Range(15)),
        "all": replace(_TWO_PLATES, plates=ALL_PLATES, extras=Range(16)),
    },
    "Position-v1": {
        "train": _HIGH,
        "test": replace(_HIGH, layout="ring", yaws=RING_YAWS),
        "all": replace(_HIGH, layout="pair or ring", yaws=(*YAWS, *RING_YAWS)),
    },
    "EEPose-v1": _extras(_MAIN, "qpos", NUM_ARM_POSES),
    "PositionChangeTo-v1": {
        "train": _TWO_OBJECTS,
        "test": replace(_TWO_OBJECTS, teleports=True),
        "all": replace(_TWO_OBJECTS, teleports=True),
    },
    "Single-v1": {name: replace(_MAIN, objects=ONE, images=ONE) for name in ("train", "test", "all")},
    "MainCarrot-v3": {
        "train": replace(_MAIN, images=ONE),
        "test": replace(_MAIN, objects=UNSEEN_OBJECTS, images=ONE),
        "all": replace(_MAIN, objects=ALL_OBJECTS, images=ONE),
    },
    "MainImage-v3": {
        "train": replace(_MAIN, objects=ONE),
        "test": replace(_MAIN, objects=ONE, images=UNSEEN_IMAGES),
        "all": replace(_MAIN, objects=ONE, images=ALL_IMAGES),
    },
}
VARIANTS = {PREFIX + name: sets for name, sets in _TABLE.items()}
ENV_IDS = tuple(VARIANTS)


def variant(env_id: str, obj_set: str) -> Variant:
    """The table's entry of an environment id and obj_set; a ValueError names the nearest id when there is none."""
    if env_id not in VARIANTS:
        hint = did_you_mean(PREFIX + env_id.removeprefix(PREFIX), ENV_IDS)
        short = ", ".join(name.removeprefix(PREFIX) for name in ENV_IDS)
        raise ValueError(f"id={env_id!r} is not an environment{hint}; known: {PREFIX} + {short}")
    sets = VARIANTS[env_id]
    if obj_set not in sets:
        raise ValueError(f"obj_set={obj_set!r} must be {' or '.join(sets)} for {env_id}")
    return sets[obj_set]


def episode(env_id: str, obj_set: str, episode_id: int) -> Episode:
    """Everything that an episode id decides."""
    v = variant(env_id, obj_set)
    if not 0 <= episode_id < v.total:
        raise ValueError(f"episode_id={episode_id} must lie in [0, {v.total}) for {env_id} with obj_set={obj_set}")
    object_, plate, extra, image, places, yaw = digits(episode_id, v.radices)
    cells = places_of(v.layout)[places]
    turned = _about_z(v.yaws[yaw])
    index = {"object": v.objects.first + object_, "plate": v.plates.first + plate}
    spots = [(*cell, height) for cell, height in zip(cells, v.heights, strict=False)]
    bodies = {"object": Body(index["object"], spots[0], turned), "plate": Body(index["plate"], spots[1])}
    second: Body | None = None
    if v.extra == "object" or v.extra == "plate":
        second = Body(_second(v, index[v.extra], extra), spots[2], bodies[v.extra].quaternion)
        if second.index == index[v.extra]:  # as published: then there is only one, at the place of the second
            bodies[v.extra], second = second, None
    return Episode(
        env_id=env_id,
        obj_set=obj_set,
        episode_id=episode_id,
        object=bodies["object"],
        plate=bodies["plate"],
        extra_object=second if v.extra == "object" else None,
        extra_plate=second if v.extra == "plate" else None,
        image=v.images.first + image,
        texture=v.texture,
        template=v.extras.first + extra if v.extra == "template" else 0,
        qpos=_start_qpos(v.extras.first + extra) if v.extra == "qpos" else START_QPOS,
        teleport=Teleport(TELEPORT_STEP, spots[2], turned) if v.teleports else None,
    )


def digits(number: int, radices: tuple[int, ...]) -> tuple[int, ...]:
    """Mixed-radix digits, most significant first."""
    found = []
    for radix in reversed(radices):
        number, digit = divmod(number, radix)
        found.append(digit)
    return tuple(reversed(found))


@cache
def places_of(layout: Layout) -> tuple[tuple[Cell, ...], ...]:
    """Cells of object, plate and what is extra, in the order of the digit `places`.

    Distances of exactly 0.15 m occur: the rounding of these very operations on doubles decides which are "further".
    """
    inner = [i * 2 / (CELLS - 1) - 1 for i in range(CELLS)]
    grid = [(x * HALF_EDGE + CENTRE[0], y * HALF_EDGE + CENTRE[1]) for x in inner for y in inner]
    if layout == "pair":
        return tuple((a, b) for a, b in itertools.product(grid, grid) if _distance(a, b) > NEAR)
    if layout == "ring":
        ring = _ring()
        return tuple((a, b) for a, b in itertools.product(ring, ring) if _distance(a, b) > NEAR)
    if layout == "pair or ring":
        return places_of("pair") + places_of("ring")
    object_far, plate_far = (FAR, NEAR) if layout == "second_object" else (NEAR, FAR)
    return tuple(
        (a, b, c)
        for a, b in itertools.product(grid, grid)
        if _distance(a, b) > NEAR
        for c in grid
        if _distance(a, c) > object_far and _distance(b, c) > plate_far
    )


def _ring() -> list[Cell]:
    """The 28 cells around the grid, one pitch outside."""
    pitch = 2 / (CELLS - 1)
    outer = [i * pitch - 1 - pitch for i in range(CELLS + 2)]
    cells = itertools.product(outer, outer)
    return [(x * HALF_EDGE + CENTRE[0], y * HALF_EDGE + CENTRE[1]) for x, y in cells if {x, y} & {outer[0], outer[-1]}]


def _distance(a: Cell, b: Cell) -> float:
    """Metres between two cells, by the very operations that were published."""
    dx, dy = a[0] - b[0], a[1] - b[1]
    return math.sqrt(dx * dx + dy * dy)


def _second(v: Variant, index: int, digit: int) -> int:
    """The distractor's index; as published, the first of the unseen objects counts twice and it may be `index`."""
    if v.extra == "object":
        return (index + digit + 1) % v.objects.count + v.objects.first
    if v.plates.count == 1:  # the training plate beside any other one
        return (index + digit + 1) % NUM_PLATES
    return (index - v.plates.first + digit + 1) % v.plates.count + v.plates.first


def _about_z(angle: float) -> tuple[float, float, float, float]:
    """Quaternion w x y z of a turn about the vertical."""
    return (math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2))


@cache
def _arm_offsets() -> tuple[tuple[float, ...], ...]:
    """EEPose-v1's additions to the arm's start: shoulder and elbow must not both be stretched or folded."""
    bend, turn = (-0.15, -0.08, 0.0, 0.08, 0.15), (-0.6, -0.3, 0.0, 0.3, 0.6)
    return tuple(p for p in itertools.product(*[bend] * 5, turn) if abs(p[1] + p[2]) <= 0.25)


def _start_qpos(pose: int) -> tuple[float, ...]:
    """Where the joints start in EEPose-v1: pose 0 is the usual start, others add to it."""
    if pose == 0:
        return START_QPOS
    offset = (*_arm_offsets()[pose - 1], 0.0, 0.0)
    return tuple(q + d for q, d in zip(START_QPOS, offset, strict=True))
