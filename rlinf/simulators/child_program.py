"""The program a simulator process runs: `python child_program.py`, driven over its stdin and stdout.

Control messages are length-prefixed JSON; arrays lie in a mapped file whose descriptor the parent passes down. Needs
numpy and the simulator only: the interpreter may be one in which rlinf and torch are not installed.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent  # rlinf
HEADER = struct.Struct("<I")
SIGN_OF_LIFE_S = 0.1  # between messages of a command that takes long; each one wakes the parent


class Channel:
    """Messages to and from the parent. Python's own stdin and stdout are moved away: simulators print."""

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "rb")
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def read(self) -> dict[str, Any]:
        """The next message; the process ends when the parent closed the pipe."""
        header = self._in.read(HEADER.size)
        if len(header) < HEADER.size:
            os._exit(0)
        return json.loads(self._in.read(HEADER.unpack(header)[0]))

    def write(self, message: dict[str, Any]) -> None:
        """Send one message."""
        body = json.dumps(message).encode()
        self._out.write(HEADER.pack(len(body)) + body)
        self._out.flush()


class Worker:
    """Several scenes and the commands on them."""

    def __init__(self, message: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.module = load_simulator(message["module"], message["folder"])
        self.options = self.module.Options(**message["options"])
        self.arrays = map_arrays(message["fd"], message["size"], message["arrays"])
        self.scenes: list[Any] = [self.module.Scene(self.options) for _ in range(message["num_scenes"])]
        self.experts: dict[int, Any] = {}  # of the running episodes, for scenes an expert plays
        self.demo: dict[str, Any] = {}
        self.drawn: dict[int, Any] = {}  # images of this command that are still to be fetched, by scene

    def reset(self, scene: int, reset_id: int) -> dict[str, Any]:
        """Start the episode `reset_id` and observe it."""
        self.scenes[scene].reset(reset_id)
        self.experts.pop(scene, None)
        return self._observe(scene)

    def chunk(self, scene: int, steps: int, stop: bool, record: bool) -> dict[str, Any]:
        """Execute the first `steps` actions of the scene's row; recorded scenes are the first of the process."""
        actions = np.array(self.arrays["actions"][scene, :steps])
        result = self.scenes[scene].step_chunk(actions, stop_on_success=stop, record=record)
        return self._report(scene, result)

    def expert_chunk(self, scene: int, steps: int, stop: bool, record: bool) -> dict[str, Any]:
        """The same with the actions of the scripted expert, who looks at the scene before each one."""
        sim = self.scenes[scene]
        if scene not in self.experts:
            self.experts[scene] = self.module.Expert(self.options)
        expert = self.experts[scene]
        whole: Any = None
        for i in range(steps):
            action = np.clip(expert.act(sim), -1, 1).astype(np.float32)
            one = sim.step_chunk(action[None], stop_on_success=stop, record=record)
            if whole is None:
                whole = type(one).zeros(steps)
            whole.rewards[i], whole.success[i], whole.done[i] = one.rewards[0], one.success[0], one.done[0]
            whole.steps, whole.info = i + 1, one.info
            whole.frames += one.frames
            if stop and (one.success[0] or one.done[0]):
                break
        return self._report(scene, whole)

    def _report(self, scene: int, result: Any) -> dict[str, Any]:
        """Share what a chunk did, and the observation after it."""
        return share_result(self.arrays, scene, result) | self._observe(scene)

    def get_state(self, scene: int) -> dict[str, Any]:
        """The scene's running episode."""
        return {"state": base64.b64encode(self.scenes[scene].get_state()).decode()}

    def set_state(self, scene: int, state: str) -> dict[str, Any]:
        """Continue a saved episode."""
        self.scenes[scene].set_state(base64.b64decode(state))
        return self._observe(scene)

    def demo_start(self, scene: int, reset_id: int, noise_std: float, noise_seed: int) -> dict[str, Any]:
        """Begin a demonstration: the expert acts, its action plus Gaussian noise is executed."""
        reply = self.reset(scene, reset_id)
        expert = self.module.Expert(self.options)
        self.demo = {"expert": expert, "std": noise_std, "rng": np.random.default_rng(noise_seed)}
        return reply

    def demo_steps(self, scene: int, steps: int) -> dict[str, Any]:
        """Up to `steps` expert steps, fewer at success; a row is what was seen, the clean label, what was executed."""
        arrays, demo, sim = self.arrays, self.demo, self.scenes[scene]
        for i in range(steps):
            seen = sim.observe()
            label = np.clip(demo["expert"].act(sim), -1, 1).astype(np.float32)
            noise = demo["rng"].standard_normal(label.shape).astype(np.float32)
            executed = np.clip(label + np.float32(demo["std"]) * noise, -1, 1)
            arrays["demo_images"][i] = seen["images"]() if callable(seen["images"]) else seen["images"]
            arrays["demo_states"][i] = seen["states"]
            if seen["wrist_images"] is not None:
                arrays["demo_wrist_images"][i] = seen["wrist_images"]
            if "demo_critic_states" in arrays:
                arrays["demo_critic_states"][i] = seen["critic_state"]
            arrays["demo_labels"][i], arrays["demo_actions"][i] = label, executed
            result = sim.step_chunk(executed[None], stop_on_success=True, record=False)
            if result.success.any():
                return {"steps": i + 1, "success": True}
        return {"steps": steps, "success": False}

    def _observe(self, scene: int) -> dict[str, Any]:
        """Share the observation; an image that is only drawn follows with `_fetch`."""
        sim = self.scenes[scene]
        seen = sim.observe()
        if callable(seen["images"]):
            self.drawn[scene] = seen["images"]
            seen["images"] = None
        return {"task": sim.task(), **share_observation(self.arrays, scene, seen)}

    def _fetch(self) -> None:
        """Share the images that were drawn: a GPU hands them over together."""
        for scene, image in self.drawn.items():
            self.arrays["images"][scene] = image()
        self.drawn.clear()

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """One command on several scenes; a scene that raises is rebuilt and reported, the others go on."""
        command = getattr(self, message["command"])
        replies: dict[str, Any] = {}
        failed: dict[str, str] = {}
        heard = time.monotonic()
        for scene, arguments in message["scenes"]:
            try:
                replies[str(scene)] = command(scene, **arguments)
            except Exception as error:
                failed[str(scene)] = describe(error)
                self.drawn.pop(scene, None)
                self.scenes[scene].close()
                self.scenes[scene] = self.module.Scene(self.options)
            if time.monotonic() - heard > SIGN_OF_LIFE_S:
                self.channel.write({"progress": scene})
                heard = time.monotonic()
        self._fetch()
        return {"replies": replies, "failed": failed}

    def close(self) -> None:
        """Free what the scenes hold."""
        for scene in self.scenes:
            scene.close()


class BatchWorker:
    """The same commands for a simulator that steps all its scenes together; an exception ends the process."""

    def __init__(self, batch: Any, arrays: dict[str, np.ndarray]) -> None:
        self.batch, self.arrays = batch, arrays

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """One command on several scenes; those whose numbers are not finite fail, the others go on."""
        rows = [scene for scene, _ in message["scenes"]]
        return getattr(self, message["command"])(rows, [arguments for _, arguments in message["scenes"]])

    def reset(self, rows: list[int], arguments: list[dict[str, Any]]) -> dict[str, Any]:
        """Start episodes and observe them."""
        self.batch.reset(rows, [a["reset_id"] for a in arguments])
        return self._reply(rows, [None] * len(rows))

    def chunk(self, rows: list[int], arguments: list[dict[str, Any]]) -> dict[str, Any]:
        """Execute the first `steps` actions of the scenes' rows; rows stop at success alike."""
        results = self.batch.step_chunk(
            rows,
            self.arrays["actions"][rows],
            [a["steps"] for a in arguments],
            stop_on_success=arguments[0]["stop"],
            record=[a["record"] for a in arguments],
        )
        return self._reply(rows, results)

    def get_state(self, rows: list[int], arguments: list[dict[str, Any]]) -> dict[str, Any]:
        """The running episodes."""
        states = [{"state": base64.b64encode(state).decode()} for state in self.batch.get_state(rows)]
        return {"replies": {str(row): state for row, state in zip(rows, states, strict=True)}, "failed": {}}

    def set_state(self, rows: list[int], arguments: list[dict[str, Any]]) -> dict[str, Any]:
        """Continue saved episodes."""
        self.batch.set_state(rows, [base64.b64decode(a["state"]) for a in arguments])
        return self._reply(rows, [None] * len(rows))

    def _reply(self, rows: list[int], results: list[Any]) -> dict[str, Any]:
        """Share results, where there are some, and observations."""
        replies, failed = {}, {}
        for row, result, seen in zip(rows, results, self.batch.observe(rows), strict=True):
            try:
                reply = {} if result is None else share_result(self.arrays, row, result)
                reply |= share_observation(self.arrays, row, seen)
                replies[str(row)] = {"task": self.batch.task(row), **reply}
            except FloatingPointError as error:
                failed[str(row)] = describe(error)
        return {"replies": replies, "failed": failed}

    def close(self) -> None:
        """Free what the simulator holds."""
        self.batch.close()


def make_worker(message: dict[str, Any], channel: Channel) -> Worker | BatchWorker:
    """What the parent's first message asks for."""
    if not message["batched"]:
        return Worker(message, channel)
    module = load_simulator(message["module"], message["folder"])
    batch = module.Batch(module.Options(**message["options"]), message["num_scenes"])
    return BatchWorker(batch, map_arrays(message["fd"], message["size"], message["arrays"]))


def share_result(arrays: dict[str, np.ndarray], scene: int, result: Any) -> dict[str, Any]:
    """Write what a chunk did to the scene's rows; returns the rest of the reply."""
    for name, values in (("rewards", result.rewards), ("success", result.success), ("done", result.done)):
        arrays[name][scene, : len(values)] = values
    if not np.isfinite(result.rewards).all():
        raise FloatingPointError(f"reward is not finite: {result.rewards}")
    for i, frame in enumerate(result.frames):
        arrays["frames"][scene, i] = frame
    return {"steps": result.steps, "info": result.info}


def share_observation(arrays: dict[str, np.ndarray], scene: int, seen: dict[str, Any]) -> dict[str, Any]:
    """Write an observation to the scene's rows; returns the rest of the reply."""
    for name in ("images", "wrist_images", "states", "critic_state"):
        if name in arrays and seen[name] is not None:
            arrays[name][scene] = seen[name]
    if seen["states"] is not None and not np.isfinite(seen["states"]).all():
        raise FloatingPointError(f"observation states are not finite: {seen['states']}")
    return {"description": seen["task_description"]}


def describe(error: Exception) -> str:
    """What went wrong, first in a line, then where."""
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-4)).rstrip()
    return f"{type(error).__name__}: {error}\n{frames}"


