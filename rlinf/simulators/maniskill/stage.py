"""The put-on-plate world in SAPIEN's CPU physics, and the judge of an episode. Imports SAPIEN, draws nothing.

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
from rlinf.simulators.maniskill.arm import BASE_POSITION, BASE_QUATERNION, FINGER_LINKS, Arm
from rlinf.simulators.maniskill.assets import Assets
from rlinf.simulators.maniskill.family import NUM_OBJECTS, NUM_PLATES, Body, Episode

TABLE_POSITION, TABLE_QUATERNION = (2.0634, 2.8313, 0.0), (0.707, 0.707, 0.0, 0.0)
FRICTION, ROBOT_FRICTION = 1.0, 0.3  # of objects and plates; of robot and table
GRASP_FORCE, GRASP_ANGLE, HELD_STEPS = 0.5, 85.0, 5  # N at each finger, degrees off its axis, steps in a row
ON_PLATE_MARGIN, ON_PLATE_HEIGHT, ON_PLATE_FORCE = 0.01, 0.05, 0.03  # m sideways, m above it, N
Key = tuple[str, int]  # object or plate, index


class Judgement(NamedTuple):
    """What holds after a step; the two about grasping stay true for the rest of the episode."""

    success: bool = False
    is_src_obj_grasped: bool = False
    consecutive_grasp: bool = False  # grasped for HELD_STEPS steps in a row
    src_on_target: bool = False  # all that success asks for: the hand may still hold the object


class View(NamedTuple):
    """What a camera can see: the poses of the robot's links and of the bodies."""

    links: dict[str, Any]
    bodies: dict[Key, Any]


class Stage:
    """One world. `reset` builds it; then `step`, look and judge."""

    episode: Episode
    judgement: Judgement
    steps: int  # actions executed
    grasped_steps: int  # in a row, up to now
    arm: Arm

    def __init__(self, assets: Assets, *, sim_freq: int = 500, control_freq: int = 5, parked: bool = False) -> None:
        """`parked` is the published layout: one world for good, where all that is not shown stands aside."""
        self.assets, self.parked = assets, parked
        self.sim_freq, self.substeps = sim_freq, sim_freq // control_freq
        self._scene: Any = None

    def reset(self, episode: Episode) -> None:
        """Put everything where the episode starts."""
        self.episode, self.judgement = episode, Judgement()
        self.steps = self.grasped_steps = 0
        shown = shown_bodies(episode)
        if not self.parked:
            self._build(shown)
        else:
            everything = _aside() | shown
            if self._scene is None:
                self._build(everything)
            for key, body in everything.items():
                self._entities[key].set_pose(_pose(body))
                self._components[key].set_linear_velocity(np.zeros(3, np.float32))
                self._components[key].set_angular_velocity(np.zeros(3, np.float32))
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
            self._entities[self._object].set_pose(sapien.Pose(move.position, move.quaternion))
        self.judgement = self._judge()
        return self.judgement

    def view(self) -> View:
        """Where everything is that can be seen."""
        links = {name: link.entity_pose for name, link in self.arm.links.items()}
        return View(links, {key: entity.pose for key, entity in self._entities.items()})

    @property
    def object_pose(self) -> Array:
        """Position and quaternion of the object to move, f32 [7]."""
        return as_array(self._entities[self._object].pose)

    @property
    def plate_pose(self) -> Array:
        """The same of the plate."""
        return as_array(self._entities[self._plate].pose)

    @property
    def gripper_pose(self) -> Array:
        """The same of the point between the fingers."""
        return as_array(self.arm.gripper)

    def close(self) -> None:
        """Free the world."""
        self._scene = None

    @property
    def _object(self) -> Key:
        return ("object", self.episode.object.index)

    @property
    def _plate(self) -> Key:
        return ("plate", self.episode.plate.index)

    def _build(self, bodies: dict[Key, Body]) -> None:
        """A new world: robot, table, objects and plates in the order of their numbers, as published."""
        _configure_physics()
        self._physics = physx.PhysxCpuSystem()
        self._physics.timestep = 1 / self.sim_freq
        self._scene = sapien.Scene([self._physics])
        self.arm = Arm(_robot_builder(self.assets.urdf).set_scene(self._scene).build(), self.assets.urdf)
        table = self._scene.create_actor_builder()
        table.add_nonconvex_collision_from_file(str(self.assets.table), pose=sapien.Pose(q=TABLE_QUATERNION))
        table.initial_pose = sapien.Pose(TABLE_POSITION)
        table.build_static(name="table")
        material = physx.PhysxMaterial(FRICTION, FRICTION, 0.0)
        self._entities: dict[Key, Any] = {}
        for (kind, index), body in sorted(bodies.items()):
            model = (self.assets.objects if kind == "object" else self.assets.plates)[index]
            builder = self._scene.create_actor_builder()
            builder.add_multiple_convex_collisions_from_file(
                str(model.collision), material=material, density=model.density
            )
            builder.initial_pose = _pose(body)
            self._entities[kind, index] = builder.build(name=model.folder.name)
        kinds = physx.PhysxRigidDynamicComponent
        self._components = {key: entity.find_component_by_type(kinds) for key, entity in self._entities.items()}
        self._fingers = [self.arm.links[name] for name in FINGER_LINKS]

    def _judge(self) -> Judgement:
        """Read the contacts of the last physics step once and look at everything."""
        object_, plate = self._components[self._object], self._components[self._plate]
        force = {"plate": np.zeros(3), **{name: np.zeros(3) for name in FINGER_LINKS}}  # N, of the object on each
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
        self.grasped_steps = self.grasped_steps + 1 if grasped else 0
        on_plate = self._above_plate() and bool(np.linalg.norm(force["plate"]) > ON_PLATE_FORCE)
        before = self.judgement
        return Judgement(
            success=on_plate,
            is_src_obj_grasped=before.is_src_obj_grasped or grasped,
            consecutive_grasp=before.consecutive_grasp or self.grasped_steps >= HELD_STEPS,
            src_on_target=on_plate,
        )

    def _presses(self, finger: Any, force: Array, side: int) -> bool:
        """Whether the object pushes this finger outwards."""
        size = np.linalg.norm(force)
        if size < GRASP_FORCE:
            return False
        outwards = side * finger.entity_pose.to_transformation_matrix()[:3, 1]
        return bool(np.rad2deg(np.arccos(np.clip(force @ outwards / size, -1, 1))) <= GRASP_ANGLE)

    def _above_plate(self) -> bool:
        """Whether the object's centre is over the plate and not far above; all stand upright when an episode starts."""
        plate = np.array(self.assets.plates[self._plate[1]].size) / 2
        half_height = self.assets.objects[self._object[1]].size[2] / 2
        away = self.object_pose[:3] - self.plate_pose[:3]
        close = np.linalg.norm(away[:2]) <= plate.max() + ON_PLATE_MARGIN
        return bool(close and away[2] > 0 and away[2] - plate[2] - half_height <= ON_PLATE_HEIGHT)


