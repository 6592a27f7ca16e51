"""The published put-on-plate tasks as a ManiSkill environment: B of them stepped together, on a GPU or one on the CPU.

All objects and plates that an id may show are in every env, since a batch needs the same bodies everywhere; those that
an episode does not show are parked behind the camera. GPU physics is unverified: it has not been run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.structs import Actor, Pose
from mani_skill.utils.structs.types import SimConfig
from torch import Tensor

from rlinf.simulators.maniskill import arm, level, stage, studio
from rlinf.simulators.maniskill.assets import Model, find_assets
from rlinf.simulators.maniskill.batched_judge import Judge
from rlinf.simulators.maniskill.batched_picture import Backdrops
from rlinf.simulators.maniskill.family import (
    NUM_PLATES,
    TELEPORT_STEP,
    Body,
    Episode,
    Range,
    Teleport,
    episode,
    variant,
)
from rlinf.simulators.maniskill.widowx import CAMERA, CONTROL_MODE, WidowX, intrinsic

ASIDE = stage._aside()  # where each object and plate waits while an episode does not show it
SPACING = 10.0  # m between the envs of a batch: wider than a row of parked bodies


class PutOnPlate(BaseEnv):
    """One id of the family with one obj_set."""

    SUPPORTED_OBS_MODES = ("rgb+segmentation", "none")
    SUPPORTED_REWARD_MODES = ("none", "sparse", "dense")  # always 0 as published, success, or the level of success
    agent: WidowX

    def __init__(
        self,
        *args: Any,
        task: str,
        obj_set: Literal["train", "test", "all"] = "train",
        control_mode: str | None = None,
        image_size: tuple[int, int] = studio.NATIVE_SIZE,
        **kwargs: Any,
    ) -> None:
        """`image_size` is the height and width of the picture; the rest are ManiSkill's own arguments."""
        if control_mode not in (None, CONTROL_MODE):
            raise ValueError(f"control_mode={control_mode!r} must be null or {CONTROL_MODE}, the only controller")
        self.task, self.obj_set, self.variant = task, obj_set, variant(task, obj_set)
        self.assets = find_assets([(task, obj_set)])
        self.episodes: list[Episode] = []  # one per env
        robot = type("WidowX", (WidowX,), {"urdf_path": str(self.assets.urdf), "image_size": image_size})
        super().__init__(*args, robot_uids=robot, control_mode=control_mode, **kwargs)

    # what the world is made of

    @property
    def _default_sim_config(self) -> SimConfig:
        return SimConfig(spacing=SPACING, sim_freq=500, control_freq=5)

    @property
    def _default_human_render_camera_configs(self) -> CameraConfig:
        return CameraConfig(
            "render_camera",
            pose=sapien.Pose([0.0, -0.16, 0.336], [0.909182, -0.0819809, 0.347277, 0.214629]),
            width=512,
            height=512,
            intrinsic=intrinsic(studio.NATIVE_SIZE),
            mount=self.agent.robot.links_map["base_link"],
        )

    def _load_agent(self, options: dict[str, Any], *_: Any) -> None:
        super()._load_agent(options, sapien.Pose(arm.BASE_POSITION, arm.BASE_QUATERNION))

    def _load_scene(self, options: dict[str, Any]) -> None:
        for robot in self.agent.robot._objs:
            sapien_utils.set_articulation_render_material(robot, specular=0.9, roughness=0.3)
        table, upright = self.scene.create_actor_builder(), sapien.Pose(q=stage.TABLE_QUATERNION)
        table.add_nonconvex_collision_from_file(str(self.assets.table), pose=upright)
        table.add_visual_from_file(str(self.assets.table), pose=upright)
        table.initial_pose = sapien.Pose(stage.TABLE_POSITION)
        table.build_static(name="table")
        v = self.variant
        plates = Range(NUM_PLATES) if v.extra == "plate" and v.plates.count == 1 else v.plates
        self._objects = {i: self._load_body("object", i, self.assets.objects[i]) for i in _span(v.objects)}
        self._plates = {i: self._load_body("plate", i, self.assets.plates[i]) for i in _span(plates)}

    def _load_body(self, kind: str, index: int, model: Model) -> Actor:
        material = sapien.physx.PhysxMaterial(stage.FRICTION, stage.FRICTION, 0.0)
        builder = self.scene.create_actor_builder()
        builder.add_multiple_convex_collisions_from_file(str(model.collision), material=material, density=model.density)
        builder.add_visual_from_file(str(model.visual))
        builder.initial_pose = sapien.Pose(ASIDE[kind, index].position)
        return builder.build(name=f"{kind} {model.folder.name}")

    def _load_lighting(self, options: dict[str, Any]) -> None:
        self.scene.set_ambient_light([studio.AMBIENT] * 3)
        for direction, strength in studio.LIGHTS:
            self.scene.add_directional_light(direction, [strength] * 3)

    def _after_reconfigure(self, options: dict[str, Any]) -> None:
        shown = [*self._objects.values(), *self._plates.values(), *self.agent.robot.get_links()]
        self._shown_ids = torch.unique(torch.cat([body.per_scene_id for body in shown]))
        images = {i: self.assets.images[i] for i in _span(self.variant.images)}
        self._backdrops = Backdrops(images, self.variant.texture, self._camera_size(), self.device)
        self.episodes = [episode(self.task, self.obj_set, 0)] * self.num_envs
        self._judge = Judge(self.num_envs, self.device)

    def _camera_size(self) -> tuple[int, int]:
        config = self._sensor_configs[CAMERA]
        return config.height, config.width  # sensor_configs may have changed it

    # episodes

    def _initialize_episode(self, env_idx: Tensor, options: dict[str, Any]) -> None:
        rows = env_idx.tolist()
        drawn = torch.randint(0, self.variant.total, (len(rows),), dtype=torch.int64)
        ids = torch.as_tensor(options.get("episode_id", drawn), dtype=torch.int64).reshape(-1).tolist()
        if len(ids) != len(rows):
            raise ValueError(f"episode_id holds {len(ids)} ids for {len(rows)} envs")
        self._begin(rows, ids)
        chosen = [self.episodes[row] for row in rows]
        shown = [stage.shown_bodies(e) for e in chosen]
        for kind, actors in (("object", self._objects), ("plate", self._plates)):
            for index, actor in actors.items():
                bodies = [each.get((kind, index), ASIDE[kind, index]) for each in shown]
                actor.set_pose(self._poses(bodies))  # of the envs that are being reset
        self.agent.reset(init_qpos=torch.tensor([e.qpos for e in chosen], device=self.device))

    def _begin(self, rows: list[int], ids: list[int]) -> None:
        """These rows now play these episodes; nothing has been judged."""
        for row, episode_id in zip(rows, ids, strict=True):
            self.episodes[row] = episode(self.task, self.obj_set, episode_id)
        self._object = self._view("object", [self._objects[e.object.index] for e in self.episodes])
        self._plate = self._view("plate", [self._plates[e.plate.index] for e in self.episodes])
        chosen = [self.episodes[row] for row in rows]
        objects = torch.tensor([self.assets.objects[e.object.index].size for e in chosen], device=self.device)
        plates = torch.tensor([self.assets.plates[e.plate.index].size for e in chosen], device=self.device)
        self._judge.begin(rows, objects, plates)

    def _view(self, name: str, actors: Sequence[Actor]) -> Actor:
        """What plays this role in each env, as one actor."""
        entities = [actor._objs[row] for row, actor in enumerate(actors)]
        return Actor.create_from_entities(entities, self.scene, torch.arange(self.num_envs), shared_name=name)

    def _poses(self, bodies: Iterable[Body | Teleport]) -> Pose:
        return Pose.create(torch.tensor([[*b.position, *b.quaternion] for b in bodies], device=self.device))

    def get_language_instruction(self) -> list[str]:
        """What the policy is told, one sentence per env."""
        objects, plates = self.assets.objects, self.assets.plates
        return [e.instruction(objects[e.object.index].name, plates[e.plate.index].name) for e in self.episodes]

    # success

    def evaluate(self) -> dict[str, Tensor]:
        """What holds now, [B] each; the two about grasping stay true for the rest of an episode."""
        self._teleport()
        gripper = self.agent.robot.links_map[arm.GRIPPER_LINK].pose.p
        object_, plate = self._object.pose.p, self._plate.pose.p
        force = self.scene.get_pairwise_contact_forces(self._object, self._plate)
        grasping = self.agent.is_grasping(self._object, stage.GRASP_FORCE, stage.GRASP_ANGLE)
        return self._judge.judge(self.elapsed_steps, object_ - plate, force, grasping) | {
            "gripper_carrot_dist": torch.linalg.norm(gripper - object_, dim=1),
            "gripper_plate_dist": torch.linalg.norm(gripper - plate, dim=1),
            "carrot_plate_dist": torch.linalg.norm(object_ - plate, dim=1),
        }

    def _teleport(self) -> None:
        """Move the object where an episode says so at this step."""
        if not self.variant.teleports:
            return
        new = self._judge.new(self.elapsed_steps) & (self.elapsed_steps == TELEPORT_STEP)  # [B]
        due = [move for e, now in zip(self.episodes, new.tolist(), strict=True) if now and (move := e.teleport)]
        if not due:
            return
        everywhere, self.scene._reset_mask = self.scene._reset_mask, new  # poses are set where this says
        self._object.set_pose(self._poses(due))
        self.scene._reset_mask = everywhere
        if self.gpu_sim_enabled:
            self.scene.px.gpu_apply_rigid_dynamic_data()
            self.scene.px.gpu_fetch_rigid_dynamic_data()

    def compute_dense_reward(self, obs: Any, action: Tensor, info: dict[str, Tensor]) -> Tensor:
        """The published level of success, 0 to 1.2; callers pay its differences."""
        flags = zip(*(info[name].tolist() for name in stage.Judgement._fields), strict=True)
        levels = [level("default", stage.Judgement(*each)._asdict()) for each in flags]
        return torch.tensor(levels, device=self.device)

    # pictures

    def _get_obs_sensor_data(self, apply_texture_transforms: bool = True) -> dict[str, Any]:
        data = super()._get_obs_sensor_data(apply_texture_transforms)
        if self.obs_mode_struct.visual.rgb and self.obs_mode_struct.visual.segmentation:
            data[CAMERA]["rgb"] = self._composed(data[CAMERA])
        return data

    def picture(self) -> Tensor:
        """What the camera sees, as published: u8 [B, H, W, 3]."""
        self.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        self.capture_sensor_data()
        return self._composed(self._sensors[CAMERA].get_obs(depth=False, position=False))

    def _composed(self, drawn: dict[str, Tensor]) -> Tensor:
        bodies = torch.isin(drawn["segmentation"][..., 0], self._shown_ids.to(drawn["segmentation"].device))
        return self._backdrops.compose(drawn["rgb"], bodies, [e.image for e in self.episodes])

    # stepping without pictures, and saving

    def advance(self, actions: Tensor) -> dict[str, Tensor]:
        """One action f32 [B, 7] everywhere, without an observation; returns what `evaluate` does."""
        self._step_action(actions)
        self._elapsed_steps += 1
        return self.get_info()

    def look(self) -> dict[str, Tensor]:
        """The picture u8 [B, H, W, 3], arm joints and fingers f32 [B, 8], and what a critic may know f32 [B, K]."""
        return {"images": self.picture(), "states": self.agent.robot.get_qpos(), "critic_state": self._critic_state()}

    def _critic_state(self) -> Tensor:
        """The columns of `CRITIC_STATE`."""
        object_, plate = self._object.pose.raw_pose, self._plate.pose.p
        gripper = self.agent.robot.links_map[arm.GRIPPER_LINK].pose.raw_pose
        between = [object_[:, :3] - gripper[:, :3], plate - object_[:, :3]]
        sizes = torch.tensor([self.assets.objects[e.object.index].size for e in self.episodes], device=self.device)
        grasps = self._judge.grasps
        flags = [grasps > 0, (grasps / stage.HELD_STEPS).clamp(max=1), self._judge.grasped, self._judge.held]
        columns = [object_, plate, gripper, *between, sizes, self.agent.robot.get_qpos(), torch.stack(flags, 1)]
        return torch.cat([column.float() for column in columns], 1)

    def snapshot(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Everything that the episodes of R envs consist of, [R, ...] each."""
        whole = {"episode_id": torch.tensor([e.episode_id for e in self.episodes], device=self.device)}
        whole |= self._memory()
        for kind, states in self.scene.get_sim_state().items():
            whole |= {f"{kind}/{name}": state for name, state in states.items()}
        return {name: value[list(rows)].clone() for name, value in whole.items()}

    def restore(self, rows: Sequence[int], saved: dict[str, Tensor]) -> None:
        """Continue episodes from a snapshot."""
        saved = {name: value.to(self.device) for name, value in saved.items()}
        self._begin(list(rows), saved["episode_id"].tolist())
        state: dict[str, dict[str, Tensor]] = {"actors": {}, "articulations": {}}
        for name, value in saved.items():
            kind, _, body = name.partition("/")
            if body:
                state[kind][body] = value
        self.set_state_dict(state, torch.tensor(list(rows), device=self.device))
        for name, memory in self._memory().items():
            memory[list(rows)] = saved[name]

    def _memory(self) -> dict[str, Tensor]:
        """What an episode consists of besides its world, [B, ...] each; writing to a row changes it."""
        return {"elapsed": self._elapsed_steps, "target": self._target_pose(), **self._judge.memory()}

    def _target_pose(self) -> Tensor:
        """Where the gripper is being sent, in the robot's base, [B, 7]; writing to it moves the target."""
        return self.agent.controller.get_state()["arm"]["target_pose"]


def _span(digits: Range) -> range:
    return range(digits.first, digits.first + digits.count)
