"""Recorded kernels: a function of tensors is captured once per shape as a CUDA graph and replayed afterwards.

Thousands of small kernels per policy call cost more to launch than to run; a replay launches them all at once.

Measured with it (docs/benchmarks.md, one H200): a call of π0 on one row takes 7.3 ms; openpi's own code takes 216 ms,
or 76 ms compiled. Recorded gradients: imitation of size small takes 1600 steps of 256 rows in 80 s (docs/maniskill.md).
"""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Function = Callable[..., Any]  # of a dict of tensors

Made = TypeVar("Made")
Kept = dict[Hashable, Any]  # what `kept` made for one recording

MAX_BYTES = 8 << 30  # of the outputs of all recordings: a policy's keys and values are large
ALIGNMENT = 256  # bytes; what the device's own allocations begin at
_keeping = threading.local()


def kept(make: Callable[..., Made], *arguments: Hashable) -> Made:
    """make(*arguments), which must depend on nothing else: a recording gets it once, and its replays find it there."""
    made: Kept | None = getattr(_keeping, "made", None)
    if made is None:
        return make(*arguments)
    key = (make, arguments)
    if key not in made:
        made[key] = make(*arguments)
    return made[key]


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Tensors  # on the device, those of `staging` too
    staging: Staging | None  # where inputs come from the host
    outputs: Tensors
    kept: Kept


def slots(given: Tensors) -> tuple[dict[str, slice], int]:
    """Where tensors lie one behind the other in one buffer, in bytes, and its length."""
    places, end = {}, 0
    for name, tensor in given.items():
        places[name] = slice(end, end + tensor.nbytes)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, end


