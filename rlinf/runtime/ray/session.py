"""What a run needs of a Ray cluster before it talks to Ray: a private folder, a token, an address that answers."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.errors import UserError
from rlinf.runtime.ray import cleaner

LOOPBACK = "127.0.0.1"
ANSWER_DEADLINE_S = 5.0
LONGEST_FOLDER = 35  # a socket's path has 107 characters, Ray's own part of it about 70


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for Ray's files, closed to other users, for the block; removed also if this process is killed in it."""
    parent = tempfile.gettempdir()
    path = tempfile.mkdtemp(prefix="rlinf-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp")
    command = [sys.executable, "-S", "-E", cleaner.__file__, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its input ends with the block
        yield Path(path)


def ignore_read_only_warnings() -> None:
    """Received tensors lie in memory that others read too: Ray and torch warn of it, and no worker writes to them."""
    for text in ("Zero-copy tensor serialization", "The given NumPy array is not writable"):
        warnings.filterwarnings("ignore", text)


def make_token() -> None:
    """Set a random token that every Ray process of the run must show, unless the user has brought one."""
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def check_reachable(address: str) -> None:
    """Refuse an address where no Ray head answers; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise UserError(f"cluster.ray_address={address!r} must be `auto`, host:port of a Ray head, or null")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_DEADLINE_S) as connection:
            if "RAY_USE_TLS" not in os.environ:
                connection.recv(1)  # a gRPC server speaks first
    except OSError as error:
        raise UserError(
            f"cluster.ray_address={address}: no Ray head answers ({error}); a head that is gone may have left this "
            f"address behind. Start one with `ray start --head --port={port}`, or set cluster.ray_address=null to run "
            "on this machine alone"
        ) from None
