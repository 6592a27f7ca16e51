"""Observations under the names of openpi's robots, of LeRobot and of rlinf; and what is said of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgpack")

from rlinf.models.config import PolicySpec
from rlinf.serving.messages import RequestError
from rlinf.serving.observations import NAMES, UNUSED, Row, read_observation

SPEC = PolicySpec(
    action_dim=4,
    num_action_chunks=5,
    image_size=64,
    num_images=2,
    state_dim=8,
    has_logprob=True,
    has_value=False,
    values_per_chunk=1,
    critic_state_dim=0,
)
PAGE = Path(__file__).parents[2] / "docs/serve.md"
RNG = np.random.default_rng(0)
MAIN, LEFT, RIGHT = (RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8) for _ in range(3))
STATE = RNG.random(8)
LIBERO = {
    "observation/image": MAIN,
    "observation/wrist_image": LEFT,
    "observation/state": STATE,
    "prompt": "open the drawer",
}


def first(image: np.ndarray) -> np.ndarray:
    """Channels first."""
    return image.transpose(2, 0, 1)


def check(row: Row) -> None:
    assert np.array_equal(row.image, MAIN)
    assert row.wrist_images is not None
    assert np.array_equal(row.wrist_images[0], LEFT)
    assert row.state is not None
    assert np.array_equal(row.state, STATE.astype(np.float32))
    assert row.text == "open the drawer"


@pytest.mark.parametrize(
    "message",
    [
        LIBERO,
        {
            "observation/exterior_image_1_left": MAIN,
            "observation/exterior_image_2_left": RIGHT,
            "observation/wrist_image_left": LEFT,
            "observation/joint_position": STATE[:7],
            "observation/gripper_position": STATE[7:],
            "prompt": b"open the drawer",
        },
        {
            "images": {"cam_high": first(MAIN), "cam_low": first(RIGHT)}
            | {"cam_left_wrist": first(LEFT), "cam_right_wrist": first(RIGHT)},
            "state": STATE,
            "prompt": np.array("open the drawer"),
        },
        {"image": {"base_0_rgb": MAIN, "left_wrist_0_rgb": LEFT}, "state": STATE, "prompt": "open the drawer"},
        {
            "observation.images.main": MAIN,
            "observation.images.wrist_0": LEFT,
            "observation.state": STATE.tolist(),
            "task": "open the drawer",
        },
        {"observation": {"image": MAIN, "wrist_image": LEFT, "state": STATE}, "prompt": "open the drawer"},
        {
            "images": MAIN,
            "wrist_images": np.stack([LEFT, RIGHT]),
            "states": np.append(STATE, 9.0),
            "instruction": "open the drawer",
        },
    ],
    ids=["libero", "droid", "aloha", "openpi model", "lerobot", "nested", "rlinf"],
)
def test_names_of_every_robot(message: dict[str, Any]):
    row = read_observation(message, SPEC)
    check(row)
    assert row.shapes == ((6, 8, 3), (1, 6, 8, 3))  # what is not read splits no batch


def test_a_policy_of_three_cameras_takes_left_then_right():
    message = {"images": {"cam_right_wrist": RIGHT, "cam_high": MAIN, "cam_left_wrist": LEFT}, "state": STATE}
    row = read_observation(message, replace(SPEC, num_images=3), prompt="open the drawer")
    check(row)
    assert row.wrist_images is not None
    assert np.array_equal(row.wrist_images[1], RIGHT)


def test_a_policy_of_one_camera_and_no_state_needs_neither():
    row = read_observation(LIBERO, replace(SPEC, num_images=1, state_dim=0))
    assert row.wrist_images is None
    assert row.state is None


def test_floats_are_scaled_as_openpi_scales_them():
    image = np.full((6, 8, 3), 0.5, np.float32)
    assert (
        read_observation(LIBERO | {"observation/image": image}, SPEC).image.tolist() == np.full((6, 8, 3), 127).tolist()
    )


def test_an_episode_begins_on_request():
    assert not read_observation(LIBERO, SPEC).reset
    assert read_observation(LIBERO | {"reset": np.True_}, SPEC).reset
    row = read_observation(LIBERO | {"seed": 7}, SPEC)
    assert (row.reset, row.seed) == (True, 7)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LIBERO.items() if key not in keys}


@pytest.mark.parametrize(
    ("message", "texts"),
    [
        (LIBERO | {"observation/imagee": 1}, ["unknown key 'observation/imagee' (did you mean 'image'?)"]),
        (LIBERO | {"images": {"cam_top": MAIN}}, ["unknown key 'images/cam_top'"]),
        (without("observation/image"), ["missing: main camera (image or main or"]),
        (
            without("observation/wrist_image", "prompt"),
            ["missing: wrist camera (wrist_image or", ", prompt (prompt or"],
        ),
        (
            without("observation/state") | {"stat": STATE},
            ["unknown key 'stat' (did you mean 'state'?); missing: state"],
        ),
        (without("observation/state") | {"joint_position": STATE}, ["missing: state (state or states)"]),
        ({}, ["missing: main camera", "wrist camera", "state", "prompt"]),
        (LIBERO | {"cam_high": MAIN}, ["keys 'observation/image' and 'cam_high' both name the main camera"]),
        (LIBERO | {"observation/image": MAIN[..., :2]}, ["[height, width, 3], got uint8 [6, 8, 2]"]),
        (LIBERO | {"observation/image": MAIN[None]}, ["[height, width, 3], got uint8 [1, 6, 8, 3]"]),
        (LIBERO | {"observation/image": "png"}, ["'observation/image' must be an image", "got a str"]),
        (LIBERO | {"observation/image": MAIN.astype(np.int64)}, ["must be uint8, got int64"]),
        (LIBERO | {"observation/image": MAIN.astype(float)}, ["floats outside of 0 to 1"]),
        (LIBERO | {"observation/image": np.full((6, 8, 3), np.nan)}, ["floats outside of 0 to 1"]),
        (
            LIBERO | {"observation/image": np.zeros((4097, 1, 3), np.uint8)},
            ["4097x1 pixels; a side may have 1 to 4096"],
        ),
        (LIBERO | {"observation/image": np.zeros((0, 8, 3), np.uint8)}, ["0x8 pixels"]),
        (LIBERO | {"observation/state": STATE[:7]}, ["the policy reads 8 state columns, got 7"]),
        (LIBERO | {"observation/state": np.full(8, np.inf)}, ["column 0 is not a finite number"]),
        (LIBERO | {"observation/state": STATE[None]}, ["must be a list of numbers, got float64 [1, 8]"]),
        (LIBERO | {"observation/state": [[1], [1, 2]]}, ["must be a list of numbers"]),
        (LIBERO | {"observation/state": "ready"}, ["must be a list of numbers"]),
        (LIBERO | {"prompt": 3}, ["'prompt' must be text, got a int"]),
        (LIBERO | {"prompt": "x" * 5000}, ["5000 characters; at most 4096"]),
        (LIBERO | {"seed": 1.5}, ["'seed' must be an integer"]),
        (LIBERO | {"reset": "yes"}, ["'reset' must be true or false"]),
        (without("observation/wrist_image") | {"wrist_images": LEFT}, ["of 1 or more, got uint8 [6, 8, 3]"]),
    ],
)
def test_mistakes_are_named_in_one_line(message: dict[str, Any], texts: list[str]):
    with pytest.raises(RequestError) as caught:
        read_observation(message, SPEC)
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrist_cameras_of_two_sizes_are_refused():
    message = {"images": {"cam_high": MAIN, "cam_left_wrist": LEFT, "cam_right_wrist": RIGHT[:5]}, "state": STATE}
    with pytest.raises(RequestError, match="one size, got 6x8, 5x8 pixels"):
        read_observation(message, replace(SPEC, num_images=3), prompt="go")


def test_the_page_lists_every_name():
    text = PAGE.read_text(encoding="utf-8")
    names = [name for part, names in NAMES.items() if part != UNUSED for name in names]
    assert [name for name in names if f"`{name}`" not in text] == []
