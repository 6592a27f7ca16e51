"""What explains numbers and pictures that differ: each mistake is known again from what it does."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.demos.mistakes import action_mistakes, picture_mistakes, state_mistakes, statistics_mistakes

RNG = np.random.default_rng(0)
NAMES = ("x", "y", "gripper")
WANTED = RNG.uniform(-1, 1, (30, 4, 3))
WANTED[..., 2] = np.sign(WANTED[..., 2])
STATES = RNG.uniform(-3, 3, (30, 2))


def explained(got: np.ndarray) -> list[str]:
    return action_mistakes(WANTED, got, names=NAMES, tolerance=np.full(3, 1e-4), states=[STATES[:, None]])


def with_column(column: int, values: np.ndarray) -> np.ndarray:
    got = WANTED.copy()
    got[..., column] = values
    return got


@pytest.mark.parametrize(
    ("got", "line"),
    [
        (with_column(2, -WANTED[..., 2]), "gripper (column 2): sign reversed"),
        (with_column(2, WANTED[..., 2] > 0), "gripper (column 2): -1 and 1 have become 0 and 1"),
        (with_column(2, WANTED[..., 2] < 0), "gripper (column 2): -1 and 1 have become 1 and 0"),
        (with_column(0, WANTED[..., 1]), "x (column 0): holds y (column 1): columns are swapped"),
        (with_column(0, WANTED[..., 0] + STATES[:, :1]), "x (column 0): absolute: the state's column 0 is added"),
        (with_column(0, WANTED[..., 0] - STATES[:, :1]), "x (column 0): relative: the state's column 0 is taken"),
        (with_column(1, 0.1 * WANTED[..., 1] + STATES[:, 1:]), "y (column 1): absolute: it follows the state's column"),
        (with_column(1, 3 * WANTED[..., 1] + 0.5), "y (column 1): is 3 times what it should be +0.5: statistics"),
        (with_column(1, np.zeros(WANTED.shape[:2])), "y (column 1): is always 0"),
        (with_column(1, RNG.uniform(-1, 1, (30, 4))), "y (column 1): differs, for no reason that is known"),
        (WANTED[:, ::-1], "x, y, gripper (columns 0, 1, 2): the actions of a chunk are in reverse order"),
        (np.roll(WANTED, 1, 1), "actions come one step later than they were recorded"),
        (np.roll(WANTED, -1, 1), "actions come one step earlier than they were recorded"),
        (np.repeat(WANTED[:, :1], 4, 1), "the first action of a chunk is repeated"),
    ],
)
def test_mistakes_in_actions(got, line):
    lines = explained(got)
    assert len(lines) == 1
    assert line in lines[0]


def test_actions_that_are_right_up_to_rounding():
    assert explained(WANTED + 1e-5) == []


def test_values_that_do_not_count_are_not_compared():
    counted = np.ones(WANTED.shape, bool)
    counted[:, 2] = False
    got = np.where(counted, WANTED, 9.0)
    assert action_mistakes(WANTED, got, names=NAMES, tolerance=np.full(3, 1e-4), counted=counted) == []


def turned(states: np.ndarray, order: list[int]) -> np.ndarray:
    out = states.copy()
    out[:, 1:5] = out[:, 1:5][:, order]
    return out


def test_mistakes_in_states():
    states = RNG.uniform(0.5, 1, (20, 6))
    states[:, 1:5] /= np.linalg.norm(states[:, 1:5], axis=1, keepdims=True)
    assert state_mistakes(states, states) == []
    (line,) = state_mistakes(turned(states, [1, 2, 3, 0]), states)
    assert line == (
        "columns 1 to 4 hold a quaternion in another order: x y z w in the dataset where the simulator has w x y z"
    )
    (line,) = state_mistakes(turned(states, [3, 0, 1, 2]), states)
    assert "w x y z in the dataset where the simulator has x y z w" in line
    opposite = states * [1, -1, -1, -1, -1, 1]
    assert "of the opposite sign" in state_mistakes(opposite, states)[0]
    assert state_mistakes(states[:, [5, 1, 2, 3, 4, 0]], states) == [
        "columns are swapped: the dataset's column 5 is the simulator's column 0, column 0 is the simulator's column 5"
    ]
    assert state_mistakes(states * [1, 1, 1, 1, 1, -1], states) == ["column 5: sign reversed"]
    degrees = states * [np.rad2deg(1.0), 1, 1, 1, 1, 1]
    assert state_mistakes(degrees, states) == [
        "column 0: 57.3 times what the simulator gives: degrees and radians are mixed up"
    ]
    assert "differs by up to 1 " in state_mistakes(states + np.eye(6)[5], states)[0]


SMOOTH = np.add.outer(np.linspace(0, 120, 24), np.linspace(0, 60, 24))[..., None] * [1.0, 0.6, 0.2]
PICTURES = (SMOOTH + RNG.uniform(0, 40, (5, 2, 24, 24, 3))).astype(np.uint8)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x[:, :, ::-1], "flipped vertically (upside down)"),
        (lambda x: x[:, :, :, ::-1], "flipped horizontally (mirrored)"),
        (lambda x: x[:, :, ::-1, ::-1], "turned by 180 degrees"),
        (lambda x: np.rot90(x, 1, (2, 3)), "turned by 270 degrees"),
        (lambda x: x[..., ::-1], "with the colours red and blue swapped"),
        (lambda x: x[:, ::-1], "those of camera wrist_0"),
    ],
)
def test_mistakes_in_pictures(change, what):
    lines = picture_mistakes(change(PICTURES), PICTURES, ["main", "wrist_0"])
    assert len(lines) == 2
    assert f"camera main: the dataset's pictures are {what};" in lines[0]


def test_pictures_of_something_else_and_of_a_codec():
    other = (255 - PICTURES[::-1, :, ::-1]).astype(np.uint8)
    assert all("no turn or swap explains it" in line for line in picture_mistakes(other, PICTURES, ["main", "wrist_0"]))
    lossy = np.clip(PICTURES.astype(int) + RNG.integers(-3, 4, PICTURES.shape), 0, 255).astype(np.uint8)
    assert picture_mistakes(lossy, PICTURES, ["main", "wrist_0"]) == []


def test_statistics_that_are_far_too_wide_are_named():
    normal = np.random.default_rng(0).normal(0, 0.43, (500, 3))
    assert statistics_mistakes(normal, "xyz", clips=False) == []
    (line,) = statistics_mistakes(normal / 50, "xyz", clips=False)
    assert line == "x, y, z: the range is 51 times too wide for the demonstrations"
    still = normal * [1, 1, 0]  # a column that these demonstrations do not move
    assert statistics_mistakes(still, "xyz", clips=True) == []
