"""Which Vulkan driver SAPIEN gets, and what is said where it would refuse it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.commands import doctor
from rlinf.errors import NotInstalledError, UserError
from rlinf.simulators import vulkan
from rlinf.simulators.contract import SetupError

pytest.importorskip("sapien")
OLD = vulkan.Driver("llvmpipe (LLVM 15.0.6, 256 bits)", "llvmpipe", "Mesa 22.3.6")
NEW = vulkan.Driver("llvmpipe (LLVM 15.0.6, 256 bits)", "llvmpipe", "Mesa 25.0.7-2~bpo12+1")
GPU = vulkan.Driver("NVIDIA H200", "NVIDIA", "NVIDIA 570.86.15")
OLD_GPU = vulkan.Driver("AMD Radeon", "radv", "Mesa 22.3.6")  # the rule is about the software driver


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Python environment without a driver, on a machine without NVIDIA's."""
    for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(vulkan, "has_nvidia", lambda: False)
    return tmp_path


@pytest.mark.parametrize(("driver", "refused"), [(OLD, True), (NEW, False), (GPU, False), (OLD_GPU, False)])
def test_only_old_software_drivers_are_refused(driver: vulkan.Driver, refused: bool) -> None:
    assert driver.refused == refused


@pytest.mark.parametrize(("driver", "on_cpu"), [(OLD, True), (NEW, True), (GPU, False), (OLD_GPU, False)])
def test_the_software_driver_draws_on_the_processor(driver: vulkan.Driver, on_cpu: bool) -> None:
    assert driver.on_cpu == on_cpu


def test_the_first_driver_that_fits_is_taken(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan, "drivers", lambda: [OLD, NEW])
    assert vulkan.check_driver() == NEW


@pytest.mark.parametrize(
    ("found", "there"), [([], "no Vulkan driver"), ([OLD], "llvmpipe (LLVM 15.0.6, 256 bits), Mesa 22.3.6")]
)
def test_what_is_missing_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch, found: list, there: str) -> None:
    monkeypatch.setattr(vulkan, "drivers", lambda: found)
    with pytest.raises(SetupError) as refusal:
        vulkan.check_driver()
    assert str(refusal.value) == (
        "SAPIEN draws with NVIDIA's driver, or with Mesa's lavapipe 24.3 or newer (package mesa-vulkan-drivers); "
        f"there is {there}; install one with: bash requirements/vulkan.sh"
    )
    monkeypatch.setattr(vulkan, "has_nvidia", lambda: True)
    with pytest.raises(SetupError, match="apt-get install -y libxext6 libegl1"):
        vulkan.check_driver()


def test_the_environments_own_driver_is_chosen_unless_someone_decided(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vulkan.choose_driver()
    assert "VK_ICD_FILENAMES" not in vulkan.os.environ
    (bare / "vulkan").mkdir()
    own = bare / "vulkan/lvp_icd.json"
    own.write_text("{}")
    monkeypatch.setenv("VK_ICD_FILENAMES", "mine.json")
    vulkan.choose_driver()
    assert vulkan.os.environ["VK_ICD_FILENAMES"] == "mine.json"
    monkeypatch.setenv("VK_ICD_FILENAMES", "")
    vulkan.choose_driver()
    assert vulkan.os.environ["VK_ICD_FILENAMES"] == str(own)


def test_no_driver_at_all_is_one_line_in_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "absent.json"))
    with pytest.raises(UserError, match="there is no Vulkan driver; install one with: bash req"):
        doctor._vulkan()


@pytest.mark.parametrize(
    ("status", "out", "err", "line"),
    [
        (0, {"driver": "Mesa 25, from a.json", "contrast": 40.0}, "", "Mesa 25, from a.json; drew a frame"),
        (0, {"driver": "Mesa 25, from a.json", "contrast": 0.0}, "", "Mesa 25, from a.json draws a blank frame"),
        (1, {}, "Traceback\nRuntimeError: no device", "SAPIEN cannot draw: RuntimeError: no device; `bash "),
        (-11, {}, "", "SAPIEN cannot draw: it ended with status -11; `bash requirements/vulkan.sh` installs a driver"),
    ],
)
def test_doctor_reports_what_the_drawing_process_did(
    monkeypatch: pytest.MonkeyPatch, status: int, out: dict, err: str, line: str
) -> None:
    monkeypatch.delenv("MANISKILL_ASSET_DIR", raising=False)
    monkeypatch.setattr("rlinf.simulators.installed.FOLDERS", {"maniskill": ()})
    done = subprocess.CompletedProcess([], status, json.dumps(out), err)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    try:
        said = doctor._vulkan()
    except UserError as error:
        said = str(error)
    assert said.startswith(line)


def test_where_the_simulator_will_draw_doctor_only_names_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess([], 0, json.dumps({"driver": "Mesa 25"}), "")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setenv("MANISKILL_ASSET_DIR", "assets")
    assert doctor._vulkan() == "Mesa 25"
    assert "draw" not in commands[0]


def test_without_sapien_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match="only ManiSkill needs it"):
        doctor._vulkan()
