"""The program a simulator process runs: `python child_program.py FD`, driven over the connection FD of its parent.

Messages are JSON; arrays lie in a mapped file whose descriptor the parent passes down too. Needs numpy and the
simulator only: the interpreter may be one in which rlinf and torch are not installed.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent  # rlinf
SIGN_OF_LIFE_S = 0.1  # between messages of a command that takes long; each one wakes the parent
OBSERVED = ("images", "wrist_images", "states", "critic_state")  # arrays that hold observations, one row per scene
Arrays = Mapping[str, np.ndarray]
Reply = dict[str, Any]


def load_own_package() -> None:
    """Make `import rlinf` find the rlinf of this file, whatever is installed; the packages beside it stay unseen."""
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]  # its folders are named like the packages
    spec = importlib.util.spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE.name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    load_own_package()

from rlinf.simulators import contract  # noqa: E402
from rlinf.simulators.png import encode_png  # noqa: E402
from rlinf.simulators.tiles import shrink  # noqa: E402


class Worker:
    """Executes the parent's commands on scenes that are stepped one by one; a scene is known by its row."""

    def __init__(
        self,
        module: Any,
        options: Any,
        rows: contract.Rows,
        arrays: Arrays,
        parent: Connection,
        *,
        routed: bool,
        action_bound: float,
    ) -> None:
        self.module, self.options, self.arrays, self.parent, self.routed = module, options, arrays, parent, routed
        self.action_bound = action_bound
        self.heard = time.monotonic()  # when the parent last had a sign of life
        contract.on_sign_of_life(self.show_life)
        self.scenes: dict[int, contract.Simulator] = {row: module.Scene(options) for row in rows}
        self.experts: dict[
            int, tuple[contract.Expert | contract.DrivingExpert, np.random.Generator]
        ] = {}  # by scene, with its noise
        self.drawn: dict[int, Callable[[], np.ndarray]] = {}  # images of this command that are still to be fetched

    def run(self, message: dict[str, Any]) -> Reply:
        """Execute one command on several scenes; a scene that raises is rebuilt and reported, the others go on."""
        if message["command"] == "load":
            self.load(message["reset_ids"])
            return self._answer({}, {})
        command = getattr(self, message["command"])
        replies: dict[str, Reply] = {}
        failed: dict[str, str] = {}
        self.heard = time.monotonic()
        for scene, arguments in message["scenes"]:
            if scene not in self.scenes:  # a row that another process played so far
                self.scenes[scene] = self.module.Scene(self.options)
            began = time.monotonic()
            try:
                replies[str(scene)] = command(scene, **arguments)
                replies[str(scene)]["seconds"] = time.monotonic() - began
            except Exception as error:
                failed[str(scene)] = error_text(error)
                self.drawn.pop(scene, None)
                self.scenes[scene].close()
                self.scenes[scene] = self.module.Scene(self.options)
            self.show_life()
        began = time.monotonic()
        for scene, fetch in self.drawn.items():  # a GPU hands them over together
            self.arrays["images"][scene] = fetch()
        self.drawn.clear()
        for reply in replies.values():
            reply["seconds"] += (time.monotonic() - began) / len(replies)
        return self._answer(replies, failed)

    def show_life(self) -> None:
        """Tell the parent that work goes on, now and then."""
        if time.monotonic() - self.heard > SIGN_OF_LIFE_S:
            send(self.parent, {"progress": 0})
            self.heard = time.monotonic()

    def _answer(self, replies: dict[str, Reply], failed: dict[str, str]) -> Reply:
        """The answer to a command: by scene, and the tasks in memory where the parent goes by them."""
        answer: Reply = {"replies": replies, "failed": failed, "notes": contract.take_notes()}
        if self.routed:
            answer["loaded"], answer["built"] = self.module.loaded_tasks()
        return answer

    def load(self, reset_ids: Sequence[int]) -> None:
        """Load the tasks of these ids, in a scene of no row."""
        spare: contract.Simulator = self.module.Scene(self.options)
        for reset_id in reset_ids:
            spare.reset(reset_id)
            spare.observe()  # what draws is loaded with the first image
            send(self.parent, {"progress": reset_id})
        spare.close()

    def reset(self, scene: int, reset_id: int) -> Reply:
        """Start the episode `reset_id` and observe it."""
        self.scenes[scene].reset(reset_id)
        self.experts.pop(scene, None)
        return self._observe(scene)

    def chunk(self, scene: int, steps: int, stop: bool, record: bool) -> Reply:
        """Execute the first `steps` actions of the scene's row; recorded scenes are the first of the process."""
        actions = np.array(self.arrays["actions"][scene, :steps])
        result = self.scenes[scene].step_chunk(actions, stop_on_success=stop, record=record)
        return share_result(self.arrays, scene, result) | self._observe(scene)

    def expert_chunk(
        self, scene: int, steps: int, stop: bool, record: bool, noise_std: float = 0.0, noise_seed: int = 0
    ) -> Reply:
        """The same with the actions of the scripted expert, who looks at the scene before each one.

        Where the parent shares arrays for demonstrations, each step leaves there what was seen, what the expert wanted
        and what was executed, which is that plus Gaussian noise.
        """
        sim, arrays, whole = self.scenes[scene], self.arrays, contract.ChunkResult.zeros(steps)
        bound = np.float32(self.action_bound)
        if scene not in self.experts:
            self.experts[scene] = self.module.Expert(self.options), np.random.default_rng(noise_seed)
        expert, rng = self.experts[scene]
        if isinstance(expert, contract.DrivingExpert):
            return self._driven_chunk(scene, expert, steps, stop, record)
        drawn: dict[int, Callable[[], np.ndarray]] = {}  # images by step, fetched together
        for i in range(steps):
            seen = sim.observe() if "demo_images" in arrays else None
            action = np.clip(expert.act(sim), -bound, bound).astype(np.float32)
            if seen is not None:
                images: Any = seen["images"]
                if callable(images):
                    drawn[i], images = images, None
                share_observation(arrays, (scene, i), {**seen, "images": images}, "demo_")
                noise = rng.standard_normal(action.shape).astype(np.float32)
                arrays["demo_labels"][scene, i] = action
                action = np.clip(action + np.float32(noise_std) * noise, -bound, bound)
                arrays["demo_actions"][scene, i] = action
            one = sim.step_chunk(action[None], stop_on_success=stop, record=record)
            whole.rewards[i], whole.success[i], whole.done[i] = one.rewards[0], one.success[0], one.done[0]
            whole.steps, whole.info = i + 1, one.info
            whole.frames += one.frames
            if stop and (one.success[0] or one.done[0]):
                break
        for i, fetch in drawn.items():
            arrays["demo_images"][scene, i] = fetch()
        result = share_result(arrays, scene, whole)
        return result if "demo_images" in arrays else result | self._observe(scene)

    def encode_demo(self, scene: int, steps: int) -> Reply:
        """Encode the images that the last `steps` expert steps left; here, where every process has a core."""
        for name in ("images", "wrist_images"):
            if f"png_{name}" not in self.arrays:
                continue
            sources, targets = self.arrays[f"demo_{name}"][scene], self.arrays[f"png_{name}"][scene]
            sizes = self.arrays[f"size_{name}"][scene]
            for i in range(steps):
                for camera, image in enumerate(sources[i].reshape(-1, *sources.shape[-3:])):
                    png = encode_png(image)
                    targets[i, camera, : len(png)] = np.frombuffer(png, np.uint8)
                    sizes[i, camera] = len(png)
        return {}

    def _driven_chunk(self, scene: int, expert: contract.DrivingExpert, steps: int, stop: bool, record: bool) -> Reply:
        """As `expert_chunk`, for an expert that moves the robot itself."""
        sim, arrays = self.scenes[scene], self.arrays
        if "demo_images" not in arrays:
            result = expert.play(sim, steps, stop_on_success=stop, record=record)
            return share_result(arrays, scene, result) | self._observe(scene)
        rows, actions, result = expert.show(sim, steps)
        for i, seen in enumerate(rows):
            share_observation(arrays, (scene, i), {**seen, "images": fetched(seen)}, "demo_")
        for name in ("demo_labels", "demo_actions"):
            arrays[name][scene, : len(actions)] = actions
        return share_result(arrays, scene, result)

    def solves(self, scene: int, reset_id: int) -> Reply:
        """Whether the expert solves an episode; it plays in a scene of its own."""
        if scene not in self.experts:
            self.experts[scene] = self.module.Expert(self.options), np.random.default_rng(0)
        expert: Any = self.experts[scene][0]
        return {"solved": bool(expert.solves(reset_id))}

    def get_state(self, scene: int) -> Reply:
        """The scene's running episode."""
        return {"state": base64.b64encode(self.scenes[scene].get_state()).decode()}

    def set_state(self, scene: int, state: str) -> Reply:
        """Continue a saved episode."""
        self.scenes[scene].set_state(base64.b64decode(state))
        return self._observe(scene)

    def close(self) -> None:
        """Free what the scenes hold."""
        for scene in self.scenes.values():
            scene.close()

    def _observe(self, scene: int) -> Reply:
        """Share the observation; an image that is only drawn so far is fetched when all scenes are through."""
        seen = self.scenes[scene].observe()
        images: Any = seen["images"]
        if callable(images):
            self.drawn[scene], images = images, None
        shared = share_observation(self.arrays, scene, {**seen, "images": images})
        return {"task": self.scenes[scene].task(), **shared}


