"""Choose the Vulkan driver before SAPIEN is imported, and say what is wrong with the one that is there.

SAPIEN refuses Mesa's software driver (lavapipe) before 24.3, and the error it then gives names no cause.
`python -m rlinf.simulators.vulkan [draw]` names the driver and draws a frame: a fault of a driver ends that process
only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlinf.simulators.contract import SetupError
from rlinf.simulators.opengl import load_library

LEAST_MESA = (24, 3)
NEEDED = "SAPIEN draws with NVIDIA's driver, or with Mesa's lavapipe 24.3 or newer (package mesa-vulkan-drivers)"
INSTALL_LINE = "bash requirements/vulkan.sh"
NVIDIA_LINE = (
    "install what it links with: apt-get install -y libxext6 libegl1 (a container also needs "
    "NVIDIA_DRIVER_CAPABILITIES=all), or take the software driver: VULKAN=software bash requirements/vulkan.sh"
)
_API_1_1 = 1 << 22 | 1 << 12
_APPLICATION_INFO, _INSTANCE_CREATE_INFO = 0, 1  # VkStructureType
_PROPERTIES_2, _DRIVER_PROPERTIES = 1000059001, 1000196000
_u32, _u64, _text = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char * 256


class Driver(NamedTuple):
    """One device that Vulkan's loader offers."""

    device: str  # e.g. llvmpipe (LLVM 15.0.6, 256 bits)
    maker: str  # e.g. llvmpipe, NVIDIA
    version: str  # as the maker writes it, e.g. Mesa 25.0.7-2

    def __str__(self) -> str:
        return f"{self.device}, {self.version}"

    @property
    def on_cpu(self) -> bool:
        """Whether the processor draws: Mesa's software driver."""
        return self.maker == "llvmpipe"

    @property
    def refused(self) -> bool:
        """Whether this is a software driver that SAPIEN does not take."""
        mesa = re.match(r"Mesa (\d+)\.(\d+)", self.version)
        return self.on_cpu and mesa is not None and (int(mesa[1]), int(mesa[2])) < LEAST_MESA


def choose_driver() -> None:
    """Tell Vulkan's loader which driver to take, unless the user or the system's own files do."""
    if os.environ.get("VK_ICD_FILENAMES") or os.environ.get("VK_DRIVER_FILES"):
        return
    if has_nvidia():
        known = any(Path(folder, "vulkan/icd.d/nvidia_icd.json").is_file() for folder in ("/usr/share", "/etc"))
        icd = None if known else _sapien_folder() / "vulkan_library" / "nvidia_icd.json"
    else:
        icd = Path(sys.prefix, "vulkan", "lvp_icd.json")  # written by requirements/vulkan.sh
    if icd is not None and icd.is_file():
        os.environ["VK_ICD_FILENAMES"] = str(icd)


def has_nvidia() -> bool:
    """Whether an NVIDIA driver runs on this machine."""
    return Path("/proc/driver/nvidia/version").exists()


def check_driver() -> Driver:
    """The driver SAPIEN will draw with; a SetupError says what is needed where there is none that it takes."""
    choose_driver()
    found = drivers()
    fit = [driver for driver in found if not driver.refused]
    if fit:
        return fit[0]
    there = "; ".join(map(str, found)) or "no Vulkan driver"
    if has_nvidia():
        raise SetupError(f"{NEEDED}; an NVIDIA driver runs here, but Vulkan finds {there}; {NVIDIA_LINE}")
    raise SetupError(f"{NEEDED}; there is {there}; install one with: {INSTALL_LINE}")


