"""Choose the headless OpenGL back end before MuJoCo is imported (it reads the choice once, at import)."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from rlinf.simulators.contract import SetupError

EGL_LINE = "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri"
OSMESA_LINE = "apt-get install -y libosmesa6"
_EGL_PLATFORM_DEVICE_EXT = 0x313F


@cache  # the probe must not run again beside live contexts
def choose_backend(wanted: str) -> str:
    """Set MUJOCO_GL and PYOPENGL_PLATFORM for `wanted` (auto: what the environment says, else EGL, else OSMesa)."""
    if wanted == "auto":
        wanted = os.environ.get("MUJOCO_GL", "").lower()
        if wanted not in ("egl", "osmesa"):
            wanted = "egl" if egl_works() else "osmesa"
            if wanted == "osmesa" and not osmesa_found():
                raise SetupError(
                    f"no headless OpenGL library was found; install one with: {OSMESA_LINE} (or: {EGL_LINE})"
                )
    if wanted == "egl" and not egl_works():
        raise SetupError(f"gl=egl, but libEGL is missing or offers no device; install it with: {EGL_LINE}")
    if wanted == "osmesa" and not osmesa_found():
        raise SetupError(f"gl=osmesa, but libOSMesa is missing; install it with: {OSMESA_LINE}")
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = wanted
    return wanted


def draws_in_software() -> bool:
    """Whether the current context belongs to the CPU."""
    from OpenGL import GL

    name = (GL.glGetString(GL.GL_RENDERER) or b"").decode(errors="replace").lower()
    return any(word in name for word in ("llvmpipe", "softpipe", "swrast", "software"))


def osmesa_found() -> bool:
    """Whether the software renderer's library loads (PyOpenGL looks for the same names)."""
    return any(_load(name) is not None for name in ("libOSMesa.so", "libOSMesa.so.8", "libOSMesa.so.6"))


def egl_works() -> bool:
    """Whether some EGL device can be initialised."""
    egl = _load("libEGL.so.1")
    if egl is None:
        return False
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    query = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    display = egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT")
    if not query or not display:
        return False
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(query)
    get_display = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)(display)
    egl.eglInitialize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    devices, count = (ctypes.c_void_p * 16)(), ctypes.c_int(0)
    if not query_devices(16, devices, ctypes.byref(count)):
        return False
    for device in devices[: count.value]:
        handle = get_display(_EGL_PLATFORM_DEVICE_EXT, device, None)
        if handle and egl.eglInitialize(handle, None, None):
            return True  # left initialised: displays belong to the process, and MuJoCo will ask for the same one
    return False


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
