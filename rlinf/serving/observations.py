"""A client's observation in the shapes a policy reads, under the names that openpi, LeRobot and rlinf give its parts.

Letters: H x W pixels, N wrist cameras, S state columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.errors import did_you_mean
from rlinf.models.config import PolicySpec
from rlinf.serving.messages import RequestError

Array = np.ndarray
MAX_SIDE = 4096  # pixels of an image
MAX_PROMPT = 4096  # characters
MAX_STATE = 4096  # columns

# What the policy reads -> names of it, the first of which metadata and errors show. A name may stand below
# `observation/` or `images/`, as nested maps or with `/` or `.` between.
MAIN, WRIST, SECOND_WRIST = CAMERAS = ("main camera", "wrist camera", "second wrist camera")
WRISTS, STATE, PROMPT, JOINTS, GRIPPER = "wrist cameras", "state", "prompt", "joint position", "gripper position"
RESET, SEED, UNUSED = "reset", "seed", "unused"
NAMES = {
    MAIN: ("image", "main", "main_image", "images", "main_images", "cam_high", "base_0_rgb", "exterior_image_1_left"),
    WRIST: ("wrist_image", "wrist", "wrist_0", "wrist_image_left", "cam_left_wrist", "left_wrist_0_rgb"),
    SECOND_WRIST: ("wrist_image_right", "wrist_1", "cam_right_wrist", "right_wrist_0_rgb"),
    WRISTS: ("wrist_images",),
    STATE: ("state", "states"),
    JOINTS: ("joint_position",),
    GRIPPER: ("gripper_position",),
    PROMPT: ("prompt", "instruction", "task", "task_description"),
    RESET: ("reset",),
    SEED: ("seed",),
    UNUSED: ("cam_low", "exterior_image_2_left"),  # cameras that openpi's clients send and its policies do not read
}
_PARTS = {name: part for part, names in NAMES.items() for name in names}
_FOLDERS = ("observation", "observations", "images", "image")


@dataclass(frozen=True)
class Row:
    """What a policy reads of one observation."""

    image: Array  # u8 [H, W, 3]
    wrist_images: Array | None  # u8 [N, h, w, 3]; None where the policy reads none
    state: Array | None  # f32 [S], the columns that the policy reads
    text: str
    reset: bool = False  # a new episode begins here
    seed: int | None = None  # of the new episode

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Rows of equal shapes can share a batch."""
        return self.image.shape, None if self.wrist_images is None else self.wrist_images.shape


def read_observation(message: Mapping[str, Any], spec: PolicySpec, prompt: str | None = None) -> Row:
    """The row of a message; `prompt` is taken where it has none. RequestError names every unknown and missing key."""
    parts, unknown = _parts(message)
    text = _text(*parts[PROMPT]) if PROMPT in parts else prompt
    problems = [f"unknown key {key!r}{did_you_mean(key.rpartition('/')[2], _PARTS)}" for key in unknown]
    if missing := _missing(parts, spec, text):
        problems.append(f"missing: {', '.join(missing)}")
    if problems:
        raise RequestError("; ".join(problems))
    assert text is not None
    state = _state(parts, spec.state_dim) if spec.state_dim else None
    wrist = _wrist_images(parts, spec.num_images - 1) if spec.num_images > 1 else None
    seed = _integer(*parts[SEED]) if SEED in parts else None
    reset = seed is not None or (RESET in parts and _flag(*parts[RESET]))
    return Row(_image(*parts[MAIN]), wrist, state, text, reset, seed)


def _parts(message: Mapping[str, Any]) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Part -> (key, value), and the keys that name none; RequestError where two keys name the same part."""
    parts: dict[str, tuple[str, Any]] = {}
    unknown = []
    for key, value in _leaves(message):
        levels = key.replace(".", "/").split("/")
        while len(levels) > 1 and levels[0] in _FOLDERS:
            levels = levels[1:]
        part = _PARTS.get("/".join(levels))
        if part is None:
            unknown.append(key)
        elif part in parts and part != UNUSED:
            raise RequestError(f"keys {parts[part][0]!r} and {key!r} both name the {part}")
        else:
            parts[part] = key, value
    return parts, unknown


def _leaves(message: Mapping[Any, Any], folder: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; maps in maps are opened."""
    for name, value in message.items():
        key = folder + (name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name))
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{key}/")
        else:
            yield key, value


