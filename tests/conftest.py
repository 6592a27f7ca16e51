"""Fixtures shared by every test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
TEST_DATA = Path(os.environ.get("RLINF_TEST_DATA", REPO.parent / "shared" / "data"))  # what simulators read
torch.set_num_threads(1)
if (TEST_DATA / "calvin").is_dir():
    os.environ.setdefault("CALVIN_PATH", str(TEST_DATA / "calvin"))


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The golden vectors: RLINF_GOLDEN_DIR, else ../shared/golden; a missing folder fails in CI, or when named."""
    folder = Path(os.environ.get("RLINF_GOLDEN_DIR", REPO.parent / "shared" / "golden"))
    if not folder.is_dir():
        message = f"no golden vectors at {folder} (set RLINF_GOLDEN_DIR)"
        if os.environ.get("CI") == "true" or "RLINF_GOLDEN_DIR" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def calvin_path() -> Path:
    """CALVIN's files (CALVIN_PATH, else RLINF_TEST_DATA/calvin) beside an installed pybullet."""
    reason = "pybullet is not installed (its wheels end at Python 3.11)"
    pytest.importorskip("pybullet", reason=reason)
    folder = Path(os.environ.get("CALVIN_PATH", TEST_DATA / "calvin"))
    if not folder.is_dir():
        message = f"no CALVIN files at {folder} (set RLINF_TEST_DATA or CALVIN_PATH)"
        if os.environ.get("CI") == "true" or "RLINF_TEST_DATA" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture
def max_delta() -> Callable[..., float]:
    """check(key, got, want, bound, relative=False): prints max |Δ| of a key and asserts the bound.

    relative=True divides by |want| where that is above 1. Infinities of equal sign count as equal.
    """

    def check(key: str, got: object, want: object, bound: float, *, relative: bool = False) -> float:
        a, b = (torch.as_tensor(x).detach().double() for x in (got, want))
        assert a.shape == b.shape, f"{key}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        delta = torch.where(a == b, torch.zeros_like(a), (a - b).abs())
        if relative:
            delta = delta / b.abs().clamp(min=1.0)
        worst = float(delta.max()) if delta.numel() else 0.0
        print(f"{key}: max |Δ| = {worst:.2e} (bound {bound:.0e})")
        assert worst <= bound, f"{key}: max |Δ| = {worst:.3e} exceeds {bound:.0e}"
        return worst

    return check