@cache
def driver_name() -> str | None:
    """The driver SAPIEN will draw with; asked in a process of its own, as Vulkan stays in the one that asks."""
    command = [sys.executable, "-W", "ignore", "-m", "rlinf.simulators.vulkan"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(answer.stdout)["name"] if answer.returncode == 0 else None


class _Application(ctypes.Structure):  # VkApplicationInfo
    _fields_ = [("type", _u64), ("rest", _u64 * 4), ("unused", _u32), ("api_version", _u32)]


class _Instance(ctypes.Structure):  # VkInstanceCreateInfo; no layers, no extensions
    _fields_ = [("type", _u64), ("next", ctypes.c_void_p), ("flags", _u64)]
    _fields_ += [("application", ctypes.POINTER(_Application)), ("rest", _u64 * 4)]


class _DriverProperties(ctypes.Structure):  # VkPhysicalDeviceDriverProperties
    _fields_ = [("type", _u64), ("next", ctypes.c_void_p), ("id", _u32), ("name", _text), ("info", _text)]
    _fields_ += [("conformance", _u32)]


class _Properties(ctypes.Structure):  # VkPhysicalDeviceProperties2; limits are of no interest here
    _fields_ = [("type", _u64), ("next", ctypes.POINTER(_DriverProperties)), ("ids", _u32 * 5), ("device", _text)]
    _fields_ += [("limits", _u64 * 128)]


def drivers() -> list[Driver]:
    """Every device of every driver that the loader finds."""
    vulkan = _loader()
    application = _Application(_APPLICATION_INFO, api_version=_API_1_1)
    info, instance = _Instance(_INSTANCE_CREATE_INFO, application=ctypes.pointer(application)), ctypes.c_void_p()
    if vulkan is None or vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
        return []
    try:
        count = ctypes.c_uint32()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
        return [_driver(vulkan, ctypes.c_void_p(handle)) for handle in handles]
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _driver(vulkan: ctypes.CDLL, handle: ctypes.c_void_p) -> Driver:
    """What Vulkan tells of a device."""
    driver = _DriverProperties(_DRIVER_PROPERTIES)
    found = _Properties(_PROPERTIES_2, next=ctypes.pointer(driver))
    vulkan.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(found))
    device, maker, version = (text.decode(errors="replace") for text in (found.device, driver.name, driver.info))
    version = version.split(" (")[0]
    return Driver(device, maker, version if version.startswith("Mesa") else f"{maker} {version}")


def _loader() -> ctypes.CDLL | None:
    """The system's libvulkan, else the one SAPIEN brings along."""
    own = sorted(_sapien_folder().glob("vulkan_library/libvulkan.so*"))
    found = (load_library(name) for name in ("libvulkan.so.1", *map(str, own)))
    return next((library for library in found if library is not None), None)


def _sapien_folder() -> Path:
    """Where SAPIEN is installed; asking does not import it."""
    found = importlib.util.find_spec("sapien")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sapien'", name="sapien")
    return Path(found.origin).parent


def draw_frame(size: int = 32) -> float:
    """Contrast (standard deviation in 0-255) of a red box as SAPIEN draws it."""
    import sapien

    sapien.render.set_camera_shader_dir("minimal")
    scene = sapien.Scene()
    scene.set_ambient_light([0.5, 0.5, 0.5])
    builder = scene.create_actor_builder()
    builder.add_box_visual(half_size=[0.1, 0.1, 0.1], material=[1.0, 0.0, 0.0])
    builder.build_kinematic()
    camera = scene.add_camera("camera", size, size, 1.0, 0.01, 10.0)
    camera.set_local_pose(sapien.Pose([-0.5, 0.0, 0.0]))
    scene.update_render()
    camera.take_picture()
    return float(camera.get_picture("Color")[..., :3].std() * 255)


def _report(draw: bool) -> dict[str, Any]:
    """The driver that was found, and the contrast of a frame where one is to be drawn; or what is wrong."""
    try:
        driver = str(check_driver())
    except SetupError as error:
        return {"problem": str(error), "name": None}
    found = {"name": driver, "driver": f"{driver}, from {os.environ.get('VK_ICD_FILENAMES', 'the system')}"}
    return found | {"contrast": draw_frame()} if draw else found


if __name__ == "__main__":
    print(json.dumps(_report(draw=sys.argv[1:] == ["draw"])))
