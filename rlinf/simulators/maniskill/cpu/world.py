"""The put-on-plate world in SAPIEN's CPU physics. Imports SAPIEN, draws nothing.

Equal to ManiSkill 3.0.1 bit for bit in a new world. PhysX keeps contact caches over resets that no call clears, so that
an episode is only reproducible in a world of its own: every reset builds one, with what the episode shows and no more.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sapien
from sapien import physx

from rlinf.simulators.contract import Array
from rlinf.simulators.maniskill import constants
from rlinf.simulators.maniskill.assets import Assets
from rlinf.simulators.maniskill.cpu.arm import Arm
from rlinf.simulators.maniskill.judge import GRASP_ANGLE, GRASP_FORCE, Judge, Judgement
from rlinf.simulators.maniskill.tasks import Body, BodyKey, Episode


class View(NamedTuple):
    """What a camera can see: the poses of the robot's links and of the bodies."""

    links: dict[str, Any]
    bodies: dict[BodyKey, Any]


class World:
    """One world. `reset` builds it; then `step`, look and judge."""

    episode: Episode
    judge: Judge  # of the episode
    steps: int  # actions executed
    object_key: BodyKey  # of the object to move
    plate_key: BodyKey
    arm: Arm

    def __init__(
        self, assets: Assets, *, sim_freq: int = constants.SIM_FREQ, control_freq: int = constants.CONTROL_FREQ
    ) -> None:
        self.assets = assets
        self.sim_freq, self.substeps = sim_freq, sim_freq // control_freq
        self._scene: Any = None

    def reset(self, episode: Episode) -> None:
        """Build the world in which the episode starts."""
        self.episode, self.steps = episode, 0
        self.object_key, self.plate_key = ("object", episode.object.index), ("plate", episode.plate.index)
        plate, object_ = self.assets.model(self.plate_key).size, self.assets.model(self.object_key).size
        self.judge = Judge(*Judge.limits(max(plate), plate[2], object_[2]))
        self._build(episode.bodies)
        self.arm.place(episode.qpos)

    def step(self, action: Array) -> Judgement:
        """One control step: the action [7] moves the arm's target, then physics runs."""
        action = np.asarray(action, np.float32)
        if not np.isfinite(action).all():
            raise ValueError(f"action is not finite: {action.tolist()}")
        self.arm.command(action)
        for _ in range(self.substeps):
            self._physics.step()
        self.steps += 1
        move = self.episode.teleport
        if move is not None and self.steps == move.step:
            self._entities[self.object_key].set_pose(sapien.Pose(move.position, move.quaternion))
        return self._judge()

    def view(self) -> View:
        """Where the robot's links and the bodies are, for the renderer."""
        links = {name: link.entity_pose for name, link in self.arm.links.items()}
        return View(links, {key: entity.pose for key, entity in self._entities.items()})

    @property
    def object_pose(self) -> Array:
        """Position and quaternion of the object to move, f32 [7]."""
        return as_array(self._entities[self.object_key].pose)

    @property
    def plate_pose(self) -> Array:
        """Position and quaternion of the plate, f32 [7]."""
        return as_array(self._entities[self.plate_key].pose)

    @property
    def gripper_pose(self) -> Array:
        """Position and quaternion of the point between the fingers, f32 [7]."""
        return as_array(self.arm.gripper)

    def close(self) -> None:
        """Free the world."""
        self._scene = None

    def _build(self, bodies: dict[BodyKey, Body]) -> None:
        """A new world: robot, table, objects and plates in the order of their numbers, as published."""
        _configure_physics()
        self._physics = physx.PhysxCpuSystem()
        self._physics.timestep = 1 / self.sim_freq
        self._scene = sapien.Scene([self._physics])
        self.arm = Arm(_robot_builder(self.assets.urdf).set_scene(self._scene).build(), self.assets.urdf)
        table = self._scene.create_actor_builder()
        table.add_nonconvex_collision_from_file(str(self.assets.table), pose=sapien.Pose(q=constants.TABLE_QUATERNION))
        table.initial_pose = sapien.Pose(constants.TABLE_POSITION)
        table.build_static(name="table")
        material = physx.PhysxMaterial(constants.FRICTION, constants.FRICTION, 0.0)
        self._entities: dict[BodyKey, Any] = {}
        for key, body in sorted(bodies.items()):
            model = self.assets.model(key)
            builder = self._scene.create_actor_builder()
            builder.add_multiple_convex_collisions_from_file(
                str(model.collision), material=material, density=model.density
            )
            builder.initial_pose = sapien.Pose(body.position, body.quaternion)
            self._entities[key] = builder.build(name=model.folder.name)
        kinds = physx.PhysxRigidDynamicComponent
        self._components = {key: entity.find_component_by_type(kinds) for key, entity in self._entities.items()}
        self._fingers = [self.arm.links[name] for name in constants.FINGER_LINKS]

    def _judge(self) -> Judgement:
        """Judge the step by the contacts of its last physics step, and by where object and plate are."""
        object_, plate = self._components[self.object_key], self._components[self.plate_key]
        force = {name: np.zeros(3) for name in ("plate", *constants.FINGER_LINKS)}  # N, of the object on each
        partners = dict(zip((plate, *self._fingers), force, strict=True))
        for contact in self._physics.get_contacts():
            first, second = contact.bodies
            if first is object_ or second is object_:
                partner, sign = (second, -1.0) if first is object_ else (first, 1.0)
                if partner in partners:
                    impulse = sum((point.impulse for point in contact.points), np.zeros(3))
                    force[partners[partner]] += sign * impulse * self.sim_freq
        grasped = all(
            self._presses(link, force[link.name], side) for link, side in zip(self._fingers, (1, -1), strict=True)
        )
        away = self.object_pose[:3] - self.plate_pose[:3]
        return self.judge.step(
            sideways=float(np.linalg.norm(away[:2])),
            above=float(away[2]),
            force=float(np.linalg.norm(force["plate"])),
            grasping=grasped,
        )

    def _presses(self, finger: Any, force: Array, side: int) -> bool:
        """Whether the object pushes this finger outwards."""
        size = np.linalg.norm(force)
        if size < GRASP_FORCE:
            return False
        outwards = side * finger.entity_pose.to_transformation_matrix()[:3, 1]
        return bool(np.rad2deg(np.arccos(np.clip(force @ outwards / size, -1, 1))) <= GRASP_ANGLE)