class BatchWorker:
    """Executes the same commands on a simulator that steps all its scenes together; an exception ends the process."""

    def __init__(self, batch: contract.BatchSimulator, arrays: Arrays) -> None:
        self.batch, self.arrays = batch, arrays

    def run(self, message: dict[str, Any]) -> Reply:
        """Execute one command on several scenes; those whose numbers are not finite fail, the others go on."""
        rows, arguments = zip(*message["scenes"], strict=True)
        return getattr(self, message["command"])(rows, arguments)

    def reset(self, rows: contract.Rows, arguments: Sequence[dict[str, Any]]) -> Reply:
        """Start episodes and observe them."""
        self.batch.reset(rows, [a["reset_id"] for a in arguments])
        return self._reply(rows)

    def chunk(self, rows: contract.Rows, arguments: Sequence[dict[str, Any]]) -> Reply:
        """Execute the first `steps` actions of the scenes' rows; all rows or none stop at success."""
        steps, record = [a["steps"] for a in arguments], [a["record"] for a in arguments]
        actions, stop = self.arrays["actions"][list(rows)], arguments[0]["stop"]
        return self._reply(rows, self.batch.step_chunk(rows, actions, steps, stop_on_success=stop, record=record))

    def get_state(self, rows: contract.Rows, arguments: Sequence[dict[str, Any]]) -> Reply:
        """The running episodes."""
        states = [{"state": base64.b64encode(state).decode()} for state in self.batch.get_state(rows)]
        return {"replies": dict(zip(map(str, rows), states, strict=True)), "failed": {}}

    def set_state(self, rows: contract.Rows, arguments: Sequence[dict[str, Any]]) -> Reply:
        """Continue saved episodes."""
        self.batch.set_state(rows, [base64.b64decode(a["state"]) for a in arguments])
        return self._reply(rows)

    def close(self) -> None:
        """Free what the simulator holds."""
        self.batch.close()

    def _reply(self, rows: contract.Rows, results: Sequence[contract.ChunkResult] = ()) -> Reply:
        """Share results, where there are some, and observations."""
        replies, failed = {}, {}
        for r, (row, seen) in enumerate(zip(rows, self.batch.observe(rows), strict=True)):
            try:
                reply = share_result(self.arrays, row, results[r]) if results else {}
                reply |= share_observation(self.arrays, row, {**seen, "images": fetched(seen)})
                replies[str(row)] = {"task": self.batch.task(row), **reply}
            except FloatingPointError as error:
                failed[str(row)] = error_text(error)
        return {"replies": replies, "failed": failed}


