"""The published put-on-plate tasks as a ManiSkill environment: B of them stepped together, on a GPU or one on the CPU.

All objects and plates that an id may show are in every env, since a batch needs the same bodies everywhere; those that
an episode does not show stand behind the camera. GPU physics is unverified: it has not been run. Letters: B envs, R
rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.structs import Actor, Pose
from mani_skill.utils.structs.types import SimConfig
from torch import Tensor

from rlinf.simulators.maniskill import constants, tasks
from rlinf.simulators.maniskill.assets import find_assets
from rlinf.simulators.maniskill.gpu.backdrops import Backdrops
from rlinf.simulators.maniskill.gpu.batched_judge import BatchJudge
from rlinf.simulators.maniskill.gpu.widowx import CAMERA, WidowX, camera_matrix
from rlinf.simulators.maniskill.judge import GRASP_ANGLE, GRASP_FORCE, HELD_STEPS, Judgement, level
from rlinf.simulators.maniskill.observation import FAR, critic_columns, distances
from rlinf.simulators.maniskill.tasks import TELEPORT_STEP, Body, BodyKey, Episode, Teleport

HIDDEN = tasks.hidden_bodies()
SPACING = 10.0  # m between the envs of a batch: wider than a row of hidden bodies


class PutOnPlate(BaseEnv):
    """One environment id with one obj_set. What ManiSkill calls private is used where it has no public name for it."""

    SUPPORTED_OBS_MODES = ("rgb+segmentation", "none")
    SUPPORTED_REWARD_MODES = ("none", "sparse", "dense")  # always 0 as published, success, or the level of success
    agent: WidowX

    def __init__(
        self,
        *args: Any,
        task: str,
        obj_set: Literal["train", "test", "all"] = "train",
        control_mode: str | None = None,
        image_size: tuple[int, int] = constants.NATIVE_SIZE,
        **kwargs: Any,
    ) -> None:
        """`image_size` is the height and width of the picture; the rest are ManiSkill's own arguments."""
        if control_mode not in (None, constants.CONTROL_MODE):
            raise ValueError(
                f"control_mode={control_mode!r} must be null or {constants.CONTROL_MODE}, the only controller"
            )
        self.task, self.obj_set, self.variant = task, obj_set, tasks.variant(task, obj_set)
        self.assets = find_assets([(task, obj_set)])
        self.episodes: list[Episode] = []  # one per env
        robot = type("WidowX", (WidowX,), {"urdf_path": str(self.assets.urdf), "image_size": image_size})
        super().__init__(*args, robot_uids=robot, control_mode=control_mode, **kwargs)

    # what the world is made of

    @property
    def _default_sim_config(self) -> SimConfig:
        return SimConfig(spacing=SPACING, sim_freq=constants.SIM_FREQ, control_freq=constants.CONTROL_FREQ)

    @property
    def _default_human_render_camera_configs(self) -> CameraConfig:
        return CameraConfig(
            "render_camera",
            pose=sapien.Pose([0.0, -0.16, 0.336], [0.909182, -0.0819809, 0.347277, 0.214629]),
            width=512,
            height=512,
            intrinsic=camera_matrix(constants.NATIVE_SIZE),
            mount=self.agent.robot.links_map["base_link"],
        )

    def _load_agent(self, options: dict[str, Any], *_: Any) -> None:
        super()._load_agent(options, sapien.Pose(constants.BASE_POSITION, constants.BASE_QUATERNION))

    def _load_scene(self, options: dict[str, Any]) -> None:
        for robot in self.agent.robot._objs:
            sapien_utils.set_articulation_render_material(
                robot, specular=constants.ROBOT_SPECULAR, roughness=constants.ROBOT_ROUGHNESS
            )
        table, upright = self.scene.create_actor_builder(), sapien.Pose(q=constants.TABLE_QUATERNION)
        table.add_nonconvex_collision_from_file(str(self.assets.table), pose=upright)
        table.add_visual_from_file(str(self.assets.table), pose=upright)
        table.initial_pose = sapien.Pose(constants.TABLE_POSITION)
        table.build_static(name="table")
        self._bodies = {key: self._load_body(key) for key in self.variant.bodies}

    def _load_body(self, key: BodyKey) -> Actor:
        """Load an object or plate into every env, behind the camera."""
        model = self.assets.model(key)
        material = sapien.physx.PhysxMaterial(constants.FRICTION, constants.FRICTION, 0.0)
        builder = self.scene.create_actor_builder()
        builder.add_multiple_convex_collisions_from_file(str(model.collision), material=material, density=model.density)
        builder.add_visual_from_file(str(model.visual))
        builder.initial_pose = sapien.Pose(HIDDEN[key].position)
        return builder.build(name=f"{key[0]} {model.folder.name}")

    def _load_lighting(self, options: dict[str, Any]) -> None:
        self.scene.set_ambient_light([constants.AMBIENT] * 3)
        for direction, strength in constants.LIGHTS:
            self.scene.add_directional_light(direction, [strength] * 3)

    def _after_reconfigure(self, options: dict[str, Any]) -> None:
        shown = [*self._bodies.values(), *self.agent.robot.get_links()]
        self._shown_ids = torch.unique(torch.cat([body.per_scene_id for body in shown]))
        images = {i: self.assets.images[i] for i in self.variant.images.members}
        camera = self._sensor_configs[CAMERA]  # sensor_configs may have changed its size
        self._backdrops = Backdrops(images, self.variant.texture, (camera.height, camera.width), self.device)
        self.episodes = [tasks.episode(self.task, self.obj_set, 0)] * self.num_envs
        self._judge = BatchJudge(self.num_envs, self.device)

    # episodes

    def _initialize_episode(self, env_idx: Tensor, options: dict[str, Any]) -> None:
        rows = env_idx.tolist()
        drawn = torch.randint(0, self.variant.total, (len(rows),), dtype=torch.int64)
        ids = torch.as_tensor(options.get("episode_id", drawn), dtype=torch.int64).reshape(-1).tolist()
        if len(ids) != len(rows):
            raise ValueError(f"episode_id holds {len(ids)} ids for {len(rows)} envs")
        self._begin(rows, ids)
        chosen = [self.episodes[row] for row in rows]
        shown = [e.bodies for e in chosen]
        for key, actor in self._bodies.items():
            actor.set_pose(self._poses([bodies.get(key, HIDDEN[key]) for bodies in shown]))  # of the envs being reset
        self.agent.reset(init_qpos=torch.tensor([e.qpos for e in chosen], device=self.device))

    def _begin(self, rows: list[int], ids: list[int]) -> None:
        """Let these rows play these episodes, of which nothing has been judged yet."""
        for row, episode_id in zip(rows, ids, strict=True):
            self.episodes[row] = tasks.episode(self.task, self.obj_set, episode_id)
        self._object = self._view("object", [e.object.index for e in self.episodes])
        self._plate = self._view("plate", [e.plate.index for e in self.episodes])
        chosen = [self.episodes[row] for row in rows]
        objects = torch.tensor([self.assets.objects[e.object.index].size for e in chosen], device=self.device)
        plates = torch.tensor([self.assets.plates[e.plate.index].size for e in chosen], device=self.device)
        self._judge.begin(rows, objects, plates)

    def _view(self, kind: str, indices: Sequence[int]) -> Actor:
        """The object or plate of each env's episode, as one actor."""
        entities = [self._bodies[kind, index]._objs[row] for row, index in enumerate(indices)]
        return Actor.create_from_entities(entities, self.scene, torch.arange(self.num_envs), shared_name=kind)

    def _poses(self, bodies: Iterable[Body | Teleport]) -> Pose:
        """Where these bodies start, one per env."""
        return Pose.create(torch.tensor([[*b.position, *b.quaternion] for b in bodies], device=self.device))

    def get_language_instruction(self) -> list[str]:
        """The instruction of each env's episode."""
        return [self.assets.instruction(e) for e in self.episodes]

    # success

    def evaluate(self) -> dict[str, Tensor]:
        """What holds now, [B] each; the two about grasping stay true for the rest of an episode."""
        self._teleport()
        object_, plate = self._object.pose.p, self._plate.pose.p
        force = self.scene.get_pairwise_contact_forces(self._object, self._plate)
        grasping = self.agent.is_grasping(self._object, GRASP_FORCE, GRASP_ANGLE)
        judged = self._judge.judge(self.elapsed_steps, object_ - plate, force, grasping)
        return judged._asdict() | distances(partial(torch.linalg.norm, dim=1), self._gripper.p, object_, plate)

    @property
    def _gripper(self) -> Pose:
        """Pose of the point between the fingers."""
        return self.agent.robot.links_map[constants.GRIPPER_LINK].pose

    def _teleport(self) -> None:
        """Move the object where an episode says so at this step."""
        if not self.variant.teleports:
            return
        new = self._judge.is_new(self.elapsed_steps) & (self.elapsed_steps == TELEPORT_STEP)  # [B]
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
        return level("default", Judgement(*(info[name] for name in Judgement._fields)))

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
        """The published picture u8 [B, H, W, 3] from the camera's colours and segmentation."""
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
        """The columns of observation.critic_columns, f32 [B, K]."""
        sizes = torch.tensor([self.assets.objects[e.object.index].size for e in self.episodes], device=self.device)
        steps, judged = self._judge.grasped_steps, self._judge.judgement
        grasp = [steps > 0, (steps / HELD_STEPS).clamp(max=1), judged.is_src_obj_grasped, judged.consecutive_grasp]
        columns = critic_columns(
            self._object.pose.raw_pose,
            self._plate.pose.p,
            self._gripper.raw_pose,
            sizes,
            self.agent.robot.get_qpos(),
            torch.stack(grasp, 1),
        )
        return torch.cat([column.float() for column in columns], 1).clamp(-FAR, FAR)

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
        for name in [name for name in saved if "/" in name]:
            kind, _, body = name.partition("/")
            state[kind][body] = saved[name]
        self.set_state_dict(state, torch.tensor(list(rows), device=self.device))
        for name, memory in self._memory().items():
            memory[list(rows)] = saved[name]

    def _memory(self) -> dict[str, Tensor]:
        """What an episode consists of besides its world, [B, ...] each; writing to a row changes it."""
        target = self.agent.controller.get_state()["arm"]["target_pose"]  # where the gripper is being sent, [B, 7]
        return {"elapsed": self._elapsed_steps, "target": target, **self._judge.memory()}