def _missing(parts: Mapping[str, Any], spec: PolicySpec, text: str | None) -> list[str]:
    """What the policy reads and the message lacks, with the names it may have."""
    needed = list(CAMERAS[:1] if WRISTS in parts else CAMERAS[: spec.num_images])
    if spec.state_dim and not (JOINTS in parts and GRIPPER in parts):
        needed.append(STATE)
    missing = [f"{part} ({' or '.join(NAMES[part])})" for part in needed if part not in parts]
    return missing if text is not None else [*missing, f"{PROMPT} ({' or '.join(NAMES[PROMPT])})"]


def _image(key: str, value: Any) -> Array:
    """u8 [H, W, 3] of one camera: channels may come first, and floats run from 0 to 1."""
    if not isinstance(value, Array) or value.ndim != 3 or 3 not in (value.shape[0], value.shape[2]):
        raise RequestError(f"{key!r} must be an image of shape [height, width, 3], got {_described(value)}")
    if value.shape[2] != 3:
        value = value.transpose(1, 2, 0)
    if not 1 <= min(value.shape[:2]) <= max(value.shape[:2]) <= MAX_SIDE:
        raise RequestError(f"{key!r} is {value.shape[0]}x{value.shape[1]} pixels; a side may have 1 to {MAX_SIDE}")
    if value.dtype.kind == "f":
        if not (value.min() >= 0.0 and value.max() <= 1.0):
            raise RequestError(f"{key!r} holds floats outside of 0 to 1; send uint8, or floats in that range")
        value = (value * 255.0).astype(np.uint8)
    elif value.dtype != np.uint8:
        raise RequestError(f"{key!r} must be uint8, got {value.dtype}")
    return value


def _wrist_images(parts: Mapping[str, tuple[str, Any]], count: int) -> Array:
    """u8 [N, h, w, 3]: the first `count` wrist cameras."""
    if WRISTS in parts:
        key, value = parts[WRISTS]
        if not isinstance(value, Array) or value.ndim != 4 or len(value) < count:
            raise RequestError(
                f"{key!r} must be [cameras, height, width, 3] of {count} or more, got {_described(value)}"
            )
        images = [_image(f"{key}[{i}]", value[i]) for i in range(count)]
    else:
        images = [_image(*parts[part]) for part in CAMERAS[1 : 1 + count]]
    if len({image.shape for image in images}) > 1:
        sizes = ", ".join(f"{image.shape[0]}x{image.shape[1]}" for image in images)
        raise RequestError(f"wrist cameras must have one size, got {sizes} pixels")
    return images[0][None] if count == 1 else np.stack(images)


def _state(parts: Mapping[str, tuple[str, Any]], columns: int) -> Array:
    """f32 [S]: the first `columns` of the robot state; joints and gripper follow one another."""
    keys = [STATE] if STATE in parts else [JOINTS, GRIPPER]
    names = " and ".join(repr(parts[part][0]) for part in keys)
    found = []
    for key, value in (parts[part] for part in keys):
        try:
            vector = np.atleast_1d(np.asarray(value))
        except ValueError as error:
            raise RequestError(f"{key!r} must be a list of numbers") from error
        if vector.ndim != 1 or vector.dtype.kind not in "biuf" or len(vector) > MAX_STATE:
            raise RequestError(f"{key!r} must be a list of numbers, got {_described(vector)}")
        found.append(vector.astype(np.float32))
    state = np.concatenate(found)
    if len(state) < columns:
        raise RequestError(f"{names}: the policy reads {columns} state columns, got {len(state)}")
    if not np.isfinite(state).all():
        raise RequestError(f"{names}: column {int(np.isfinite(state).argmin())} is not a finite number")
    return state[:columns]


def _text(key: str, value: Any) -> str:
    if isinstance(value, Array) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise RequestError(f"{key!r} must be text, got {_described(value)}")
    if len(value) > MAX_PROMPT:
        raise RequestError(f"{key!r} has {len(value)} characters; at most {MAX_PROMPT}")
    return str(value)


def _integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(f"{key!r} must be an integer, got {_described(value)}")
    return int(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise RequestError(f"{key!r} must be true or false, got {_described(value)}")
    return bool(value)


def _described(value: Any) -> str:
    """A value for an error: type, and the shape of an array."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Array) else f"a {type(value).__name__}"
