"""One RoboTwin task object: one episode, drawn only where somebody looks.

RoboTwin draws random numbers from numpy's global generator; a world has its own state of it, so that what one scene of
a process does never depends on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlinf.simulators.contract import Array
from rlinf.simulators.robotwin.host import NO_LIMIT, Host
from rlinf.simulators.robotwin.picture import center_crop, to_bytes
from rlinf.simulators.robotwin.suite import CROPPED, Options
from rlinf.simulators.robotwin.unseen import Bodies

FILM_EVERY = 20  # physics steps between pictures of a video


class World:
    """An episode of a task, from its seed on."""

    def __init__(self, host: Host, options: Options, task: str, seed: int) -> None:
        """Build the scene and let it settle; raises the host's `unstable_error` where it does not."""
        self.host, self.options = host, options
        self.task: Any = host.new_task(task)
        if options.render == "fast":
            setup_scene = self.task.setup_scene
            self.task.setup_scene = lambda **given: setup_scene(**{"shadow": False, **given})
        self._film: Callable[[], None] = lambda: None  # called after every physics step of a chunk
        self._pictures: tuple[Array, Array | None] | None = None  # of the current state
        self._bodies = Bodies(())  # of which a camera draws those that it sees; of none it draws all
        arguments = host.arguments(task, options.task_config, options.embodiment)
        generator = np.random.get_state()
        try:
            self.task.setup_demo(now_ep_num=seed, seed=seed, **arguments)
            host.keep_renderer()
            if options.render == "fast":
                self._bodies = Bodies(host.drawn_bodies(self.task.scene))
            self._generator: Any = np.random.get_state()
        except BaseException:
            self.close(clear_cache=True)
            raise
        finally:
            np.random.set_state(generator)
        self.task.step_lim = NO_LIMIT
        self._draw_light: Callable[[], None] = self.task._update_render
        self.task._update_render = self._skip_picture
        self.look()

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Let numpy's global generator be this world's."""
        others = np.random.get_state()
        np.random.set_state(self._generator)
        try:
            yield
        finally:
            self._generator = np.random.get_state()
            np.random.set_state(others)

    def _skip_picture(self) -> None:
        """Stand in for RoboTwin's update of the renderer after every physics step: draw no picture.

        Light that flickers draws random numbers there; then RoboTwin's own function runs, with a renderer at rest.
        """
        if self.task.crazy_random_light:
            with _replaced(self.task.scene, "update_render", lambda: None):
                self._draw_light()
        self._film()

    def moved(self) -> None:
        """Note that the scene is no longer as it was drawn."""
        self._pictures = None

    def look(self) -> None:
        """Note that somebody looks at the scene as it is now: light that flickers changes once more, as in RoboTwin."""
        self._pictures = None
        if self.task.crazy_random_light:
            with self._own_random(), _replaced(self.task.scene, "update_render", lambda: None):
                self._draw_light()

    def info(self) -> dict[str, str]:
        """What the instruction is made from: the objects and the arms of this episode."""
        return self.task.get_info()

    def state(self) -> Array:
        """Targets of the joints and openings of the grippers (0 to 1), f64 [14], left arm first."""
        robot = self.task.robot
        return np.array(robot.get_left_arm_jointState() + robot.get_right_arm_jointState())

    def play(self, actions: Array, frames: list[Array] | None = None) -> bool:
        """Execute a chunk [C, 14] as one path, until it succeeds; whether it has. `frames` gets pictures on the way."""
        if self.task.eval_success:
            return True
        if frames is not None:
            self._film = _every(FILM_EVERY, lambda: frames.append(self._main_picture()))
        try:
            with self._own_random():
                told = self.task.gen_sparse_reward_data(np.asarray(actions, np.float64))[3]
        finally:
            self._film = lambda: None
        self.look()
        return bool(told["success"])

    def play_expert(self, at_frame: Callable[[], None]) -> bool:
        """Let RoboTwin's own expert play the episode; whether it succeeded.

        `at_frame` is called whenever RoboTwin would keep a frame: before and after each movement, and every save_freq
        physics steps of it.
        """
        self.task._take_picture = lambda *_: at_frame()
        with self._own_random():
            self.task.play_once()
            return bool(self.task.plan_success and self.task.check_success())

    def begin_shaping(self) -> None:
        """Note where the arms are before a chunk, for RoboTwin's shaped reward."""
        for side in ("left", "right"):
            for name in ("eef_poses", "joint_states", "gripper_state"):
                setattr(self.task, f"episode_{side}_{name}", [self._arm(side, name)])

    def shaped_level(self) -> float:
        """RoboTwin's shaped reward level after a chunk, 0 to 1."""
        for side in ("left", "right"):
            for name in ("eef_poses", "joint_states", "gripper_state"):
                getattr(self.task, f"episode_{side}_{name}").append(self._arm(side, name))
        self.task.reward.update()
        return float(self.task.reward.compute_reward())

    def _arm(self, side: str, name: str) -> Any:
        """One of the quantities that RoboTwin's shaped rewards read."""
        robot = self.task.robot
        if name == "gripper_state":
            return getattr(robot, f"is_{side}_gripper_open")()
        function = {"eef_poses": f"get_{side}_ee_pose", "joint_states": f"get_{side}_arm_jointState"}[name]
        return np.array(getattr(robot, function)())

    def pictures(self) -> tuple[Array, Array | None]:
        """What the head camera sees u8 [H, W, 3], and the cameras of the hands u8 [2, h, w, 3] where they are read."""
        if self._pictures is None:
            main = self._main_picture()
            cameras, wrists = self.task.cameras, None
            if self.options.wrist_cameras:
                wrists = np.stack([self._picture(camera) for camera in (cameras.left_camera, cameras.right_camera)])
            self._pictures = main, wrists
        return self._pictures

    def _main_picture(self) -> Array:
        """The head camera's picture of the scene as it is now."""
        task = self.task
        if self.options.wrist_cameras:
            task.cameras.update_wrist_camera(task.robot.left_camera.get_pose(), task.robot.right_camera.get_pose())
        task.scene.update_render()
        head = task.cameras.static_camera_list[task.cameras.static_camera_name.index("head_camera")]
        return self._picture(head)

    def _picture(self, camera: Any) -> Array:
        self._bodies.show_to(camera)
        camera.take_picture()
        picture = to_bytes(camera.get_picture("Color"))
        return center_crop(picture, CROPPED) if self.options.center_crop else picture

    def close(self, *, clear_cache: bool) -> None:
        """Free the scene, and with `clear_cache` the meshes and textures that SAPIEN keeps."""
        self._bodies = Bodies(())
        self.task.close_env(clear_cache=clear_cache)
        self.task = None


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of one object hide that of its class."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


def _every(count: int, do: Callable[[], None]) -> Callable[[], None]:
    """A function that does something every `count` calls."""
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        if calls % count == 0:
            do()

    return counted
