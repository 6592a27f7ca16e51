"""Which feature of a dataset is which input of a policy: `sft.features`, or names that datasets usually have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.demos.writer import ACTION, MAIN_IMAGE, PRIVILEGED, STATE
from rlinf.errors import UserError, did_you_mean

KEY = "sft.features"
INPUTS = ("main", "wrist_0", "wrist_1", "state", "action", "privileged")  # what sft.features may name
USUAL = {"action": (ACTION, "actions"), "state": (STATE, "state"), "privileged": (PRIVILEGED,)}
CAMERA_KINDS = ("image", "video")
NUMBER_KINDS = ("float", "int", "uint", "bool")
Features = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class FeatureMap:
    """The features that a policy reads, by name; those of `state` and `action` are put side by side."""

    cameras: tuple[str, ...]  # main first, then wrist cameras
    action: tuple[str, ...]
    state: tuple[str, ...] = ()
    privileged: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """Every feature that is read as columns of numbers, once."""
        return tuple(dict.fromkeys((*self.action, *self.state, *self.privileged)))

    def text(self) -> str:
        """One line for the console: input <- feature."""
        cameras = zip(("main", "wrist_0", "wrist_1", "wrist_2", "wrist_3"), self.cameras, strict=False)
        pairs = [*cameras, ("state", " + ".join(self.state)), ("action", " + ".join(self.action))]
        return ", ".join(f"{name} <- {feature}" for name, feature in pairs if feature)


def map_features(features: Features, given: Mapping[str, Any]) -> FeatureMap:
    """The map of a dataset with these features; `given`, dataset name -> input, wins over usual names."""
    for name, use in given.items():
        if name not in features:
            raise UserError(
                f"{KEY}: the dataset has no feature {name!r}{did_you_mean(name, features)}; it has: {_shown(features)}"
            )
        if use not in INPUTS:
            raise UserError(
                f"{KEY}: {name}: {use!r} is no input of a policy{did_you_mean(use, INPUTS)}; choose from "
                f"{', '.join(INPUTS)}"
            )
        kinds = CAMERA_KINDS if use not in USUAL else NUMBER_KINDS
        if not str(features[name]["dtype"]).startswith(kinds):
            raise UserError(f"{KEY}: {name} is of kind {features[name]['dtype']}, which cannot be {use!r}")
    columns = {use: _columns(features, given, use) for use in USUAL}
    cameras = _cameras(features, given)
    for use, names in columns.items():
        for name in names:
            if len(features[name]["shape"]) != 1:
                raise UserError(f"feature {name!r} has shape {features[name]['shape']}; {use} needs columns: [n]")
    for name in cameras:
        image_size(name, features[name])
    if not columns["action"] or not cameras:
        lacking = "main" if columns["action"] else "action"
        raise UserError(
            f"the dataset has no feature that is usually {lacking!r}; name one with {KEY}={{NAME: {lacking}}}; it has: "
            f"{_shown(features)}"
        )
    return FeatureMap(cameras, columns["action"], columns["state"], columns["privileged"])


def image_size(name: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of a camera, whose channels may come first or last."""
    shape, names = list(feature["shape"]), feature.get("names")
    first = names[0] if isinstance(names, list) and names else ""
    channels_first = len(shape) == 3 and (str(first).startswith("channel") or (shape[0] == 3 and shape[2] != 3))
    if channels_first:
        shape = [*shape[1:], shape[0]]
    if len(shape) != 3 or shape[2] != 3:
        raise UserError(f"camera {name!r} has shape {feature['shape']}; it must have height, width and 3 colours")
    return shape[0], shape[1]


def _columns(features: Features, given: Mapping[str, str], use: str) -> tuple[str, ...]:
    """Features of numbers for one input."""
    if named := tuple(name for name, to in given.items() if to == use):
        return named
    usual = [name for name in USUAL[use] if name in features and name not in given]
    return tuple(name for name in usual[:1] if str(features[name]["dtype"]).startswith(NUMBER_KINDS))


def _cameras(features: Features, given: Mapping[str, str]) -> tuple[str, ...]:
    """Those that the map names, in the order of the inputs; without any all there are, the main one first."""
    named = {use: name for name, use in given.items() if use not in USUAL}
    if named:
        if len(named) < sum(use not in USUAL for use in given.values()):
            raise UserError(f"{KEY}={dict(given)} names two cameras for one input")
        places = [use for use in INPUTS if use in named]
        if places != list(INPUTS[: len(places)]):
            raise UserError(f"{KEY} names cameras for {', '.join(places)}: main comes first, then wrist_0, wrist_1")
        return tuple(named[use] for use in places)
    cameras = [name for name, feature in features.items() if feature["dtype"] in CAMERA_KINDS]
    return tuple(sorted(cameras, key=lambda name: (name != MAIN_IMAGE, "wrist" in name, name)))


def _shown(features: Features) -> str:
    return ", ".join(f"{name} ({feature['dtype']})" for name, feature in features.items())
