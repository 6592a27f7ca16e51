"""The published picture of many envs at once, in torch on the device that drew them; `picture` is the same for one.

Letters: B envs, H and W the picture's height and width, h and w those of a texture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import sapien
import torch
from torch import Tensor

from rlinf.simulators.maniskill.assets import TableImage
from rlinf.simulators.maniskill.family import Texture
from rlinf.simulators.maniskill.picture import interpolation, shrink
from rlinf.simulators.maniskill.studio import NATIVE_SIZE

ENVS_AT_ONCE = 32  # bounds the memory for textures


class Backdrops:
    """The table images of an id, and its textures where it has some, ready on the device."""

    def __init__(
        self,
        images: Mapping[int, TableImage],
        texture: Texture | None,
        size: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._number = {index: n for n, index in enumerate(images)}
        self._texture, self._size = texture, size
        self._images = torch.stack([_read(image.picture, size) for image in images.values()]).to(device)
        if texture is not None:
            files = [_read(image.texture, NATIVE_SIZE) for image in images.values()]
            self._textures = torch.stack(files).float().to(device)
            self._shares = torch.tensor([texture.ratio * image.mix for image in images.values()], device=device)

    def compose(self, drawn: Tensor, bodies: Tensor, images: Sequence[int]) -> Tensor:
        """Drawing u8 [B, H, W, 3] and where robot and bodies are, bool [B, H, W] -> the picture u8 [B, H, W, 3]."""
        numbers = torch.tensor([self._number[index] for index in images], device=self._images.device)
        picture = torch.where(bodies[..., None], drawn, self._images[numbers])
        if self._texture is not None:
            for rows in torch.arange(len(picture), device=picture.device).split(ENVS_AT_ONCE):
                picture[rows] = self._blend(picture[rows], bodies[rows], numbers[rows])
        return picture

    def _blend(self, picture: Tensor, bodies: Tensor, numbers: Tensor) -> Tensor:
        assert self._texture is not None
        boxes = _boxes(bodies)
        whole = self._texture.area == "whole"
        down = [_window(box[0], box[1], n, m, whole) for box, n, m in self._axes(boxes[:, :2], 0)]
        across = [_window(box[0], box[1], n, m, whole) for box, n, m in self._axes(boxes[:, 2:], 1)]
        over = _gather(self._textures[numbers], _stacked(down, picture.device), _stacked(across, picture.device))
        share = self._shares[numbers][:, None, None].expand(bodies.shape)
        if whole:
            over = torch.floor(over + 0.5)
        else:
            share = share * bodies
        share = share[..., None]
        return torch.where(share > 0, over * share + picture * (1 - share), picture).to(torch.uint8)

    def _axes(self, spans: np.ndarray, axis: int) -> list[tuple[np.ndarray, int, int]]:
        return [(span, NATIVE_SIZE[axis], self._size[axis]) for span in spans]


def _boxes(bodies: Tensor) -> np.ndarray:
    """First and past-the-last row and column of each mask, [B, 4]; the whole picture where there is none."""
    edges = []
    for axis in (2, 1):
        hit = bodies.any(axis)
        hit |= ~hit.any(1, keepdim=True)
        size = hit.shape[1]
        edges += [hit.int().argmax(1), size - hit.flip(1).int().argmax(1)]
    return torch.stack(edges, 1).cpu().numpy()


def _window(first: int, end: int, source: int, size: int, whole: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per pixel of one side: the texture's lower and upper neighbour and the upper one's weight."""
    if whole:  # twice as large, from the box's middle on
        start = (first + end - 1) // 2
        low, high, weight = interpolation(source, 2 * size)
        return low[start : start + size], high[start : start + size], weight[start : start + size]
    tables = []
    for values in interpolation(source, int(end - first)):
        table = np.zeros(size, values.dtype)
        table[first:end] = values
        tables.append(table)
    return tables[0], tables[1], tables[2]


def _stacked(windows: Sequence[tuple[np.ndarray, ...]], device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(np.stack(values)).to(device) for values in zip(*windows, strict=True)]


def _gather(textures: Tensor, down: list[Tensor], across: list[Tensor]) -> Tensor:
    """Bilinear in every env for itself: f32 [B, h, w, 3] -> [B, H, W, 3]."""
    env = torch.arange(len(textures), device=textures.device)[:, None]
    low, high, weight = down
    weight = weight[:, :, None, None]
    rows = textures[env, low] * (1 - weight) + textures[env, high] * weight  # [B, H, w, 3]
    rows = rows.transpose(1, 2)
    low, high, weight = across
    weight = weight[:, :, None, None]
    return (rows[env, low] * (1 - weight) + rows[env, high] * weight).transpose(1, 2)


def _read(path: object, size: tuple[int, int]) -> Tensor:
    """A picture file, u8 [H, W, 3]."""
    image = sapien.render.RenderTexture2D(str(path)).download()[..., :3]
    return torch.from_numpy(np.ascontiguousarray(shrink(image, *size)))
