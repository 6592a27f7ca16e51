"""Fixtures shared by every test."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.simulators.contract import SetupError
from rlinf.simulators.robotwin import assets as robotwin_assets
from rlinf.simulators.vulkan import check_driver

REPO = Path(__file__).resolve().parent.parent
TEST_DATA = Path(os.environ.get("RLINF_TEST_DATA", REPO.parent / "shared" / "data"))  # what simulators read
RAY_FILES = ("test_ray.py", "test_ray_runs.py", "test_ray_faults.py", "test_async.py")
torch.set_num_threads(1)
for _signal in (signal.SIGINT, signal.SIGHUP):  # ignored where tests run in the background; commands would inherit that
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)
if (TEST_DATA / "calvin").is_dir():
    os.environ.setdefault("CALVIN_PATH", str(TEST_DATA / "calvin"))
if (TEST_DATA / "maniskill").is_dir():
    os.environ.setdefault("MANISKILL_ASSET_DIR", str(TEST_DATA / "maniskill"))
    os.environ.setdefault("MS_ASSET_DIR", str(TEST_DATA / "maniskill"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n 2 --dist loadgroup` a file stays in one process, and so do all files that share a Ray cluster.

    What takes longest comes first: it must not be left for the end. Without a GPU, tests that need one are skipped.
    """

    def group(item: pytest.Item) -> str:
        return "ray" if item.path.name in RAY_FILES else item.nodeid.partition("::")[0]

    items.sort(key=lambda item: group(item) != "ray")
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
        if not torch.cuda.is_available() and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip("no CUDA device"))


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
def robotwin_path(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of RoboTwin (ROBOTWIN_PATH) beside its interpreter, with ASSETS_PATH, else the stand-in assets."""
    monkeypatch.setenv("ASSETS_PATH", os.environ.get("ASSETS_PATH", str(TEST_DATA / "robotwin_standin")))
    try:
        checkout = robotwin_assets.find_checkout(None)
        robotwin_assets.find_assets(None, checkout)
    except SetupError as error:
        pytest.skip(str(error))
    if robotwin_assets.own_interpreter() is None:
        pytest.skip("RoboTwin has no interpreter of its own here (set ROBOTWIN_PYTHON)")
    return checkout


@pytest.fixture(scope="session")
def maniskill_path() -> Path:
    """ManiSkill's assets (MANISKILL_ASSET_DIR, else RLINF_TEST_DATA/maniskill) beside a SAPIEN that can draw."""
    if importlib.util.find_spec("sapien") is None:
        pytest.skip("SAPIEN is not installed")
    folder = Path(os.environ.get("MANISKILL_ASSET_DIR", TEST_DATA / "maniskill"))
    message = "" if folder.is_dir() else f"no ManiSkill assets at {folder} (set RLINF_TEST_DATA or MANISKILL_ASSET_DIR)"
    try:
        check_driver()
    except SetupError as error:
        message = str(error)
    if message:
        if os.environ.get("CI") == "true" or "RLINF_TEST_DATA" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of two nodes on this machine."""
    from tests.ray_nodes import two_nodes

    with two_nodes() as address:
        yield address


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tests.ranks.Ranks: processes that run a function as ranks of a team."""
    from tests.ranks import Ranks

    started = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield started
    started.close()


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
