"""Draws what worlds show: one renderer, one camera and one copy of every mesh for all worlds of a process."""

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
from rlinf.simulators.maniskill import constants
from rlinf.simulators.maniskill.assets import Assets
from rlinf.simulators.maniskill.cpu.world import View
from rlinf.simulators.maniskill.picture import blend, compose, read_picture
from rlinf.simulators.maniskill.tasks import BodyKey, Episode
from rlinf.simulators.vulkan import check_driver


class Renderer:
    """A SAPIEN scene without physics: a world's `View` says where everything is, it takes the picture."""

    def __init__(self, assets: Assets, size: tuple[int, int], shader: str) -> None:
        self.assets, self.size, self.shader = assets, size, shader
        device = [sapien.Device("cpu")] if check_driver().on_cpu else []  # as ManiSkill names it
        self._scene = sapien.Scene([sapien.render.RenderSystem(*device)])
        self._links = self._load_robot()
        self._table = self._load(assets.table, sapien.Pose(q=constants.TABLE_QUATERNION))
        self._table.set_pose(sapien.Pose(constants.TABLE_POSITION))
        self._scene.set_ambient_light([constants.AMBIENT] * 3)
        for direction, strength in constants.LIGHTS:
            self._scene.add_directional_light(direction, [strength] * 3)
        self._bodies: dict[BodyKey, Any] = {}  # every one seen so far
        self._visible: tuple[BodyKey, ...] = ()
        self._read = cache(read_picture)
        self._camera = self._load_camera()

    def picture(self, view: View, episode: Episode) -> Array:
        """The published picture u8 [H, W, 3] of an episode's world."""
        drawn, mask = self.draw(view)
        image = self.assets.images[episode.image]
        picture = compose(drawn, mask, self._read(image.picture, self.size))
        if episode.texture is None:
            return picture
        texture = self._read(image.texture, constants.NATIVE_SIZE)
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
        """Show the bodies of the view and no other, always in the same order, and put everything in its place."""
        for name, entity in self._links.items():
            entity.set_pose(view.links[name])
        wanted = tuple(sorted(view.bodies))
        if wanted != self._visible:
            for key in self._visible:
                self._drawn(key).disable()
            for key in wanted:
                self._drawn(key).enable()
            self._visible = wanted
        for key in wanted:
            self._bodies[key].set_pose(view.bodies[key])

    def _drawn(self, key: BodyKey) -> Any:
        """What is drawn of a body; it enters the scene once, since every entry takes one of 32767 numbers."""
        if key not in self._bodies:
            self._bodies[key] = self._load(self.assets.model(key).visual, sapien.Pose())
        return self._bodies[key].find_component_by_type(sapien.render.RenderBodyComponent)

    def _load(self, file: Path, pose: Any) -> Any:
        """Bring a mesh into the scene, turned by `pose` within its entity."""
        builder = self._scene.create_actor_builder()
        builder.add_visual_from_file(str(file), pose=pose)
        return self._add(builder.build_render_component())

    def _add(self, component: Any) -> Any:
        """Add what is drawn to the scene, as an entity that can be placed."""
        entity = sapien.Entity()
        entity.add_component(component)
        self._scene.add_entity(entity)
        return entity

    def _load_robot(self) -> dict[str, Any]:
        """Load the links that can be seen, by name; their metal is set as published."""
        loader = self._scene.create_urdf_loader()
        found = {}
        for link in loader.parse(str(self.assets.urdf))[0][0].link_builders:
            if not link.visual_records:
                continue
            component = link.build_render_component()
            for shape in component.render_shapes:
                if isinstance(shape, sapien.render.RenderShapeTriangleMesh):
                    for metal in [part.material for part in shape.parts]:
                        metal.specular, metal.roughness = constants.ROBOT_SPECULAR, constants.ROBOT_ROUGHNESS
            found[link.name] = self._add(component)
        return found

    def _load_camera(self) -> Any:
        """Mount the camera on the robot's base; its field of view is the same at any size."""
        render = sapien.render
        folder = without_lookup_table(self.shader)
        render.set_camera_shader_dir(str(folder / self.shader))
        small, full = ("r8g8b8a8unorm", "r16g16b16a16sint"), ("r32g32b32a32sfloat", "r32g32b32a32sfloat")
        colour, positions = small if self.shader == "minimal" else full
        for name, kind in (("Color", colour), ("ColorRaw", colour), ("PositionSegmentation", positions)):
            render.set_picture_format(name, kind)
        height, width = self.size
        focal, centre = constants.lens(self.size)
        camera = render.RenderCameraComponent(width, height)
        camera.set_focal_lengths(*focal)
        camera.set_principal_point(*centre)
        camera.near, camera.far = 0.01, 100.0
        self._links["base_link"].add_component(camera)
        camera.local_pose = sapien.Pose(*constants.CAMERA)
        self._scene.update_render()
        camera.take_picture()  # compiles the shaders; their files are not read again
        shutil.rmtree(folder)
        return camera


@cache
def shared_renderer(assets: Assets, size: tuple[int, int], shader: str) -> Renderer:
    """The renderer that all worlds of this process share for pictures of this kind."""
    return Renderer(assets, size, shader)


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
