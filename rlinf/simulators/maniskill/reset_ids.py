"""Which environments a run plays, and which of their episode ids belong to training, demonstrations and evaluation.

A reset id is the published episode id; in the suite `ood` it is row * STRIDE + episode id, and so in a list, where rows
count from LISTED on and are the same in every list. What is held out is a fixed shuffle's beginning, so that any run of
ids mixes objects, images, places and yaws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.simulators.contract import ComputedIds
from rlinf.simulators.maniskill.tasks import PREFIX, VARIANTS, variant

OOD = "ood"
STRIDE = 10**11  # above every number of episode ids
LISTED = 100  # above every row of the suite
OBJ_SETS = ("train", "test", "all")
HELD_OUT = 4096  # ids of a training set that only evaluations play, or an eighth of a small one
TEST_IDS = 65536  # evaluations of a test set choose among this many of its ids
OOD_GROUPS = {  # rows of the suite by what they test; an environment's test set, unless it says train
    "IND": ("Carrot-v1-train",),  # the very ids of Main-v3's training set
    "Vision": ("VisionImage-v1", "VisionTexture03-v1", "VisionTexture05-v1", "VisionWhole03-v1", "VisionWhole05-v1"),
    "Semantic": (
        "Carrot-v1",
        "Plate-v1",
        "Instruct-v1",
        "MultiCarrot-v1-train",
        "MultiCarrot-v1",
        "MultiPlate-v1-train",
        "MultiPlate-v1",
    ),
    "Execution": ("Position-v1", "EEPose-v1", "PositionChangeTo-v1"),
}
OOD_ROWS = tuple(row for rows in OOD_GROUPS.values() for row in rows)
Row = tuple[str, str]  # environment id, obj_set


def rows_of(env_id: str, obj_set: str) -> tuple[Row, ...]:
    """The environments that an id plays: itself, or those of the published out-of-distribution evaluation."""
    return tuple(_row(name, obj_set) for name in task_names(env_id))


def _row(name: str, obj_set: str) -> Row:
    """The environment of an id with `obj_set`, or of a row of the suite `ood`, which has its own."""
    if name not in OOD_ROWS:
        return name, obj_set
    return PREFIX + name.removesuffix("-train"), "train" if name.endswith("-train") else "test"


def numbered_rows(env_id: str, obj_set: str, listed: Sequence[str] = ()) -> dict[int, tuple[str, Row]]:
    """Name and environment by the number that its reset ids begin with: of an id, or of all ids of a list."""
    if listed:
        rows = {name: _row(name, obj_set) for name in listed}
        return {_listed_number(row): (name, row) for name, row in rows.items()}
    return dict(enumerate(zip(task_names(env_id), rows_of(env_id, obj_set), strict=True)))


def _listed_number(row: Row) -> int:
    """The number of an environment in any list."""
    return LISTED + [(env_id, obj_set) for env_id in VARIANTS for obj_set in OBJ_SETS].index(row)


def task_names(env_id: str) -> tuple[str, ...]:
    """Names of the environments that an id plays, as tables call them."""
    return OOD_ROWS if env_id == OOD else (env_id,)


def task_groups(env_id: str) -> dict[str, tuple[str, ...]]:
    """The rows of the suite by what they test, then all but the trained ones, then all.

    The published tables call the mean over all, IND among them, "Average of OOD".
    """
    if env_id != OOD:
        return {}
    return OOD_GROUPS | {"OOD": tuple(row for row in OOD_ROWS if row not in OOD_GROUPS["IND"]), "Average": OOD_ROWS}


def reset_ids(env_id: str, obj_set: str, trials_per_task: int, *, listed: bool = False) -> dict[str, Sequence[int]]:
    """EnvSpec.reset_ids of an id: nothing of a test set, or of the suite, is ever trained on."""
    if listed:
        row = _row(env_id, obj_set)
        split = _split(*row, row_number=_listed_number(row))
        return split | {"eval": split["eval"][:trials_per_task]}
    if env_id == OOD:
        rows = [_split(*row, row_number=n)["eval"][:trials_per_task] for n, row in enumerate(rows_of(env_id, obj_set))]
        return {"train": (), "demo": (), "eval": tuple(i for row in rows for i in row)}
    return _split(*_row(env_id, obj_set))


def _split(env_id: str, obj_set: str, row_number: int = 0) -> dict[str, Sequence[int]]:
    """The ids of one environment by what they are for; a test set is for evaluation only."""
    total, offset = variant(env_id, obj_set).total, row_number * STRIDE
    if obj_set == "test" and VARIANTS[env_id]["train"] != VARIANTS[env_id]["test"]:
        return {"train": (), "demo": (), "eval": ShuffledIds(total, range(min(total, TEST_IDS)), offset)}
    held_out, demos = min(HELD_OUT, total // 8), total // 4
    edges = {"eval": (0, held_out), "demo": (held_out, held_out + demos), "train": (held_out + demos, total)}
    return {name: ShuffledIds(total, range(*span), offset) for name, span in edges.items()}


@dataclass(frozen=True)
class ShuffledIds(ComputedIds):
    """`places` of a fixed shuffle of 0 ... total - 1, without writing it out."""

    total: int
    places: range
    offset: int = 0  # added to every id

    def __len__(self) -> int:
        return len(self.places)

    def at(self, position: int) -> int:
        """The id at a position from 0 on."""
        return self.offset + _shuffle(self.places[position], self.total, forwards=True)

    def __contains__(self, reset_id: object) -> bool:
        if not isinstance(reset_id, int) or not 0 <= reset_id - self.offset < self.total:
            return False
        return _shuffle(reset_id - self.offset, self.total, forwards=False) in self.places


def _shuffle(number: int, total: int, *, forwards: bool) -> int:
    """Where a Feistel network on the next even number of bits sends `number`, walking on until that is below total."""
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for key in _KEYS if forwards else reversed(_KEYS):
            if forwards:
                left, right = right, left ^ (_scatter(right, key) & mask)
            else:
                left, right = right ^ (_scatter(left, key) & mask), left
        number = left << half | right
        if number < total:
            return number


_KEYS = (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)


def _scatter(number: int, key: int) -> int:
    """Mix a number and a key into 32 bits."""
    number = (number ^ key) * 0x2C1B3C6D & 0xFFFFFFFF
    number = (number ^ number >> 12) * 0x297A2D39 & 0xFFFFFFFF
    return number ^ number >> 15
