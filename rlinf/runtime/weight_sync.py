"""Weights from the actor to the rollout processes that hold copies of their own.

A sync agrees on its version, sends the trainable parameters in flat buckets, straight into the copies, and compares
checksums of a sample of every tensor, frozen ones included. Whatever does not fit (a version skipped or repeated, other
frozen weights, an actor that has loaded a checkpoint) makes it a full sync, which sends all parameters and buffers; if
that does not help either, the run ends with the parameter's name. All members decide from the same gathered facts, so
that they go on, repeat or fail together.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import torch

from rlinf.data.byte_spans import Span, as_bytes, buckets
from rlinf.errors import UserError
from rlinf.models.policy import Policy
from rlinf.runtime.process_group import Team

Tensor = torch.Tensor
BUCKET_BYTES = 64 << 20
SAMPLED = 1024  # numbers of a tensor that enter its checksum, at equal distances
_LOG = logging.getLogger(__name__)


class _Hello(NamedTuple):
    """What a member says of itself before anything travels."""

    version: int  # the sender: of the weights it offers; a receiver: of those it holds
    restarted: bool
    layout: int  # checksum of names, shapes and dtypes


class _Member:
    """The protocol, which the sender (member 0 of the team) and the receivers follow in step."""

    def __init__(self, policy: Policy, team: Team) -> None:
        self.policy, self.team = policy, team
        self.version = 0  # of the last sync

    def _sync(self, version: int, *, restarted: bool) -> int:
        """One sync; bytes of parameters that travelled."""
        offer, reasons = self._meet(version, restarted)
        self._warn(offer, reasons)
        moved = self._transfer(full=bool(reasons))
        fault = self._compare()
        if fault and not reasons:
            self._warn(offer, [fault])
            moved += self._transfer(full=True)
            fault = self._compare()
        if fault:
            raise RuntimeError(f"weight sync {offer}: {fault}, although everything has been sent")
        self.version = offer
        return moved

    def _meet(self, version: int, restarted: bool) -> tuple[int, list[str]]:
        """The version on offer, and why all of the weights must be sent, if they must."""
        trained = {name for name, _ in self.policy.trainable_parameters()}
        layout = [f"{n} {list(t.shape)} {t.dtype}{' trained' * (n in trained)}" for n, t in self._tensors().items()]
        hellos = self.team.gather(_Hello(version, restarted, zlib.crc32("\n".join(layout).encode())))
        if len({hello.layout for hello in hellos}) > 1:
            raise UserError(_difference(self.team.gather(layout)))
        offer = hellos[0].version
        reasons = ["the actor has loaded a checkpoint"] if hellos[0].restarted else []
        for copy, hello in enumerate(hellos[1:]):
            if hello.version != offer - 1:
                reasons.append(f"rollout copy {copy} refuses it, for it holds version {hello.version}")
        return offer, reasons

    def _transfer(self, *, full: bool) -> int:
        """Send or take the tensors of a sync; their bytes."""
        raise NotImplementedError

    def _compare(self) -> str | None:
        """What differs between the actor's weights and a copy, if anything does."""
        ours, *copies = self.team.gather({name: checksum(tensor) for name, tensor in self._tensors().items()})
        for copy, theirs in enumerate(copies):
            for name, value in ours.items():
                if theirs[name] != value:
                    return f"rollout copy {copy} has another {name} than the actor"
        return None

    def _tensors(self, *, full: bool = True) -> dict[str, Tensor]:
        """What travels in a full sync (all parameters and buffers) or in any other, in the same order everywhere."""
        if full:
            return dict(self.policy.named_parameters()) | dict(self.policy.named_buffers())
        return dict(self.policy.trainable_parameters())

    def _warn(self, version: int, reasons: list[str]) -> None:
        """Say, once, why a sync takes longer than others."""
        for reason in reasons if self.team.rank == 0 else ():
            _LOG.warning("weight sync %d: %s; everything is sent", version, reason)


class Sender(_Member):
    """The actor: its weights are the truth."""

    _restarted = False

    def restart(self) -> None:
        """The policy has loaded other weights: the next sync is a full one."""
        self._restarted = True

    def send(self) -> int:
        """Bring every copy up to date; returns the bytes of parameters sent, 0 where nobody holds a copy."""
        if self.team.size == 1:
            return 0
        moved = self._sync(self.version + 1, restarted=self._restarted)
        self._restarted = False
        return moved

    def _transfer(self, *, full: bool) -> int:
        tensors = list(self._tensors(full=full).values())

        def fill(bucket: list[tuple[Span, Tensor]], buffer: Tensor) -> None:
            for span, part in bucket:
                part.copy_(as_bytes(tensors[span.item])[span.first : span.last])
            self.team.broadcast(buffer)

        return _in_buckets(tensors, self.team.device, fill)


class Receiver(_Member):
    """A rollout rank with a copy. Weights change in place: views of them and recorded kernels stay valid."""

    def receive(self) -> None:
        """Take part in one sync."""
        self._sync(self.version, restarted=False)

    def _transfer(self, *, full: bool) -> int:
        tensors = list(self._tensors(full=full).values())

        def read(bucket: list[tuple[Span, Tensor]], buffer: Tensor) -> None:
            self.team.broadcast(buffer)
            for span, part in bucket:
                as_bytes(tensors[span.item])[span.first : span.last].copy_(part)

        return _in_buckets(tensors, self.team.device, read)


def checksum(tensor: Tensor) -> int:
    """Of a sample of the tensor's numbers, bit by bit; the same on every device."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLED)].clone(memory_format=torch.contiguous_format)
    return zlib.crc32(sample.view(torch.uint8).cpu().numpy().tobytes())  # of a copy: what numpy has seen cannot offload


def _in_buckets(
    tensors: list[Tensor], device: torch.device, visit: Callable[[list[tuple[Span, Tensor]], Tensor], None]
) -> int:
    """Call `visit` for every bucket with its spans, each with its part of a flat buffer; returns all bytes."""
    lengths = [tensor.nbytes for tensor in tensors]
    size = min(BUCKET_BYTES, sum(lengths))
    buffer = torch.empty(size, dtype=torch.uint8, device=device)  # [size]
    for spans in buckets(lengths, size):
        used = sum(span.size for span in spans)
        visit(list(zip(spans, buffer[:used].split([span.size for span in spans]), strict=True)), buffer[:used])
    return sum(lengths)


def _difference(layouts: list[list[str]]) -> str:
    """Where a copy's tensors differ from the actor's in name, shape or dtype."""
    for copy, theirs in enumerate(layouts[1:]):
        for ours, other in zip_longest(layouts[0], theirs, fillvalue="nothing"):
            if ours != other:
                return (
                    f"weight sync: the actor's policy has {ours} where that of rollout copy {copy} has {other}; "
                    "every process must run the same code with the same config"
                )
    raise AssertionError("the layouts are equal")
