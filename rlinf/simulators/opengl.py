"""Headless OpenGL: which library draws (chosen before MuJoCo is imported, which reads it once), and EGL's devices."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from rlinf.simulators.contract import SetupError

EGL_LINE = "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri"
OSMESA_LINE = "apt-get install -y libosmesa6"
_PLATFORM_DEVICE, _CUDA_DEVICE = 0x313F, 0x323A  # EGL_PLATFORM_DEVICE_EXT, EGL_CUDA_DEVICE_NV
_MAX_DEVICES = 64
_pointer = ctypes.c_void_p


@cache  # the probe must not run again beside live contexts
def choose_backend(wanted: str) -> str:
    """Set MUJOCO_GL and PYOPENGL_PLATFORM for `wanted` (auto: what the environment says, else EGL, else OSMesa)."""
    found = find_backend(wanted)
    if found == "osmesa" != wanted and not osmesa_found():
        raise SetupError(f"no headless OpenGL library was found; install one with: {OSMESA_LINE} (or: {EGL_LINE})")
    wanted = found
    if wanted == "egl" and not egl_works():
        raise SetupError(f"gl=egl, but libEGL is missing or offers no device; install it with: {EGL_LINE}")
    if wanted == "osmesa" and not osmesa_found():
        raise SetupError(f"gl=osmesa, but libOSMesa is missing; install it with: {OSMESA_LINE}")
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = wanted
    return wanted


@cache
def find_backend(wanted: str) -> str:
    """The library that `wanted` stands for; nothing is set."""
    if wanted == "auto":
        wanted = os.environ.get("MUJOCO_GL", "").lower()
    return wanted if wanted in ("egl", "osmesa") else "egl" if egl_works() else "osmesa"


def draws_in_software() -> bool:
    """Whether the current OpenGL context draws on the CPU."""
    from OpenGL import GL

    name = (GL.glGetString(GL.GL_RENDERER) or b"").decode(errors="replace").lower()
    return any(word in name for word in ("llvmpipe", "softpipe", "swrast", "software"))


def osmesa_found() -> bool:
    """Whether the software renderer's library loads (PyOpenGL looks for the same names)."""
    return any(load_library(name) is not None for name in ("libOSMesa.so", "libOSMesa.so.8", "libOSMesa.so.6"))


def egl_works() -> bool:
    """Whether some EGL device can be initialised."""
    egl, devices = _egl_devices()
    display_of = _extension(egl, "eglGetPlatformDisplayEXT", _pointer, ctypes.c_uint, _pointer, _pointer)
    if egl is None or display_of is None:
        return False
    egl.eglInitialize.argtypes = [_pointer, _pointer, _pointer]
    for device in devices:
        display = display_of(_PLATFORM_DEVICE, device, None)
        if display and egl.eglInitialize(display, None, None):
            return True  # left initialised: displays belong to the process, and MuJoCo will ask for the same one
    return False


def egl_cuda_numbers() -> list[int | None]:
    """The CUDA number of every EGL device of this machine, None for those without; empty where there is no EGL."""
    egl, devices = _egl_devices()
    attribute_of = _extension(egl, "eglQueryDeviceAttribEXT", ctypes.c_uint, _pointer, ctypes.c_int, _pointer)
    if attribute_of is None:
        return []
    numbers: list[int | None] = []
    for device in devices:
        number = ctypes.c_ssize_t(0)
        found = attribute_of(device, _CUDA_DEVICE, ctypes.byref(number))
        numbers.append(number.value if found else None)
    return numbers


def _egl_devices() -> tuple[ctypes.CDLL | None, list[int | None]]:
    """libEGL, None where it is missing, and the handles of its devices."""
    egl = load_library("libEGL.so.1")
    query = _extension(egl, "eglQueryDevicesEXT", ctypes.c_uint, ctypes.c_int, _pointer, _pointer)
    handles, count = (_pointer * _MAX_DEVICES)(), ctypes.c_int(0)
    if query is None or not query(_MAX_DEVICES, handles, ctypes.byref(count)):
        return egl, []
    return egl, handles[: count.value]


def _extension(egl: ctypes.CDLL | None, name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
    """A function that libEGL offers beyond the standard ones; None where it does not."""
    if egl is None:
        return None
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = _pointer, [ctypes.c_char_p]
    address = egl.eglGetProcAddress(name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def load_library(name: str) -> ctypes.CDLL | None:
    """A shared library by its file name; None where it cannot be loaded."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
