"""Bodies that a camera does not see are not drawn.

A rasteriser works through the triangles of every body, and those of two arms are 400,000, most of the time outside of
the picture. Without shadows and mirrors, which `render: fast` leaves out, the picture is the same without them.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from rlinf.simulators.contract import Array

MARGIN = 2.0  # pixels around the picture that count as seen


class Bodies:
    """The drawn bodies of a scene, each with the corners of a box around it."""

    def __init__(self, scene: Any) -> None:
        self._bodies, boxes = [], []
        for entity in scene.get_entities():
            for body in entity.components:
                if hasattr(body, "visibility"):
                    corners = np.array(list(product(*np.asarray(body.compute_global_aabb_tight()).T)))
                    self._bodies.append((body, body.visibility))
                    boxes.append(_moved(corners, np.linalg.inv(_matrix(body))))
        self._boxes = np.array(boxes)  # [bodies, 8, 3], each in its body's frame

    def show_to(self, camera: Any) -> None:
        """Hide the bodies that the camera cannot see where they are now, and show the others."""
        if not self._bodies:
            return
        corners = np.stack(
            [_moved(box, _matrix(body)) for box, (body, _) in zip(self._boxes, self._bodies, strict=True)]
        )
        seen = may_be_seen(corners, camera)
        for (body, visibility), inside in zip(self._bodies, seen, strict=True):
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


def _matrix(body: Any) -> Array:
    return np.asarray(body.entity.pose.to_transformation_matrix())


def _moved(points: Array, matrix: Array) -> Array:
    """Points [..., 3] turned and shifted by a matrix [3 or 4, 4]."""
    return points @ matrix[:3, :3].T + matrix[:3, 3]
