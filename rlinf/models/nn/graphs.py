"""Recorded kernels: a function of tensors is captured once per shape as a CUDA graph and replayed afterwards.

Thousands of small kernels per policy call cost more to launch than to run; a replay launches them all at once.

Measured with it (docs/benchmarks.md, one H200): a call of π0 on one row takes 9.1 ms; openpi's own code takes 216 ms,
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
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Function = Callable[..., Any]  # of a dict of tensors

MAX_BYTES = 8 << 30  # of the outputs of all recordings: a policy's keys and values are large


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Tensors


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

    def weights_moved(self) -> bool:
        """Whether the weights lie elsewhere than at the last call, so that recordings are void; True at the first."""
        if not self._watched:
            parameters = list(self.module.parameters())
            self._watched = parameters[:: 1 + len(parameters) // 32]  # weights move together: a sample is enough
        before, self._addresses = self._addresses, hash(tuple([p.data_ptr() for p in self._watched]))
        return before != self._addresses

    def clear(self) -> None:
        """Free the recordings and their memory."""
        self._recordings.clear()
        self._pool = None


class Recorder(_OfWeights):
    """Calls `function(inputs, **options) -> outputs` directly on the CPU, by replay on a GPU.

    The function must be pure, without gradients, and must not wait for the device; everything random comes in as input.
    `options` are plain values that become part of the recording's key. Weights may change in place; when they have been
    moved, everything is recorded anew. Outputs are copies, the caller may keep them.
    """

    def __call__(self, inputs: dict[str, Tensor | None], **options: Hashable) -> Tensors:
        given = _given(inputs)
        if not self.enabled or not next(iter(given.values())).is_cuda or torch.cuda.is_current_stream_capturing():
            return self.function(given, **options)
        with self._lock:
            return self._replayed(given, options)

    def _replayed(self, given: Tensors, options: dict[str, Hashable]) -> Tensors:
        if self.weights_moved():
            self.clear()
        key = (_shapes(given), tuple(options.items()))
        recording: _Recording = self._recordings.pop(key, None) or self._record(given, options)
        self._recordings[key] = recording  # newest last
        self._forget_oldest()
        for name, tensor in given.items():
            recording.inputs[name].copy_(tensor, non_blocking=True)
        recording.graph.replay()
        return {name: tensor.clone() for name, tensor in recording.outputs.items()}

    def _record(self, given: Tensors, options: dict[str, Hashable]) -> _Recording:
        inputs = {name: tensor.clone() for name, tensor in given.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # Twice outside: compiling kernels, making library handles and filling caches must not happen in a capture.
        with torch.cuda.stream(side):
            for _ in range(2):
                self.function(dict(inputs), **options)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Recordings share their scratch memory: they never run at the same time, and outputs are copied out.
        with _capture(graph, self._pool):
            outputs = self.function(dict(inputs), **options)
        self._pool = graph.pool()
        return _Recording(graph, inputs, outputs)

    def _forget_oldest(self) -> None:
        """Keep the newest recordings, within a number and a size; at least one."""
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
        with torch.cuda.stream(side):
            for _ in range(3):
                outputs = run()
                differentiate(outputs, make_seeds(outputs))
                del outputs
        torch.cuda.current_stream().wait_stream(side)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Recordings share the memory of their activations, since only the latest call is differentiated.
        with _capture(forward, self._pool):
            outputs = run()
        self._pool, seeds = forward.pool(), make_seeds(outputs)
        with _capture(backward, self._pool):
            gradients = differentiate(outputs, seeds)
        outputs = tuple(output.detach() for output in outputs)
        return _GradientRecording(forward, backward, inputs, outputs, seeds, gradients)

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


def _given(inputs: dict[str, Tensor | None]) -> Tensors:
    return {name: tensor for name, tensor in inputs.items() if tensor is not None}


def _shapes(given: Tensors) -> Hashable:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in given.items())
