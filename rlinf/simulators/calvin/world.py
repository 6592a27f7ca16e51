"""CALVIN's play table in Bullet: robot, table, three blocks, two lights, two cameras. Imports pybullet.

Equal to calvin_env (main branch) bit for bit, in states and in TinyRenderer images: the order in which bodies are
loaded and commands are given is part of that. Bullet keeps contact caches that neither a reset nor a saved state
clears, so that a start is only reproducible in an empty world; reloading one takes 0.05-0.1 s.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path

import numpy as np
import pybullet
from pybullet_utils.bullet_client import BulletClient

from rlinf.simulators.calvin.assets import PLANE, ROBOT, block_files, table_file
from rlinf.simulators.calvin.conditions import choose_renderer
from rlinf.simulators.calvin.suite import STEP_ANGLE, STEP_LENGTH, Options
from rlinf.simulators.calvin.tasks import COLOURS, Block, Contact, Facts
from rlinf.simulators.contract import Array, SetupError

ARM, FINGERS, TCP_LINK = tuple(range(7)), (9, 11), 15
REST_POSE = (-1.21779206, 1.03987646, 2.11978261, -2.34205014, -0.87015947, 1.64119353, 0.55344866)
LOWEST = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])  # arm joints, rad
HIGHEST = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
NULL_SPACE = ([-7] * 9, [7] * 9, [7] * 9, [*REST_POSE, 0.04, 0.04])  # limits, ranges and rest pose of the solver
BASE = (-0.34, -0.46, 0.24)
ARM_FORCE, ARM_SPEED, FINGER_SPEED = 200, 2, 1
OPEN_WIDTH, OPEN_FORCE, CLOSE_FORCE = 0.04, 2.0, 200  # per finger, m and N
SUBSTEPS, PHYSICS_HZ = 8, 240  # 30 control steps a second
SCALE, TABLE_FORCE = 0.8, 4
STATIC_VIEW = (
    (2.871459009488717, -2.166602199425597, 2.555159848480571),  # from
    (-0.026242351159453392, -0.0302329882979393, 0.3920000493526459),  # to
    (0.4041403970338857, 0.22629790978217404, 0.8862616969685161),  # up
)
JOINTS = {"slide": "base__slide", "drawer": "base__drawer", "button": "base__button", "switch": "base__switch"}
LIGHTS = {"lightbulb": ("light_link", (1, 1, 0, 1)), "led": ("led_link", (0, 1, 0, 1))}  # link, colour when on
LEVERS = {"lightbulb": "switch", "led": "button"}  # the joint that turns it on and off
OFF_COLOUR = (1, 1, 1, 1)
EGL_LOADS = 50  # worlds per EGL context: the plugin leaks some megabytes with each
EGL_WASTE = 2  # frames: the first of an EGL context have no shadows


class World:
    """One Bullet world. `reset` builds it; then `step`, look and render."""

    scene: str  # letter
    robot: int  # bodies
    table: int
    blocks: dict[str, int]  # by colour
    joints: dict[str, int]  # of the table: slide, drawer, button, switch
    links: dict[str, int]  # of the table
    lights: dict[str, int]  # lightbulb, led: 0 or 1
    gripper: int  # last command: 1 open, -1 closed
    target_position: Array  # f64 [3]; actions move it, the robot follows
    target_euler: Array  # f64 [3]

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.options = folder, options
        self.renderer = choose_renderer(options.renderer)
        self.client = self._connect()
        self._static_view = self.client.computeViewMatrix(*STATIC_VIEW)
        self._static_lens = self.client.computeProjectionMatrixFOV(10, 1, 0.01, 10)
        self._wrist_lens = self.client.computeProjectionMatrixFOV(75, 1, 0.01, 2)

    def reset(self, scene: str, robot_obs: Array, scene_obs: Array) -> None:
        """An empty world, the scene's bodies, then the given state and one physics step."""
        self.scene = scene
        if self.renderer == "egl" and self._num_loads >= EGL_LOADS:
            self.client.disconnect()
            self.client = self._connect()
        self._load(scene)
        client, table, state = self.client, self.table, np.asarray(scene_obs, np.float64)
        for value, joint in zip(state[:2], ("slide", "drawer"), strict=True):
            client.resetJointState(table, self.joints[joint], value)
        self._switch_light("lightbulb", bool(state[4]))
        self._switch_light("led", bool(state[5]))
        client.resetJointState(table, self.joints["button"], state[2])
        client.resetJointState(table, self.joints["switch"], state[3])
        for colour, pose in zip(COLOURS, state[6:].reshape(3, 6), strict=True):
            client.resetBasePositionAndOrientation(
                self.blocks[colour], pose[:3], client.getQuaternionFromEuler(pose[3:])
            )
        self._place_robot(np.asarray(robot_obs[7:14]), robot_obs[6] / 2)
        client.stepSimulation()
        if self.renderer == "egl" and self._num_loads == 1:
            for _ in range(EGL_WASTE):
                self.static_image()

    def step(self, action: Array) -> None:
        """One control step, 1/30 s: the action [7] moves the target pose, the sign of its last column the gripper."""
        action = np.asarray(action, np.float64)
        if not np.isfinite(action).all():
            raise ValueError(f"action is not finite: {action.tolist()}")
        if action[6] == 0:
            raise ValueError("gripper action 0 is neither open (above 0) nor closed (below 0)")
        client, robot = self.client, self.robot
        self.target_position = self.target_position + STEP_LENGTH * action[:3]
        self.target_euler = self.target_euler + STEP_ANGLE * action[3:6]
        self.gripper = 1 if action[6] > 0 else -1
        orientation = client.getQuaternionFromEuler(self.target_euler)
        joints = client.calculateInverseKinematics(robot, TCP_LINK, self.target_position, orientation, *NULL_SPACE)
        for joint, angle in zip(ARM, np.clip(joints[:7], LOWEST, HIGHEST), strict=True):
            self._drive(joint, angle, ARM_FORCE, ARM_SPEED)
        width, force = (OPEN_WIDTH, OPEN_FORCE) if self.gripper == 1 else (0.0, CLOSE_FORCE)
        for finger in FINGERS:
            self._drive(finger, width, force, FINGER_SPEED)
        for _ in range(SUBSTEPS):
            client.stepSimulation()
        self._update_lights()

    def robot_obs(self) -> Array:
        """f64 [15]: tcp position 3, Euler angles 3, gripper opening, arm joints 7, last gripper action."""
        client, robot = self.client, self.robot
        position, orientation = client.getLinkState(robot, TCP_LINK)[:2]
        width = sum(client.getJointState(robot, finger)[0] for finger in FINGERS)
        arm = [client.getJointState(robot, joint)[0] for joint in ARM]
        return np.array([*position, *client.getEulerFromQuaternion(orientation), width, *arm, self.gripper])

    def scene_obs(self) -> Array:
        """f64 [24]: slide, drawer, button, switch, lightbulb, led, then position and Euler angles of each block."""
        values: list[float] = [self.joint(name) for name in JOINTS]
        values += [self.lights["lightbulb"], self.lights["led"]]
        for colour in COLOURS:
            position, orientation = self.block_pose(colour)
            values += [*position, *self.client.getEulerFromQuaternion(orientation)]
        return np.array(values, np.float64)

    def facts(self) -> Facts:
        """The facts of this moment, for the judge of tasks."""
        client = self.client
        touching: dict[int, set[Contact]] = {body: set() for body in (self.robot, *self.blocks.values())}
        for _, body_a, body_b, link_a, link_b, *_ in client.getContactPoints():
            if body_a in touching:
                touching[body_a].add((body_b, link_b))
            if body_b in touching:
                touching[body_b].add((body_a, link_a))
        blocks = {}
        for colour, body in self.blocks.items():
            position, orientation = self.block_pose(colour)
            linear, angular = client.getBaseVelocity(body)
            blocks[colour] = Block(
                body=body,
                position=np.array(position),
                orientation=np.array(orientation),
                linear_velocity=np.array(linear),
                angular_velocity=np.array(angular),
                contacts=frozenset(touching[body]),
            )
        return Facts(
            blocks=blocks,
            robot=self.robot,
            robot_touches=frozenset(body for body, _ in touching[self.robot]),
            table_links={name: (self.table, link) for name, link in self.links.items()},
            doors={name: self.joint(name) for name in ("slide", "drawer")},
            lights=dict(self.lights),
            levers={light: self.joint(name) / self._half[name] for light, name in LEVERS.items()},
        )

    def static_image(self) -> Array:
        """u8 [size, size, 3] from the fixed camera."""
        return self._image(self.options.size, self._static_view, self._static_lens)

    def wrist_image(self) -> Array:
        """u8 [wrist_size, wrist_size, 3] from the camera at the gripper."""
        position, orientation = self.client.getLinkState(self.robot, self._camera_link)[:2]
        axes = np.array(self.client.getMatrixFromQuaternion(orientation)).reshape(3, 3)
        view = self.client.computeViewMatrix(position, position + axes[:, 1], -axes[:, 2])
        return self._image(self.options.wrist_size, view, self._wrist_lens)

    def joint(self, name: str) -> float:
        """Position of a table joint: slide, drawer, button, switch."""
        return float(self.client.getJointState(self.table, self.joints[name])[0])

    def block_pose(self, colour: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Position and quaternion (xyzw) of a block."""
        return self.client.getBasePositionAndOrientation(self.blocks[colour])

    def link_box(self, link: str) -> tuple[Array, Array]:
        """Lowest and highest corner of a part of the table: button_link, drawer_link, slide_link, switch_link, ..."""
        low, high = self.client.getAABB(self.table, self.links[link])
        return np.array(low), np.array(high)

    def close(self) -> None:
        """Free the world."""
        self.client.disconnect()

    def _connect(self) -> BulletClient:
        """A Bullet server of its own, with the renderer that was chosen."""
        self._num_loads = 0
        if self.renderer == "tiny":
            return BulletClient(pybullet.DIRECT)
        size = max(self.options.size, self.options.wrist_size)
        client = BulletClient(pybullet.DIRECT, options=f"--width={size} --height={size}")
        plugin = importlib.util.find_spec("eglRenderer")
        assert plugin is not None
        if client.loadPlugin(plugin.origin, "_eglRendererPlugin") < 0:
            raise SetupError("renderer=egl, but Bullet's EGL plugin does not load; use renderer=tiny")
        return client

    def _load(self, scene: str) -> None:
        """Empty the world and load robot, blocks, table and floor, in this order."""
        client, data = self.client, self.folder
        self._num_loads += 1
        client.resetSimulation()
        client.setTimeStep(1 / PHYSICS_HZ)
        client.setGravity(0, 0, -9.8)
        self.robot = self._load_robot()
        pedestal = client.createVisualShape(
            pybullet.GEOM_CYLINDER,
            rgbaColor=[1, 1, 1, 1],
            radius=0.13,
            length=BASE[2],
            visualFramePosition=[BASE[0] - 0.05, BASE[1], BASE[2] / 2],
        )
        client.createMultiBody(baseVisualShapeIndex=pedestal)
        gear = client.createConstraint(
            self.robot, FINGERS[0], self.robot, FINGERS[1], pybullet.JOINT_GEAR, [1, 0, 0], [0, 0, 0], [0, 0, 0]
        )
        client.changeConstraint(gear, gearRatio=-1, erp=0.1, maxForce=50)
        self._place_robot(np.array(REST_POSE), OPEN_WIDTH)
        self.gripper = 1
        self.blocks = {
            colour: client.loadURDF(str(data / file), [0.1 * i, -0.1, 0.46], [0, 0, 0, 1], globalScaling=SCALE)
            for i, (colour, file) in enumerate(zip(COLOURS, block_files(scene), strict=True))
        }
        self.table = client.loadURDF(str(data / table_file(scene)), [0, 0, 0], [0, 0, 0, 1], globalScaling=SCALE)
        self._prepare_table()
        client.loadURDF(str(data / PLANE))

    def _load_robot(self) -> int:
        """Load the robot, with fewer triangles where `render` is fast."""
        file = self.folder / ROBOT
        if self.options.render == "exact":
            return self.client.loadURDF(str(file), BASE, [0, 0, 0, 1], useFixedBase=True)
        with tempfile.NamedTemporaryFile("w", suffix=".urdf") as lighter:
            lighter.write(low_poly_urdf(file))
            lighter.flush()
            return self.client.loadURDF(lighter.name, BASE, [0, 0, 0, 1], useFixedBase=True)

    def _prepare_table(self) -> None:
        """Look up joints and links by name, and set the motors that hold the doors, the button and the switch."""
        client, table = self.client, self.table
        self.links, by_name, limits = {"base_link": -1}, {}, {}
        for i in range(client.getNumJoints(table)):
            info = client.getJointInfo(table, i)
            by_name[info[1].decode()], self.links[info[12].decode()], limits[i] = i, i, info[8:10]
        self.joints = {name: by_name[joint] for name, joint in JOINTS.items()}
        self._half = {name: sum(limits[self.joints[name]]) / 2 for name in ("button", "switch")}
        spring = {"controlMode": pybullet.POSITION_CONTROL, "targetPosition": 0}
        brake = {"controlMode": pybullet.VELOCITY_CONTROL}
        for name, joint in self.joints.items():
            client.setJointMotorControl2(table, joint, force=TABLE_FORCE, **(spring if name == "button" else brake))
        self._pressed = self._switched = False
        self.lights = dict.fromkeys(LIGHTS, 0)
        robot_links = {client.getJointInfo(self.robot, i)[12]: i for i in range(client.getNumJoints(self.robot))}
        self._camera_link = robot_links[b"gripper_cam"]

    def _place_robot(self, arm: Array, finger: float) -> None:
        """Put arm and fingers to these joint positions and hold them; the target pose is where the gripper then is."""
        client, robot = self.client, self.robot
        for joint, angle in zip(ARM, arm, strict=True):
            client.resetJointState(robot, joint, angle)
            self._drive(joint, angle, ARM_FORCE, ARM_SPEED)
        for joint in FINGERS:
            client.resetJointState(robot, joint, finger)
            self._drive(joint, finger, CLOSE_FORCE, FINGER_SPEED)
        position, orientation = client.getLinkState(robot, TCP_LINK)[:2]
        self.target_position = np.array(position)
        self.target_euler = np.array(client.getEulerFromQuaternion(orientation))

    def _drive(self, joint: int, target: float, force: float, speed: float) -> None:
        """Let a motor of the robot move a joint to a position."""
        self.client.setJointMotorControl2(
            self.robot, joint, pybullet.POSITION_CONTROL, targetPosition=target, force=force, maxVelocity=speed
        )

    def _update_lights(self) -> None:
        """Toggle the LED when the button goes down; let the bulb follow the switch when that passes its middle."""
        pressed = self.joint("button") > self._half["button"]
        if pressed and not self._pressed:
            self._switch_light("led", not self.lights["led"])
        self._pressed = pressed
        switched = self.joint("switch") > self._half["switch"]
        if switched != self._switched:
            self._switch_light("lightbulb", switched)
        self._switched = switched

    def _switch_light(self, light: str, on: bool) -> None:
        """Switch the bulb or the LED, and show it."""
        link, colour = LIGHTS[light]
        self.lights[light] = int(on)
        self.client.changeVisualShape(self.table, self.links[link], rgbaColor=colour if on else OFF_COLOUR)

    def _image(self, size: int, view: list[float], lens: list[float]) -> Array:
        """u8 [size, size, 3] of a camera given by its view and projection matrices."""
        pixels = self.client.getCameraImage(size, size, view, lens)[2]  # a tuple where pybullet was built without numpy
        return np.asarray(pixels, np.uint8).reshape(size, size, 4)[..., :3]


def low_poly_urdf(file: Path) -> str:
    """The robot's URDF with arm and hand drawn as their collision meshes: a hundredth of the triangles."""
    text = re.sub(r"package://meshes/visual/(link\d|hand)\.obj", r"package://meshes/collision/\1.obj", file.read_text())
    return text.replace("package://", f"{file.parent}/")