def make_worker(message: dict[str, Any], parent: Connection) -> Worker | BatchWorker:
    """Make the scenes that the parent's first message asks for; it names the folder of a simulator outside of rlinf."""
    if message["folder"] is not None:
        sys.path.append(message["folder"])
    module: Any = importlib.import_module(message["module"])
    options, rows = module.Options(**message["options"]), message["rows"]
    arrays = map_arrays(message["fd"], message["size"], message["arrays"])
    if message["batched"]:
        return BatchWorker(module.Batch(options, len(rows)), arrays)
    routed, bound = message["routed"], message["action_bound"]
    return Worker(module, options, rows, arrays, parent, routed=routed, action_bound=bound)


def share_result(arrays: Arrays, scene: int, result: contract.ChunkResult) -> Reply:
    """Write what a chunk did to the scene's rows; returns the rest of the reply."""
    for name, values in (("rewards", result.rewards), ("success", result.success), ("done", result.done)):
        arrays[name][scene, : len(values)] = values
    if not np.isfinite(result.rewards).all():
        raise FloatingPointError(f"reward is not finite: {result.rewards}")
    for i, frame in enumerate(result.frames):
        place = arrays["frames"][scene, i]
        place[:] = shrink(frame, len(frame) // len(place))
    return {"steps": result.steps, "info": result.info}


def share_observation(arrays: Arrays, where: Any, seen: Mapping[str, Any], prefix: str = "") -> Reply:
    """Write an observation to row `where` of the arrays that the parent has for it; returns the rest of the reply."""
    for name in OBSERVED:
        if prefix + name in arrays and seen[name] is not None:
            arrays[prefix + name][where] = seen[name]
    if seen["states"] is not None and not np.isfinite(seen["states"]).all():
        raise FloatingPointError(f"observation states are not finite: {seen['states']}")
    return {"description": seen["task_description"]}


def fetched(seen: contract.SceneObservation) -> np.ndarray:
    """The images of an observation, fetched where it holds a function."""
    images = seen["images"]
    return images() if callable(images) else images


def error_text(error: Exception) -> str:
    """The error in one line, and below it where it was raised."""
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-4)).rstrip()
    return f"{type(error).__name__}: {error}\n{frames}"