class Staging:
    """Inputs from the host on their way to a recording: one pinned buffer, copied at once to where they are read."""

    def __init__(self, given: Tensors, device: torch.device) -> None:
        places, length = slots(given)
        on_gpu = device.type == "cuda"
        self._pinned = torch.empty(length, dtype=torch.uint8, pin_memory=on_gpu)
        self._packed = torch.empty(length, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None

        def views(buffer: Tensor) -> Tensors:
            return {name: buffer[places[name]].view(t.dtype).view(t.shape) for name, t in given.items()}

        self._arrays = {name: view.numpy() for name, view in views(self._pinned).items()}
        self.inputs = views(self._packed)

    def load(self, given: Tensors) -> None:
        """Bring tensors of the first ones' shapes to the device, in the order of its current stream."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before may still be reading
        for name, array in self._arrays.items():
            np.copyto(array, given[name].numpy())  # torch would wake threads for a picture
        self._packed.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._packed.device))


class _OfWeights:
    """A function that reads the weights of `module`, its recordings, and whether the weights lie where they did."""

    limit = 24  # recordings kept

    def __init__(
        self, function: Function, module: nn.Module, *, enabled: bool = True, limit: int | None = None
    ) -> None:
        self.function, self.module, self.enabled, self.limit = function, module, enabled, limit or self.limit
        self._recordings: OrderedDict[Hashable, Any] = OrderedDict()
        self._pool: Any = None  # their scratch memory
        self._lock = threading.Lock()  # rollout ranks of one process are threads that share a policy
        self._watched: list[nn.Parameter] = []
        self._addresses = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """For a copy of the module; recordings stay here."""
        function, module = copy.deepcopy(self.function, memo), copy.deepcopy(self.module, memo)
        return type(self)(function, module, enabled=self.enabled, limit=self.limit)

    def watched(self) -> list[nn.Parameter]:
        """A sample of the weights, which move together."""
        watched = self._watched  # another thread may clear it meanwhile
        if not watched:
            parameters = list(self.module.parameters())
            self._watched = watched = parameters[:: 1 + len(parameters) // 32]
        return watched

    def weights_moved(self) -> bool:
        """Whether the weights lie elsewhere than at the last call, so that recordings are void; True at the first."""
        before, self._addresses = self._addresses, hash(tuple([p.data_ptr() for p in self.watched()]))
        return before != self._addresses

    def clear(self) -> None:
        """Free the recordings and their memory."""
        self._recordings.clear()
        self._pool = None
        self._watched = []  # perhaps replaced next


class Recorder(_OfWeights):
    """Calls `function(inputs, **options) -> outputs` directly on the CPU, by replay on a GPU.

    The function must be pure, without gradients, and must not wait for the device; everything random comes in as input.
    `options` are plain values that become part of the recording's key. Weights may change in place; when they have been
    moved, everything is recorded anew. Inputs may lie on the device or on the host, whence all go in one copy; the
    caller may write into them as soon as the call returns. Outputs are copies, the caller may keep them.
    """

    def __call__(self, inputs: dict[str, Tensor | None], **options: Hashable) -> Tensors:
        given = _given(inputs)
        device = next((t.device for t in given.values() if t.is_cuda), None) or self.watched()[0].device
        if device.type != "cuda":
            return self.function(given, **options)
        if not self.enabled or torch.cuda.is_current_stream_capturing():
            return self.function({name: tensor.to(device) for name, tensor in given.items()}, **options)
        with self._lock:
            return self._replayed(given, options, device)

    def _replayed(self, given: Tensors, options: dict[str, Hashable], device: torch.device) -> Tensors:
        if self.weights_moved():
            self.clear()
        key = (_shapes(given), tuple(options.items()))
        recording: _Recording | None = self._recordings.pop(key, None)
        if recording is None:
            recording = self._record(given, options, device)
        self._recordings[key] = recording  # newest last
        self._forget_oldest()
        if recording.staging is not None:
            recording.staging.load(given)
        for name, tensor in given.items():
            if tensor.is_cuda:
                recording.inputs[name].copy_(tensor, non_blocking=True)
        recording.graph.replay()
        return {name: tensor.clone() for name, tensor in recording.outputs.items()}

    def _record(self, given: Tensors, options: dict[str, Hashable], device: torch.device) -> _Recording:
        inputs = {name: tensor.clone() for name, tensor in given.items() if tensor.is_cuda}
        staging = None
        if from_host := {name: tensor for name, tensor in given.items() if not tensor.is_cuda}:
            staging = Staging(from_host, device)
            staging.load(from_host)
            inputs |= staging.inputs
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph, made = torch.cuda.CUDAGraph(), Kept()
        with _keep_in(made):
            # Twice outside: compiling kernels, making library handles and filling caches must not happen in a capture.
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.function(dict(inputs), **options)
            torch.cuda.current_stream().wait_stream(side)
            # Recordings share their scratch memory: they never run at the same time, and outputs are copied out.
            with _capture(graph, self._pool):
                outputs = self.function(dict(inputs), **options)
        self._pool = graph.pool()
        return _Recording(graph, inputs, staging, outputs, made)

    def _forget_oldest(self) -> None:
        """Keep the newest recordings, within a number and a size; at least one."""
        if len(self._recordings) == 1:
            return
        sizes = [sum(tensor.nbytes for tensor in r.outputs.values()) for r in self._recordings.values()]
        while len(sizes) > 1 and (len(sizes) > self.limit or sum(sizes) > MAX_BYTES):
            self._recordings.popitem(last=False)
            sizes.pop(0)


@dataclass(frozen=True)
class _GradientRecording:
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: tuple[Tensor, ...]
    seeds: tuple[Tensor | None, ...]  # gradients of the outputs that have one
    gradients: tuple[Tensor | None, ...]  # of the parameters
    kept: Kept


class GradientRecorder(_OfWeights):
    """Calls `function(inputs, **options) -> outputs` directly on the CPU; on a GPU its passes are replayed.

    The function's outputs have gradients for the parameters of `module`. It must be pure, must not wait for the device,
    and gets everything random as input; `options` are plain values, part of the recording's key. For launches that cost
    more than the work; shapes beyond the first few are computed directly, and so is everything of sharded weights.
    Outputs are copies, but a call overwrites the activations of the one before: only the latest can be differentiated.
    """

    limit = 4

    def __init__(
        self, function: Function, module: nn.Module, *, enabled: bool = True, limit: int | None = None
    ) -> None:
        super().__init__(function, module, enabled=enabled, limit=limit)
        self._parameters: list[nn.Parameter] = []  # those that get gradients
        self._call = 0  # number of the latest one that was replayed

    def __call__(self, inputs: dict[str, Tensor | None], **options: Hashable) -> tuple[Tensor, ...]:
        given = _given(inputs)
        if not (self.enabled and torch.is_grad_enabled() and next(iter(given.values())).is_cuda):
            return self.function(given, **options)
        if self.weights_moved():
            self.clear()
        key = (_shapes(given), tuple(options.items()))
        if key not in self._recordings:
            self._parameters = [p for p in self.module.parameters() if p.requires_grad]
            self.enabled = all(type(p) is nn.Parameter for p in self._parameters)  # shards come and go
            if not self.enabled or len(self._recordings) == self.limit:
                return self.function(given, **options)
            self._recordings[key] = self._record(given, options)
        self._call += 1
        return _Replayed.apply(self, self._recordings[key], self._call, given, *self._parameters)

    def _record(self, given: Tensors, options: dict[str, Hashable]) -> _GradientRecording:
        inputs = {name: tensor.clone() for name, tensor in given.items()}

        def run() -> tuple[Tensor, ...]:
            return self.function(dict(inputs), **options)

        def differentiate(outputs: tuple[Tensor, ...], seeds: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
            pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if seed is not None]
            ends, starts = zip(*pairs, strict=True)
            return torch.autograd.grad(ends, self._parameters, starts, allow_unused=True)

        def make_seeds(outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
            return tuple(torch.zeros_like(o) if o.requires_grad else None for o in outputs)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # Some times outside: compiling kernels, making library handles and filling caches must not be captured.
        made = Kept()
        with torch.cuda.stream(side), _keep_in(made):
            for _ in range(3):
                outputs = run()
                differentiate(outputs, make_seeds(outputs))
                del outputs
        torch.cuda.current_stream().wait_stream(side)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Recordings share the memory of their activations, since only the latest call is differentiated.
        with _capture(forward, self._pool), _keep_in(made):
            outputs = run()
        self._pool, seeds = forward.pool(), make_seeds(outputs)
        with _capture(backward, self._pool):
            gradients = differentiate(outputs, seeds)
        outputs = tuple(output.detach() for output in outputs)
        return _GradientRecording(forward, backward, inputs, outputs, seeds, gradients, made)

    def check_latest(self, call: int) -> None:
        """Refuse a gradient whose activations are gone."""
        if call != self._call:
            raise RuntimeError("a later call has overwritten what this gradient needs: differentiate each call first")


class _Replayed(torch.autograd.Function):
    """A recording's passes, of inputs without a gradient and parameters with one."""

    @staticmethod
    def forward(
        ctx: Any, recorder: GradientRecorder, recording: _GradientRecording, call: int, given: Tensors, *_: nn.Parameter
    ) -> tuple[Tensor, ...]:
        ctx.recorder, ctx.recording, ctx.call = recorder, recording, call
        for name, tensor in given.items():
            recording.inputs[name].copy_(tensor, non_blocking=True)
        recording.forward.replay()
        return tuple(output.clone() for output in recording.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        recording: _GradientRecording = ctx.recording
        ctx.recorder.check_latest(ctx.call)
        for seed, grad in zip(recording.seeds, grads, strict=True):
            if seed is not None:
                seed.copy_(grad)
        recording.backward.replay()
        # Copies: the next replay, of either pass, writes where the recorded gradients lie, and micro batches add up.
        found = [gradient for gradient in recording.gradients if gradient is not None]
        copies = [torch.empty_like(gradient) for gradient in found]
        torch._foreach_copy_(copies, found)  # private: nothing public copies many at once
        rest = iter(copies)
        return None, None, None, None, *(None if g is None else next(rest) for g in recording.gradients)


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record what is launched inside. Garbage of other recordings must not be freed meanwhile: that ends a capture."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _keep_in(made: Kept) -> Iterator[None]:
    """What `kept` makes inside goes to `made`."""
    before, _keeping.made = getattr(_keeping, "made", None), made
    try:
        yield
    finally:
        _keeping.made = before


def _given(inputs: dict[str, Tensor | None]) -> Tensors:
    return {name: tensor for name, tensor in inputs.items() if tensor is not None}


def _shapes(given: Tensors) -> Hashable:
    return tuple([(name, tensor.shape, tensor.dtype, tensor.is_cuda) for name, tensor in given.items()])