def load_simulator(module: str, folder: str | None) -> Any:
    """Import a simulator's module by its dotted name; one outside of rlinf may lie in `folder`."""
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]  # its folders are named like the packages
    if folder is not None:
        sys.path.append(folder)
    load_own_package()
    return importlib.import_module(module)


def load_own_package() -> None:
    """Make `import rlinf` find the rlinf of this file, whatever is installed; the packages beside it stay unseen."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE.name] = package
    spec.loader.exec_module(package)


def map_arrays(fd: int, size: int, layout: dict[str, Any]) -> dict[str, np.ndarray]:
    """Views into the mapped file: name -> (dtype, shape, offset)."""
    memory = mmap.mmap(fd, size)
    os.close(fd)
    return {
        name: np.frombuffer(memory, dtype, int(np.prod(shape)), offset).reshape(shape)
        for name, (dtype, shape, offset) in layout.items()
    }


def watch_parent(parent: int) -> None:
    """End with the parent even while a simulator call never returns."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main() -> None:
    """Answer commands until the parent goes away."""
    channel = Channel()
    first = channel.read()
    threading.Thread(target=watch_parent, args=(first["parent"],), daemon=True).start()
    try:
        worker = make_worker(first, channel)
    except ModuleNotFoundError as error:
        channel.write({"missing_module": error.name or str(error)})
        return
    except Exception as error:
        kind = {"SetupError": "setup", "AbsentError": "absent"}.get(type(error).__name__, "error")
        channel.write({kind: describe(error) if kind == "error" else str(error)})
        return
    channel.write({"ready": os.getpid()})
    while True:
        message = channel.read()
        if message["command"] == "close":
            worker.close()
            channel.write({"closed": True})
            sys.stderr.flush()
            os._exit(0)  # GL libraries print tracebacks from their destructors
        channel.write(worker.run(message))


if __name__ == "__main__":
    main()
