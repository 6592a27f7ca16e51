"""Play scripted experts in simulator processes: the raw material of demonstrations, and how good the experts are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rlinf.data.types import EpisodeRecord
from rlinf.envs.config import EnvConfig
from rlinf.envs.fleet import Fleet
from rlinf.envs.routing import usable_cores
from rlinf.envs.spec import env_options, env_spec, eval_trials, find_simulator
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.runtime.memory import host_bytes_available
from rlinf.simulators.contract import EnvSpec, task_number

PIECE = 32  # expert steps per message: bounds the shared memory and shows progress
AHEAD_BYTES = 8 << 30  # of images of episodes that wait until an earlier one is finished, before they are encoded
PIXELS = 1024  # of an encoded picture that are kept for statistics
T = TypeVar("T")


@dataclass(frozen=True)
class DemoJob:
    """One demonstration to play: which episode, for how long, and with which noise."""

    reset_id: int
    max_steps: int
    noise_std: float = 0.0  # of the Gaussian noise added to executed actions; labels stay clean
    noise_seed: int = 0


@dataclass
class Pictures:
    """The pictures of one camera as the process that drew them encoded them."""

    pngs: list[bytes] = field(default_factory=list)  # T
    pixels: list[np.ndarray] = field(default_factory=list)  # T u8 [P, 3]: some of each, for statistics


@dataclass(frozen=True)
class Demo:
    """One episode as played; row t is what the expert saw and did at step t, up to and including success."""

    job: DemoJob
    task: str
    description: str
    success: bool
    images: np.ndarray  # u8 [T, H, W, 3]
    states: np.ndarray  # f32 [T, S]
    labels: np.ndarray  # f32 [T, A] what the expert wanted, clipped to [-1, 1]
    actions: np.ndarray  # f32 [T, A] what was executed
    wrist_images: np.ndarray | None = None  # u8 [T, N, h, w, 3]
    critic_state: np.ndarray | None = None  # f32 [T, K] the simulator's privileged state, where it tells it
    pictures: tuple[Pictures, ...] = ()  # by camera, the main one first, where they were encoded; then no images


@dataclass
class _Running:
    """A demonstration under way, of which some pieces were played."""

    job: DemoJob
    task: str
    description: str
    steps: int = 0
    pieces: list[dict[str, np.ndarray]] = field(default_factory=list)
    pictures: tuple[Pictures, ...] = ()

    def next_piece(self) -> dict[str, Any]:
        """Arguments of the command `expert_chunk` that plays its next steps."""
        steps, job = min(PIECE, self.job.max_steps - self.steps), self.job
        return {"steps": steps, "stop": True, "record": False, "noise_std": job.noise_std, "noise_seed": job.noise_seed}

    def demo(self, success: bool) -> Demo:
        """Join the pieces into the finished demonstration."""
        columns = {name: np.concatenate([piece[name] for piece in self.pieces]) for name in self.pieces[0]}
        return Demo(self.job, self.task, self.description, success, **columns, pictures=self.pictures)


class _Lane:
    """One simulator process that plays one expert episode after another."""

    def __init__(self, cfg: EnvConfig, spec: EnvSpec, *, encodes: bool) -> None:
        self._job: DemoJob | None = None
        self.encodes, self._cameras = encodes, 1 + spec.num_wrist_images
        self.tasks: set[int] = set()  # that it has played; those it keeps in memory are among them
        self.fleet = Fleet(
            cfg,
            replace(spec, batched=False),  # an expert looks into one scene at a time
            [0],
            options=env_options(cfg),
            chunk_size=PIECE,
            playing=lambda _: f"demonstration reset id {self._job.reset_id}" if self._job else "",
            critic_state=True,
            demonstrations=True,
        )

    def play(self, job: DemoJob, stopping: threading.Event) -> Demo:
        """Play a demonstration in pieces; it begins again where the simulator died."""
        self._job = job
        self.fleet.start()
        self.fleet.reset_failure_count()
        while True:
            self.fleet.place({0: job.reset_id}, ())
            replies, _ = self.fleet.command("reset", {0: {"reset_id": job.reset_id}})
            for reply in replies.values():
                if demo := self._play_on(_Running(job, reply["task"], reply["description"]), stopping):
                    return demo

    def _play_on(self, run: _Running, stopping: threading.Event) -> Demo | None:
        """Play to the end of the episode; None where the simulator died."""
        while not stopping.is_set():
            replies, _ = self.fleet.command("expert_chunk", {0: run.next_piece()})
            if not replies:
                return None
            played = slice(replies[0]["steps"])
            run.steps += played.stop
            shown = self.fleet.arrays(0, "demo_")
            if self.encodes and not self._take_encoded(run, shown, played.stop):
                return None
            run.pieces.append({name: rows[played].copy() for name, rows in shown.items()})
            success, done = (bool(self.fleet.array(0, name)[played].any()) for name in ("success", "done"))
            if success or done or run.steps >= run.job.max_steps:
                return run.demo(success)
        raise CancelledError

    def _take_encoded(self, run: _Running, shown: dict[str, np.ndarray], steps: int) -> bool:
        """Let the process encode the pictures of a piece, and move them from `shown` to the run; False if it died."""
        if not self.fleet.command("encode_demo", {0: {"steps": steps}})[0]:
            return False
        run.pictures = run.pictures or tuple(Pictures() for _ in range(self._cameras))
        encoded, sizes, camera = self.fleet.arrays(0, "png_"), self.fleet.arrays(0, "size_"), 0
        for name, pngs in encoded.items():
            drawn = shown[name].reshape(len(shown[name]), pngs.shape[1], -1, 3)  # [PIECE, cameras, pixels, 3]
            for c in range(pngs.shape[1]):
                into = run.pictures[camera + c]
                into.pngs += [pngs[i, c, : sizes[name][i, c]].tobytes() for i in range(steps)]
                into.pixels += [drawn[i, c, :: 1 + drawn.shape[2] // PIXELS].copy() for i in range(steps)]
            camera += pngs.shape[1]
            shown[name] = shown[name][:0]
        return True


def _choose(waiting: Sequence[int], jobs: Sequence[DemoJob], lane: _Lane, lanes: Sequence[_Lane]) -> int:
    """The next of the waiting jobs (positions in `jobs`): of a task the lane has played, else that fewest have."""
    tasks = {i: task_number(jobs[i].reset_id) for i in waiting}
    own = [i for i in waiting if tasks[i] in lane.tasks]
    return own[0] if own else min(waiting, key=lambda i: sum(tasks[i] in other.tasks for other in lanes))


class DemoPlayer:
    """Several simulator processes that play one expert episode each at a time, none waiting for another.

    Example: `with DemoPlayer(cfg.env.train, spec) as player: demos = list(player.play(jobs))`
    """

    def __init__(self, cfg: EnvConfig, spec: EnvSpec, *, num_processes: int = 0, encodes: bool = False) -> None:
        """With `encodes` the processes also encode what they draw, and demonstrations have no images but `pictures`."""
        check_expert(cfg)
        count = num_processes or cfg.num_processes or usable_cores()
        self._lanes = [_Lane(cfg, spec, encodes=encodes) for _ in range(count)]
        pixels = math.prod(spec.image_size) + spec.num_wrist_images * math.prod(spec.wrist_image_size)
        self._frame_bytes = 3 * pixels
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> DemoPlayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the simulator processes; demonstrations under way are given up."""
        self._stopping.set()
        self._threads.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.fleet.close()

    @property
    def num_restarts(self) -> int:
        """Failures of simulators since the start."""
        return sum(lane.fleet.num_restarts for lane in self._lanes)

    def play(self, jobs: Sequence[DemoJob]) -> Iterator[Demo]:
        """Yield a demonstration for each job, in their order; also those that failed, as `Demo.success` tells."""
        return self.play_and(lambda demo: demo, jobs)

    def play_and(
        self,
        finish: Callable[[Demo], T],
        jobs: Sequence[DemoJob],
        on_played: Callable[[int, T], None] = lambda index, played: None,
    ) -> Iterator[T]:
        """Yield `finish(demo)` for each job, in their order, computed by the thread of the process that played it.

        `on_played` gets it with its position as soon as it is there, and may add to `jobs`.
        """

        def play(lane: _Lane, job: DemoJob) -> T:
            return finish(lane.play(job, self._stopping))

        waiting: list[int] = []  # positions in `jobs`
        idle, under_way = list(self._lanes), dict[Future[T], tuple[int, _Lane]]()
        finished: dict[int, T] = {}
        number = known = 0
        while number < len(jobs):
            waiting += range(known, len(jobs))
            known, end = len(jobs), number + self._ahead(jobs[number].max_steps)
            while idle and waiting and waiting[0] < end:
                lane = idle.pop()
                index = _choose([i for i in waiting if i < end], jobs, lane, self._lanes)
                waiting.remove(index)
                lane.tasks.add(task_number(jobs[index].reset_id))
                under_way[self._threads.submit(play, lane, jobs[index])] = index, lane
            # Who has finished gets the next job before what is ready is handed over: that may take its time.
            waits = None if number not in finished else 0
            for future in wait(under_way, timeout=waits, return_when=FIRST_COMPLETED).done:
                index, lane = under_way.pop(future)
                finished[index] = future.result()
                on_played(index, finished[index])
                idle.append(lane)
            if number in finished and not (idle and waiting and waiting[0] < end):
                yield finished.pop(number)
                number += 1

    def _ahead(self, max_steps: int) -> int:
        """How many jobs may be under way or wait for an earlier one."""
        lanes = len(self._lanes)
        memory = min(AHEAD_BYTES, host_bytes_available() // 4)
        return max(2 * lanes, memory // (self._frame_bytes * max_steps))


def check_expert(cfg: EnvConfig) -> None:
    """Refuse a simulator without a scripted expert."""
    if "Expert" not in vars(find_simulator(cfg.env_type)):
        raise UserError(f"simulator {cfg.env_type!r} has no scripted expert")


def play_trials(cfg: EnvConfig, *, seed: int) -> list[EpisodeRecord]:
    """Let the expert play the held-out trials of an evaluation; returns their records in the order of the trials."""
    check_expert(cfg)
    spec = replace(env_spec(cfg, "env.eval"), batched=False)  # an expert looks into one scene at a time
    trials = eval_trials(cfg, spec)
    num_envs = min(cfg.total_num_envs, len(trials))
    cfg = replace(cfg, total_num_envs=num_envs)
    env = VecEnv(cfg, spec, env_ids=range(num_envs), mode="eval", chunk_size=PIECE, seed=seed, trials=trials)
    try:
        env.reset()
        while not env.done:
            env.chunk_step(None)
    finally:
        env.close()
    return sorted(env.drain_episodes(), key=lambda record: trials.index(record.reset_id))
