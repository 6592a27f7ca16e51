"""Draws what stages show: one renderer, one camera and one copy of every mesh for all stages of a process."""

from __future__ import annotations

import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sapien

from rlinf.simulators.contract import Array
from rlinf.simulators.maniskill.assets import Assets
from rlinf.simulators.maniskill.family import Episode
from rlinf.simulators.maniskill.picture import blend, compose, shrink
from rlinf.simulators.maniskill.stage import TABLE_POSITION, TABLE_QUATERNION, Key, View
from rlinf.simulators.vulkan import has_nvidia

NATIVE_SIZE = (480, 640)  # height, width
FOCAL, CENTRE = 623.588, (319.501, 239.545)  # pixels of the native picture
CAMERA = (0.0, -0.16, 0.36), (0.8992917, -0.09263245, 0.35892478, 0.23209205)  # in the robot's base
LIGHTS = (((0, 0, -1), 2.2), ((-1, -0.5, -1), 0.7), ((1, 1, -1), 0.7))  # direction, strength
AMBIENT = 0.3


class Studio:
    """A scene without physics: stages say where everything is, it takes the picture."""

    def __init__(self, assets: Assets, size: tuple[int, int], shader: str) -> None:
        self.assets, self.size, self.shader = assets, size, shader
        device = [] if has_nvidia() else [sapien.Device("cpu")]  # named as ManiSkill does: a process has but one
        self._scene = sapien.Scene([sapien.render.RenderSystem(*device)])
        self._links = self._load_robot()
        table = self._builder()
        table.add_visual_from_file(str(assets.table), pose=sapien.Pose(q=TABLE_QUATERNION))
        self._table = self._add(table.build_render_component(), sapien.Pose(TABLE_POSITION))
        self._scene.set_ambient_light([AMBIENT] * 3)
        for direction, strength in LIGHTS:
            self._scene.add_directional_light(direction, [strength] * 3)
        self._bodies: dict[Key, Any] = {}  # every one seen so far
        self._on_set: tuple[Key, ...] = ()
        self._pictures: dict[tuple[Path, tuple[int, int]], Array] = {}
        self._camera = self._load_camera()

    def picture(self, view: View, episode: Episode) -> Array:
        """The published picture u8 [H, W, 3] of a stage's view."""
        drawn, mask = self.draw(view)
        image = self.assets.images[episode.image]
        picture = compose(drawn, mask, self._read(image.picture, self.size))
        if episode.texture is None:
            return picture
        texture = self._read(image.texture, NATIVE_SIZE)
        return blend(picture, mask, texture, episode.texture.ratio * image.mix, episode.texture.area)

    def draw(self, view: View) -> tuple[Array, Array]:
        """Colours u8 [H, W, 3] and where robot and bodies are, bool [H, W]."""
        self._arrange(view)
        self._scene.update_render()
        self._camera.take_picture()
        colour = self._camera.get_picture("Color")[..., :3]
        if self.shader == "minimal":
            kinds = self._camera.get_picture("PositionSegmentation")[..., 3]
        else:
            colour = (colour * 255).astype(np.uint8)
            kinds = self._camera.get_picture("Segmentation")[..., 1]
        return colour, (kinds != 0) & (kinds != self._table.per_scene_id)

    def _arrange(self, view: View) -> None:
        """Bring in the bodies of the view, always in the same order, and put everything in its place."""
        for name, entity in self._links.items():
            entity.set_pose(view.links[name])
        wanted = tuple(sorted(view.bodies))
        if wanted != self._on_set:
            for key in self._on_set:
                self._drawn(key).disable()
            for key in wanted:
                self._drawn(key).enable()
            self._on_set = wanted
        for key in wanted:
            self._bodies[key].set_pose(view.bodies[key])

    def _drawn(self, key: Key) -> Any:
        """What is drawn of a body; it enters the scene once, since every entry takes one of 32767 numbers."""
        if key not in self._bodies:
            self._bodies[key] = self._load_body(*key)
        return self._bodies[key].find_component_by_type(sapien.render.RenderBodyComponent)

    def _builder(self) -> Any:
        return self._scene.create_actor_builder()

    def _add(self, component: Any, pose: Any) -> Any:
        entity = sapien.Entity()
        entity.add_component(component)
        entity.set_pose(pose)
        self._scene.add_entity(entity)
        return entity

    def _load_body(self, kind: str, index: int) -> Any:
        model = (self.assets.objects if kind == "object" else self.assets.plates)[index]
        builder = self._builder()
        builder.add_visual_from_file(str(model.visual))
        return self._add(builder.build_render_component(), sapien.Pose())

    def _load_robot(self) -> dict[str, Any]:
        """The links that can be seen; their metal is set as published."""
        loader = self._scene.create_urdf_loader()
        found = {}
        for link in loader.parse(str(self.assets.urdf))[0][0].link_builders:
            if not link.visual_records:
                continue
            component = link.build_render_component()
            for shape in component.render_shapes:
                if isinstance(shape, sapien.render.RenderShapeTriangleMesh):
                    for part in shape.parts:
                        part.material.specular, part.material.roughness = 0.9, 0.3
            found[link.name] = self._add(component, sapien.Pose())
        return found

    def _load_camera(self) -> Any:
        """On the robot's base; the same field of view at any size."""
        render = sapien.render
        folder = without_lookup_table(self.shader)
        render.set_camera_shader_dir(str(folder / self.shader))
        colour = "r8g8b8a8unorm" if self.shader == "minimal" else "r32g32b32a32sfloat"
        render.set_picture_format("Color", colour)
        render.set_picture_format("ColorRaw", colour)
        render.set_picture_format(
            "PositionSegmentation", "r16g16b16a16sint" if self.shader == "minimal" else "r32g32b32a32sfloat"
        )
        height, width = self.size
        down, across = height / NATIVE_SIZE[0], width / NATIVE_SIZE[1]
        camera = render.RenderCameraComponent(width, height)
        camera.set_focal_lengths(FOCAL * across, FOCAL * down)
        camera.set_principal_point(CENTRE[0] * across, CENTRE[1] * down)
        camera.near, camera.far = 0.01, 100.0
        self._links["base_link"].add_component(camera)
        camera.local_pose = sapien.Pose(*CAMERA)
        self._scene.update_render()
        camera.take_picture()  # compiles the shaders; their files are not read again
        shutil.rmtree(folder)
        return camera

    def _read(self, path: Path, size: tuple[int, int]) -> Array:
        """A picture file in `size`, read once; SAPIEN's reader saves an image library in the child."""
        if (path, size) not in self._pictures:
            read = sapien.render.RenderTexture2D(str(path)).download()[..., :3]
            self._pictures[path, size] = shrink(read, *size)
        return self._pictures[path, size]


@cache
def studio(assets: Assets, size: tuple[int, int], shader: str) -> Studio:
    """The process's studio for these pictures."""
    return Studio(assets, size, shader)


def without_lookup_table(shader: str) -> Path:
    """A folder with SAPIEN's shader pack, less the reflections of an environment map.

    There is none, so that not a pixel changes; but the table they look up costs a CPU ten seconds before the first
    picture of a process.
    """
    packs, folder = Path(sapien.__file__).parent / "vulkan_shader", Path(tempfile.mkdtemp(prefix="shaders-"))
    for name in (shader, "common"):
        shutil.copytree(packs / name, folder / name, copy_function=shutil.copyfile)
    for path in folder.glob("*/*"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"layout\([^)]*\) uniform sampler2D samplerBRDFLUT;", "", text)
        path.write_text(re.sub(r"texture\(samplerBRDFLUT,[^;]*;", "vec2(0.0);", text), encoding="utf-8")
    return folder
