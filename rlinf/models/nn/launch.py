"""Kernels that are set up while the one ahead of them still runs, as GPUs since Hopper allow.

In a call for one robot a thousand kernels of a few microseconds follow one another, and a plain launch waits until the
last one has been taken down. A kernel launched with `**early()` does not: its programs start as soon as those of the
kernel before it are at work, ask for the weights that they will read (`bring`), and wait in `begin` until all that was
launched before has ended. Numbers do not change by it.

Every such kernel takes the constant EARLY and calls `begin(EARLY)` before it reads or writes what others use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(64)  # 16-bit numbers that are brought near at once: 128 bytes


@lru_cache(maxsize=1)
def _possible() -> bool:
    cuda = torch.cuda.is_available() and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability()[0] >= 9


def early() -> dict[str, Any]:
    """Arguments of a launch, for a kernel that begins with `begin(EARLY)`."""
    return {"EARLY": True, "launch_pdl": True} if _possible() else {"EARLY": False}


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait for the end of the kernels before this one, and let the next one be set up.

    In this order no kernel comes more than one ahead: a chain of them would bring more weights than the cache holds.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def bring(rows, length, LINES: tl.constexpr):
    """Fetch `length` 16-bit numbers from each of the addresses `rows` [R] on, into the GPU's cache; LINES as `lines`.

    May precede `begin`: what is written to these addresses later is written to the cache as well.
    """
    step = tl.minimum(tl.arange(0, LINES) * LINE, length - 1)
    address = rows[:, None] + step[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


def lines(length: int) -> int:
    """How many pieces `bring` cuts a row of `length` numbers into: a power of two."""
    return int(triton.next_power_of_2(triton.cdiv(length, LINE.value)))
