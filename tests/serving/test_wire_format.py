"""Messages as openpi-client packs them, and bytes that are none."""

from __future__ import annotations

import numpy as np
import pytest

msgpack = pytest.importorskip("msgpack")

from rlinf.serving.messages import RequestError, pack, unpack  # noqa: E402

# What openpi-client 0.1.0 sends for an image of the numbers 0 to 11, a state [0.5, -1], a prompt and a numpy scalar.
SENT = bytes.fromhex(
    "84b16f62736572766174696f6e2f696d61676584c40b5f5f6e6461727261795f5fc3c40464617461c40c000102030405060708090a0b"
    "c4056474797065a37c7531c405736861706593020203b16f62736572766174696f6e2f737461746584c40b5f5f6e6461727261795f5f"
    "c3c40464617461c410000000000000e03f000000000000f0bfc4056474797065a33c6638c40573686170659102a670726f6d7074a267"
    "6fa16e83c40d5f5f6e7067656e657269635f5fc3c40464617461cb4004000000000000c4056474797065a33c6634"
)


def array(**changes: object) -> bytes:
    """A message with one array, some of its entries changed."""
    entry = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({"x": entry | {name.encode(): value for name, value in changes.items()}})


def test_what_the_client_packs_is_read_and_written_bit_by_bit():
    message = unpack(SENT)
    assert message["prompt"] == "go"
    assert message["observation/image"].tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    assert message["observation/image"].dtype == np.uint8
    assert message["observation/state"].tolist() == [0.5, -1.0]
    assert message["n"] == 2.5
    assert message["n"].dtype == np.float32
    assert pack(message) == SENT


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not msgpack"),
        (b"\xc1", "is not msgpack"),
        (SENT[:-1], "is not msgpack"),
        (SENT + b"\0", "is not msgpack"),
        (b"\x91" * 100_000, "is not msgpack"),  # lists in lists without end
        (b"\xdf\xff\xff\xff\xff", "is not msgpack"),  # a map that says it has four billion entries
        (msgpack.packb([1]), "holds a list, expected a map"),
        (msgpack.packb({1: 2}), "is not allowed for map key"),
        (array(dtype="|O8"), "dtype is '|O8'"),
        (array(dtype="f4,f4"), "dtype is 'f4,f4'"),
        (array(dtype="nonsense"), "dtype 'nonsense' is unknown"),
        (array(dtype=7), "dtype is '7'"),
        (array(shape=[3]), "shape [3] and dtype float32 came with 8 bytes"),
        (array(shape=[-2]), "shape is [-2]"),
        (array(shape=[1] * 9), "at most 8 sizes"),
        (array(shape=[2**40, 2**40, 0, 2]), "came with 8 bytes"),
        (array(data="text"), "came with a str of data"),
    ],
)
def test_anything_else_is_one_line(data: bytes, text: str):
    with pytest.raises(RequestError) as caught:
        unpack(data)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_cannot_be_sent():
    with pytest.raises(TypeError, match="a ndarray cannot be sent"):
        pack({"x": np.array([object()])})