def map_arrays(fd: int, size: int, layout: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays that lie in a mapped file: name -> (dtype, shape, offset)."""
    memory = mmap.mmap(fd, size)
    return {
        name: np.frombuffer(memory, dtype, int(np.prod(shape)), offset).reshape(shape)
        for name, (dtype, shape, offset) in layout.items()
    }


def watch_parent(parent: int) -> None:
    """End with the parent even while a simulator call never returns."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def send(parent: Connection, message: Mapping[str, Any]) -> None:
    """Send one message."""
    parent.send_bytes(json.dumps(message).encode())


def start(parent: Connection) -> Worker | BatchWorker | None:
    """Make the worker and tell the parent that it is ready, or what is missing; None where there is none."""
    first = json.loads(parent.recv_bytes())
    threading.Thread(target=watch_parent, args=(first["parent"],), daemon=True).start()
    try:
        worker = make_worker(first, parent)
    except ModuleNotFoundError as error:
        send(parent, {"missing_module": error.name or str(error)})
    except contract.SetupError as error:
        send(parent, {"absent" if isinstance(error, contract.AbsentError) else "setup": str(error)})
    except Exception as error:
        send(parent, {"error": error_text(error)})
    else:
        send(parent, {"ready": os.getpid()})
        return worker
    return None


def main() -> None:
    """Answer commands until the parent closes the connection."""
    parent = Connection(int(sys.argv[1]))
    worker = start(parent)
    while worker is not None:
        try:
            message = json.loads(parent.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.close()
            sys.stderr.flush()
            os._exit(0)  # GL libraries print tracebacks from their destructors
        send(parent, worker.run(message))


if __name__ == "__main__":
    main()
