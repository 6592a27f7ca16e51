"""Pictures as PNG, for simulator processes and for what writes datasets: numpy and zlib only. Torch-free."""

from __future__ import annotations

import struct
import zlib

import numpy as np

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_START = PNG_SIGNATURE + b"\0\0\0\rIHDR"
_IDAT = 41  # where the compressed rows begin: behind signature, header and their chunk's length and name
_END = 16  # bytes behind them: their checksum, and the chunk that ends the file


def encode_png(image: np.ndarray) -> bytes:
    """One u8 [H, W, 3] image as PNG: two to three times as fast as Pillow, and without Python's lock, on all cores."""
    height, width, _ = image.shape
    pixels = image.reshape(height, 3 * width)
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = 2  # PNG's filter "up": every row as its difference to the one above
    rows[0, 1:] = pixels[0]
    np.subtract(pixels[1:], pixels[:-1], out=rows[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(_png_chunk(name, data) for name, data in chunks)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a PNG that `encode_png` made and whose checksums are right; None for any other."""
    if len(data) < _IDAT + _END or not data.startswith(_START) or data[_IDAT - 4 : _IDAT] != b"IDAT":
        return None
    length, rest = struct.unpack_from(">I", data, _IDAT - 8)[0], data[-_END:]
    header, body = data[12:29], memoryview(data)[_IDAT - 4 : -_END]
    checksums = struct.unpack_from(">I", data, 29)[0], struct.unpack_from(">I", rest)[0]
    if length != len(body) - 4 or rest[4:] != _png_chunk(b"IEND", b"") or header[12:] != b"\x08\x02\0\0\0":
        return None
    if checksums != (zlib.crc32(header), zlib.crc32(body)):
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return height, width


def largest_png(height: int, width: int) -> int:
    """Bytes that no PNG of `encode_png` exceeds."""
    pixels = height * (1 + 3 * width)
    return pixels + pixels // 8 + 1024  # zlib's own bound, and room for the chunks' names and checksums
