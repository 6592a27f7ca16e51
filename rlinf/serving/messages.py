"""Messages of openpi's websocket protocol: msgpack maps whose values may be numpy arrays. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

_KINDS = "biufU"  # bool, integers, floats, text: nothing that holds Python objects or fields
_MAX_DIMS, _MAX_DTYPE_LENGTH = 8, 16


class RequestError(ValueError):
    """A message that cannot be answered; its one line is sent to the client."""


def pack(message: dict[str, Any]) -> bytes:
    """A map as the bytes of one message."""
    return msgpack.packb(message, default=_tagged)


def unpack(data: bytes) -> dict[str, Any]:
    """The map in the bytes of one message; arrays are read-only views of their bytes. RequestError where it is none."""
    try:
        message = msgpack.unpackb(data, object_hook=_restored, max_ext_len=0)
    except RequestError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"the message is not msgpack: {reason[:200]}") from error
    if not isinstance(message, dict):
        raise RequestError(f"the message holds a {type(message).__name__}, expected a map of names to values")
    return message


def _tagged(value: Any) -> Any:
    """An array or numpy scalar as the map that stands for it."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
        if isinstance(value, np.ndarray):
            data = value.tobytes()
            return {b"__ndarray__": True, b"data": data, b"dtype": value.dtype.str, b"shape": value.shape}
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _restored(entry: dict[Any, Any]) -> Any:
    """What a map stands for: an array, a numpy scalar, or itself."""
    if b"__ndarray__" in entry:
        dtype, shape, data = _dtype(entry), entry.get(b"shape"), entry.get(b"data")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise RequestError(f"an array's shape is {str(shape)[:60]}, expected a list of at most {_MAX_DIMS} sizes")
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
            have = f"{len(data)} bytes" if isinstance(data, bytes) else f"a {type(data).__name__}"
            raise RequestError(f"an array of shape {shape} and dtype {dtype} came with {have} of data")
        return np.ndarray(shape, dtype, data)
    if b"__npgeneric__" in entry:
        return _dtype(entry).type(entry.get(b"data"))
    return entry


def _dtype(entry: dict[Any, Any]) -> np.dtype[Any]:
    name = entry.get(b"dtype")
    if isinstance(name, str) and len(name) <= _MAX_DTYPE_LENGTH:
        try:
            dtype = np.dtype(name)
        except TypeError as error:
            raise RequestError(f"an array's dtype {name!r} is unknown") from error
        if dtype.kind in _KINDS and dtype.itemsize:
            return dtype
    raise RequestError(f"an array's dtype is {str(name)[:60]!r}; numbers and text can be read")
