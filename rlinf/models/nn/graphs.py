"""Recorded kernels: a function of tensors is captured once per shape as a CUDA graph and replayed afterwards.

Thousands of small kernels per policy call cost more to launch than to run; a replay launches them all at once.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


MAX_BYTES = 8 << 30  # of the outputs of all recordings: a policy's keys and values are large


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Tensors

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outputs.values())


class Recorder:
    """Calls `function(inputs, **options) -> outputs` directly on the CPU, by replay on a GPU.

    The function must be pure, without gradients, and must not wait for the device; everything random comes in as input.
    `options` are plain values that become part of the recording's key. Weights may change in place; when they have been
    moved, everything is recorded anew. Outputs are copies, the caller may keep them.
    """

    def __init__(
        self, function: Callable[..., Tensors], module: nn.Module, *, enabled: bool = True, limit: int = 24
    ) -> None:
        self.function, self.module, self.limit = function, module, limit
        self.enabled = enabled
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._pool: Any = None
        self._watched: list[nn.Parameter] = []
        self._weights = 0
        self._lock = threading.Lock()  # rollout ranks of one process are threads that share a policy

    def __call__(self, inputs: dict[str, Tensor | None], **options: Hashable) -> Tensors:
        given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        if not self.enabled or not next(iter(given.values())).is_cuda or torch.cuda.is_current_stream_capturing():
            return self.function(given, **options)
        with self._lock:
            return self._replayed(given, options)

    def _replayed(self, given: Tensors, options: dict[str, Hashable]) -> Tensors:
        self._forget_if_moved()
        key = (tuple((n, t.shape, t.dtype) for n, t in given.items()), tuple(options.items()))
        recording = self._recordings.pop(key, None) or self._record(given, options)
        self._recordings[key] = recording  # newest last
        self._forget_oldest()
        for name, tensor in given.items():
            recording.inputs[name].copy_(tensor, non_blocking=True)
        recording.graph.replay()
        return {name: tensor.clone() for name, tensor in recording.outputs.items()}

    def clear(self) -> None:
        """Free the recordings and their memory."""
        self._recordings.clear()
        self._pool = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """For a copy of the module; recordings stay here."""
        function, module = copy.deepcopy(self.function, memo), copy.deepcopy(self.module, memo)
        return Recorder(function, module, enabled=self.enabled, limit=self.limit)

    def _record(self, given: Tensors, options: dict[str, Hashable]) -> _Recording:
        inputs = {name: tensor.clone() for name, tensor in given.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            side
        ):  # compiles kernels, makes library handles, fills caches: none may happen in a capture
            for _ in range(2):
                self.function(dict(inputs), **options)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Recordings share their scratch memory: they never run at the same time, and outputs are copied out.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = self.function(dict(inputs), **options)
        self._pool = graph.pool()
        return _Recording(graph, inputs, outputs)

    def _forget_oldest(self) -> None:
        """Keep the newest recordings, within a number and a size; at least one."""
        sizes = [recording.num_bytes() for recording in self._recordings.values()]
        while len(sizes) > 1 and (len(sizes) > self.limit or sum(sizes) > MAX_BYTES):
            self._recordings.popitem(last=False)
            sizes.pop(0)

    def _forget_if_moved(self) -> None:
        if not self._watched:
            parameters = list(self.module.parameters())
            self._watched = parameters[:: 1 + len(parameters) // 32]  # weights move together: a sample tells
        weights = hash(tuple([p.data_ptr() for p in self._watched]))
        if weights != self._weights:
            self.clear()
            self._weights = weights
