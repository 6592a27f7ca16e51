"""simulators/robotwin/unseen: bodies outside of a camera's picture are hidden, all others are shown as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.simulators.robotwin.unseen import Bodies

CAMERA = SimpleNamespace(  # at the origin, looking along z; a point at depth d is seen up to 0.5 d from the axis
    width=100,
    height=100,
    get_extrinsic_matrix=lambda: np.eye(4)[:3],
    get_intrinsic_matrix=lambda: np.array([[100.0, 0.0, 50.0], [0.0, 100.0, 50.0], [0.0, 0.0, 1.0]]),
)


class Body:
    """A cube with edges of 0.2, whose centre may be moved and turned."""

    def __init__(self, *place: float, visibility: float = 1.0) -> None:
        self.place, self.turn, self.visibility = np.array(place), np.eye(3), visibility
        self.entity = SimpleNamespace(pose=SimpleNamespace(to_transformation_matrix=self._matrix))

    def _matrix(self) -> Any:
        matrix = np.eye(4)
        matrix[:3, :3], matrix[:3, 3] = self.turn, self.place
        return matrix

    def compute_global_aabb_tight(self) -> Any:
        return np.stack((self.place - 0.1, self.place + 0.1))


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        ((0.0, 0.0, 2.0), True),
        ((1.05, 0.0, 2.0), True),  # reaches into the picture
        ((1.3, 0.0, 2.0), False),
        ((-1.3, 0.0, 2.0), False),
        ((0.0, 1.3, 2.0), False),
        ((0.0, -1.3, 2.0), False),
        ((0.0, 0.0, -2.0), False),  # behind the camera
        ((0.0, 0.0, 0.0), True),  # around it
    ],
)
def test_a_body_is_hidden_where_the_camera_cannot_see_it(place: tuple[float, ...], seen: bool) -> None:
    body = Body(*place)
    Bodies([body]).show_to(CAMERA)
    assert bool(body.visibility) is seen


def test_a_body_that_moves_or_turns_into_view_is_shown_as_it_was() -> None:
    body, glass = Body(1.3, 0.0, 2.0), Body(0.0, 0.0, 2.0, visibility=0.5)
    bodies = Bodies([body, glass])
    bodies.show_to(CAMERA)
    assert (body.visibility, glass.visibility) == (0.0, 0.5)
    body.place = np.array([0.5, 0.0, 2.0])
    bodies.show_to(CAMERA)
    assert body.visibility == 1.0
    body.place = np.array(
        [1.21, 0.0, 2.0]
    )  # its nearest face lies beyond the picture, a corner of the turned cube within
    bodies.show_to(CAMERA)
    assert body.visibility == 0.0
    half = np.sqrt(0.5)
    body.turn = np.array([[half, -half, 0.0], [half, half, 0.0], [0.0, 0.0, 1.0]])
    bodies.show_to(CAMERA)
    assert body.visibility == 1.0


def test_without_bodies_the_camera_is_asked_nothing() -> None:
    Bodies(()).show_to(None)