def as_array(pose: Any) -> Array:
    """Position and quaternion w x y z, f32 [7]."""
    return np.concatenate([pose.p, pose.q])


def _configure_physics() -> None:
    """Set PhysX up as ManiSkill does; the settings hold for the whole process."""
    physx.set_shape_config(contact_offset=0.02, rest_offset=0.0)
    physx.set_body_config(solver_position_iterations=15, solver_velocity_iterations=1, sleep_threshold=0.005)
    physx.set_scene_config(
        gravity=np.array([0, 0, -9.81]),
        bounce_threshold=2.0,
        enable_pcm=True,
        enable_tgs=True,
        enable_ccd=False,
        enable_enhanced_determinism=False,
        enable_friction_every_iteration=True,
        cpu_workers=0,
    )
    physx.set_default_material(constants.ROBOT_FRICTION, constants.ROBOT_FRICTION, 0.0)


@cache
def _robot_builder(urdf: Path) -> Any:
    """The robot's collision bodies and joints, read once per process."""
    loader = sapien.Scene([]).create_urdf_loader()
    loader.fix_root_link = True
    builder = loader.parse(str(urdf))[0][0]
    for link in builder.link_builders:
        link.visual_records = []
    builder.set_initial_pose(sapien.Pose(constants.BASE_POSITION, constants.BASE_QUATERNION))
    return builder
