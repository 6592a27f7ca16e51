"""Bodies that a camera does not see are not drawn.

A rasteriser works through the triangles of every body, and those of two arms are 400,000, most of the time outside of
the picture. Without shadows and mirrors, which `render: fast` leaves out, the picture is the same without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np

from rlinf.simulators.contract import Array

MARGIN = 2.0  # pixels around the picture that count as seen


class Bodies:
    """What SAPIEN draws of a scene (RenderBodyComponent), each with the corners of a box around it."""

    def __init__(self, bodies: Iterable[Any]) -> None:
        self._bodies = [(body, body.visibility, _box(body)) for body in bodies]

    def show_to(self, camera: Any) -> None:
        """Hide the bodies that the camera cannot see where they are now, and show the others."""
        if not self._bodies:
            return
        seen = may_be_seen(np.stack([_moved(box, _matrix(body)) for body, _, box in self._bodies]), camera)
        for (body, visibility, _), inside in zip(self._bodies, seen, strict=True):
            body.visibility = visibility if inside else 0.0


def may_be_seen(corners: Array, camera: Any) -> Array:
    """Whether boxes [N, 8, 3] may reach into the picture, bool [N]: no side of it has a whole box beyond it."""
    placed = _moved(corners, np.asarray(camera.get_extrinsic_matrix()))
    x, y, depth = np.moveaxis(placed @ np.asarray(camera.get_intrinsic_matrix()).T, -1, 0)  # pixels times depth
    beyond = (
        depth < 0.0,
        x < -MARGIN * depth,
        x > (camera.width + MARGIN) * depth,
        y < -MARGIN * depth,
        y > (camera.height + MARGIN) * depth,
    )
    return ~np.any([side.all(-1) for side in beyond], 0)


def _box(body: Any) -> Array:
    """The corners of a box around a body, in its own frame [8, 3]."""
    corners = np.array(list(product(*np.asarray(body.compute_global_aabb_tight()).T)))
    return _moved(corners, np.linalg.inv(_matrix(body)))


def _matrix(body: Any) -> Array:
    return np.asarray(body.entity.pose.to_transformation_matrix())


def _moved(points: Array, matrix: Array) -> Array:
    """Points [..., 3] turned and shifted by a matrix [3 or 4, 4]."""
    return points @ matrix[:3, :3].T + matrix[:3, 3]
