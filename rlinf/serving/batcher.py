"""Batcher: requests of several clients become policy calls. While one batch computes, the next is read and gathered.

    pool: bytes -> Row          gather thread: rows -> batch on the device          inference thread: batch -> actions

A batch is closed as soon as nobody else is expected to ask, or it is full; where the device is idle, at the latest
`window` seconds after its first request. So a lone client never waits for the window.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from rlinf.data.types import Observation
from rlinf.serving.messages import RequestError, unpack
from rlinf.serving.observations import Row, read_observation
from rlinf.serving.policy import Episode, LoadedPolicy

logger = logging.getLogger(__name__)
ACTIVE_SECONDS = 1.0  # a client that came, asked or was answered within these is expected to ask
READERS = 4  # threads that unpack messages
SMALL_SIZES = (1, 2, 4, 8, 12)
MAX_PADS = 2  # rows that are computed for nothing; a call costs about as much as two rows more of it


class PolicyFailedError(RuntimeError):
    """The policy raised; the server goes on, the request has no answer."""


@dataclass(eq=False)
class Session:
    """One client."""

    episode: Episode
    last_seen: float  # time.monotonic() of its arrival, its last request or its last answer
    in_flight: bool = False  # its request is in a batch that is being computed, or waits to be


@dataclass(frozen=True)
class Answer:
    """What a request gets."""

    actions: np.ndarray  # f32 [C, A]
    infer_seconds: float  # of the policy call
    batch: int  # requests that shared it


@dataclass(frozen=True, eq=False)
class _Request:
    session: Session
    row: Row
    answer: Future[Answer]
    arrived: float


@dataclass(frozen=True)
class _Batch:
    requests: list[_Request]
    obs: Observation  # on the policy's device, with pads where recordings want them
    copied: torch.cuda.Event | None  # when it is there


@dataclass
class Counts:
    """What was done so far."""

    requests: int = 0
    batches: int = 0
    refused: int = 0
    failure: str | None = None  # of the last policy call, None once one has succeeded


def batch_sizes(most: int) -> list[int]:
    """The batch sizes that are computed on a GPU, where each is recorded once: 1, 2, 4, 8, 12, 16, 24 ... `most`."""
    sizes = [size for size in (*SMALL_SIZES, *range(16, most, 8)) if size < most]
    return [*sizes, most]


def rows_to_take(waiting: int, sizes: Sequence[int]) -> int:
    """How many of the waiting rows to compute now: all, where they nearly fill one of the sizes, else the size below.

    What is left goes with the next batch: padded far, the alternating halves of 64 clients would reach 87 % of the
    policy's rate.
    """
    waiting = min(waiting, sizes[-1])
    above = next(size for size in sizes if size >= waiting)
    return waiting if above - waiting <= MAX_PADS else max(size for size in sizes if size <= waiting)


@dataclass
class Batcher:
    """Threads that answer `submit`; close it after use."""

    policy: LoadedPolicy
    max_batch: int = 64
    window: float = 0.002  # seconds
    prompt: str | None = None  # of requests that have none
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._device = self.policy.device
        self._sizes = batch_sizes(self.max_batch) if self._device.type == "cuda" else list(range(1, self.max_batch + 1))
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._computes_behind = self._copies is not None  # the device works on while this process does other things
        self._changed = threading.Condition()  # guards all below
        self._sessions: set[Session] = set()
        self._pending: list[_Request] = []
        self._open_batches = 0  # gathered and not answered: one that is computed, one that waits
        self._closed = False
        self._ready: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), thread_name_prefix="reader")
        self._threads = [threading.Thread(target=t, name=t.__name__, daemon=True) for t in (self._gather, self._infer)]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ for the server
    def open_session(self) -> Session:
        """A client arrives."""
        session = Session(Episode(self.policy.seed), time.monotonic())
        with self._changed:
            self._sessions.add(session)
        return session

    def close_session(self, session: Session) -> None:
        """A client leaves; nobody waits for it any longer."""
        with self._changed:
            self._sessions.discard(session)
            self._changed.notify_all()

    def submit(self, session: Session, message: bytes) -> Future[Answer]:
        """Read the message, let it share a policy call, and answer. A session has one request at a time."""
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()  # a client that has left does not cancel it: others share the batch
        session.last_seen = arrived = time.monotonic()
        try:
            self._readers.submit(self._read, session, message, answer, arrived)
        except RuntimeError:  # shut down
            answer.set_exception(RequestError("the server is stopping"))
        return answer

    def warm_up(self, text: str, sizes: Sequence[int] | None = None) -> None:
        """Compute batches of the sizes on black images once, so that kernels are compiled and recorded."""
        spec = self.policy.spec
        side, wrists = spec.image_size, spec.num_images - 1
        image = np.zeros((side, side, 3), np.uint8)
        wrist = np.zeros((wrists, side, side, 3), np.uint8) if wrists else None
        state = np.zeros(spec.state_dim, np.float32) if spec.state_dim else None
        for size in self._sizes if sizes is None else sizes:
            rows = [Row(image, wrist, state, text)] * size
            obs, copied = self._on_device(rows)
            self._start(obs, copied, [Episode() for _ in rows]).cpu()

    def close(self) -> None:
        """Answer what was asked, then end the threads."""
        self._readers.shutdown(wait=True)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------------ reader threads
    def _read(self, session: Session, message: bytes, answer: Future[Answer], arrived: float) -> None:
        try:
            row = read_observation(unpack(message), self.policy.spec, self.prompt)
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("a message could not be read")
                error = RequestError(f"the message could not be read: {type(error).__name__}")
            with self._changed:
                self.counts.refused += 1
            answer.set_exception(error)
            return
        if row.reset:
            session.episode = Episode(self.policy.seed if row.seed is None else row.seed)
        with self._changed:
            self._pending.append(_Request(session, row, answer, arrived))
            self._changed.notify_all()

    # ------------------------------------------------------------------ gather thread
    def _gather(self) -> None:
        while True:
            with self._changed:
                while not (requests := self._due()):
                    if self._closed and not self._pending:
                        self._ready.put(None)
                        return
                    self._changed.wait(self._patience())
                self._pending = [request for request in self._pending if request not in requests]
                for request in requests:
                    request.session.in_flight = True
                self._open_batches += 1
            try:
                obs, copied = self._on_device([request.row for request in requests])
                self._ready.put(_Batch(requests, obs, copied))
            except Exception as error:
                self._fail(requests, error)

    def _due(self) -> list[_Request]:
        """The batch to close now: the oldest request and those of its shapes; none while it pays to wait."""
        if not self._pending or self._open_batches > 1:
            return []
        first = self._pending[0]
        same = [request for request in self._pending if request.row.shapes == first.row.shapes]
        same = same[: rows_to_take(len(same), self._sizes)]
        idle = self._open_batches == 0
        now = time.monotonic()
        if self._closed or len(same) == self.max_batch or (idle and now >= first.arrived + self.window):
            return same
        waiting = {request.session for request in self._pending}
        expected = (s for s in self._sessions - waiting if not s.in_flight and now - s.last_seen < ACTIVE_SECONDS)
        return [] if any(expected) else same

    def _patience(self) -> float | None:
        """Seconds until the window of the oldest request ends; None where only an event can close a batch."""
        if not self._pending or self._open_batches:
            return None
        return max(0.0, self._pending[0].arrived + self.window - time.monotonic())

    def _on_device(self, rows: list[Row]) -> tuple[Observation, torch.cuda.Event | None]:
        """The rows, padded with the first one to a size that is recorded; on a GPU copied behind the running batch."""
        size = next(size for size in self._sizes if size >= len(rows))
        first = rows[0]
        texts = [row.text for row in rows] + [first.text] * (size - len(rows))

        def stacked(part: Callable[[Row], Any], dtype: torch.dtype) -> torch.Tensor | None:
            if part(first) is None:
                return None
            tensor = torch.empty((size, *part(first).shape), dtype=dtype, pin_memory=self._copies is not None)
            np.stack([part(row) for row in rows], out=tensor.numpy()[: len(rows)])
            tensor[len(rows) :] = tensor[0]
            return tensor

        images = stacked(lambda row: row.image, torch.uint8)
        assert images is not None
        wrist = stacked(lambda row: row.wrist_images, torch.uint8)
        obs = Observation(images, wrist, stacked(lambda row: row.state, torch.float32), texts)
        if self._copies is None:
            return obs, None
        with torch.cuda.device(self._device), torch.cuda.stream(self._copies):
            obs = obs.map(lambda tensor: tensor.to(self._device, non_blocking=True))
            copied = torch.cuda.Event()
            copied.record()
        return obs, copied

    # ------------------------------------------------------------------ inference thread
    def _infer(self) -> None:
        answers: list[Callable[[], None]] = []  # to the clients of the batch before

        def give() -> None:
            while answers:
                answers.pop()()

        while (batch := self._ready.get()) is not None:
            start = time.perf_counter()
            try:
                found = self._start(batch.obs, batch.copied, [request.session.episode for request in batch.requests])
                give()  # only now: their next requests are read while the device is at work
                actions = found.cpu().numpy()  # waits; from here on the batch's memory is free
            except Exception as error:
                give()
                self._fail(batch.requests, error)
                continue
            answers.append(partial(self._answer, batch.requests, actions, time.perf_counter() - start))
            if not self._computes_behind or self._ready.empty():
                give()
        give()

    def _start(self, obs: Observation, copied: torch.cuda.Event | None, episodes: list[Episode]) -> torch.Tensor:
        """Begin one policy call; a GPU may still be computing the actions."""
        with torch.cuda.device(self._device) if copied is not None else nullcontext():
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)
            return self.policy.act_in(obs, episodes)

    def _answer(self, requests: list[_Request], actions: np.ndarray, seconds: float) -> None:
        """Give the requests of a batch their actions."""
        self.counts.requests += len(requests)
        self.counts.batches += 1
        self.counts.failure = None
        self._finish(requests)  # first: the gather thread can close the next batch meanwhile
        for request, chunk in zip(requests, actions, strict=True):
            request.answer.set_result(Answer(chunk, seconds, len(requests)))

    def _fail(self, requests: list[_Request], error: Exception) -> None:
        """Tell the clients of a batch in one line what the log shows in full."""
        text = f"the policy failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        logger.error(text, exc_info=error)
        self.counts.failure = text
        self._finish(requests)
        for request in requests:
            request.answer.set_exception(PolicyFailedError(text))

    def _finish(self, requests: list[_Request]) -> None:
        with self._changed:
            self._open_batches -= 1
            for request in requests:
                request.session.in_flight, request.session.last_seen = False, time.monotonic()
            self._changed.notify_all()