def shown_bodies(episode: Episode) -> dict[Key, Body]:
    """The objects and plates of an episode."""
    given = (
        ("object", episode.object),
        ("object", episode.extra_object),
        ("plate", episode.plate),
        ("plate", episode.extra_plate),
    )
    return {(kind, body.index): body for kind, body in given if body is not None}


def as_array(pose: Any) -> Array:
    """Position and quaternion w x y z, f32 [7]."""
    return np.concatenate([pose.p, pose.q])


def _pose(body: Body) -> Any:
    return sapien.Pose(body.position, body.quaternion)


def _aside() -> dict[Key, Body]:
    """Where the published layout keeps everything that an episode does not show."""
    upright = (1.0, 0.0, 0.0, 0.0)
    objects = {("object", i): Body(i, (1.0, 0.3 * i, 1.0), upright) for i in range(NUM_OBJECTS)}
    return objects | {("plate", i): Body(i, (2.0, 0.3 * i, 1.0), upright) for i in range(NUM_PLATES)}


def _configure_physics() -> None:
    """ManiSkill's settings; they belong to the process."""
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
    physx.set_default_material(ROBOT_FRICTION, ROBOT_FRICTION, 0.0)


@cache
def _robot_builder(urdf: Path) -> Any:
    """The robot's collision bodies and joints, read once per process."""
    loader = sapien.Scene([]).create_urdf_loader()
    loader.fix_root_link = True
    builder = loader.parse(str(urdf))[0][0]
    for link in builder.link_builders:
        link.visual_records = []
    builder.set_initial_pose(sapien.Pose(BASE_POSITION, BASE_QUATERNION))
    return builder
