"""The private Ray cluster of one run, as far as Ray is not needed for it: its folder, its secret, its cleaner."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rlinf.errors import UserError
from rlinf.runtime.ray import cleaner

LOOPBACK = "127.0.0.1"
ANSWER_DEADLINE_S = 5.0
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # gRPC begins like this
HTTP2_SETTINGS = b"\x04"  # type of the frame that answers it
LONGEST_FOLDER = 35  # a socket's path has 107 characters, Ray's own part of it about 70


class PrivateFolder:
    """A folder for Ray's session, closed to other users; cleaner.py sees to it that it never outlives the run."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix="rlinf-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp"))
        command = [sys.executable, "-S", "-E", str(Path(cleaner.__file__)), str(self.path)]
        self._cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait()


def make_secret() -> None:
    """A token of this process, unless the user has brought one: every Ray process of the run must show it."""
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def check_reachable(address: str) -> None:
    """Refuse an address where no Ray head answers; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise UserError(f"cluster.ray_address={address!r} must be `auto`, host:port of a Ray head, or null")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_DEADLINE_S) as connection:
            if "RAY_USE_TLS" in os.environ:
                return
            connection.sendall(HTTP2_HELLO)
            answer = connection.recv(4)
        problem = "" if answer[3:] == HTTP2_SETTINGS else "whoever answers is no Ray head"
    except OSError as error:
        problem = f"no Ray head answers ({error})"
    if problem:
        raise UserError(
            f"cluster.ray_address={address}: {problem}; a head that is gone may have left this address behind. Start "
            f"one with `ray start --head --port={port}`, or set cluster.ray_address=null to run on this machine alone"
        )
