"""Serve the report of running runs on this machine only: the page asks again every few seconds and shows what is new.

Answers GET and HEAD for `/` and for the files that the page links, by a table; no address is ever turned into a path.
A request that names another host than this machine is refused, so that a web page elsewhere cannot read the report by
pointing a name of its own here (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from rlinf.errors import UserError
from rlinf.metrics.report.page import make_page, page_code, policy_of
from rlinf.metrics.report.run_files import read_runs, signature

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")  # what a browser on this machine, or behind a tunnel to it, calls it
RESTS = 4  # times what a page took to make, before the next is made: a long run keeps its processors
PIECE = 1 << 18  # bytes read of a file at once
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")  # more digits than any file has


class LivePage:
    """The newest report of some runs, made anew when a file of theirs has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._signature: str | None = None
        self._page = b""
        self._rests_until = 0.0  # of time.monotonic
        self._files: dict[str, Path] = {}
        self.newest()

    def newest(self) -> tuple[bytes, str]:
        """The page and its tag, which changes with it."""
        with self._lock:
            now = signature(self._folders)
            if now != self._signature and time.monotonic() >= self._rests_until:
                began = time.monotonic()
                runs, files = read_runs(self._folders, may_be_empty=True), {}
                known = {run.folder: index for index, run in enumerate(runs)}

                def link(path: Path) -> str:
                    folder = next(folder for folder in known if path.is_relative_to(folder))
                    address = f"/files/{known[folder]}/{path.relative_to(folder).as_posix()}"
                    files[address] = path
                    return quote(address)

                self._page = make_page(runs, link=link, live=True).encode()
                self._signature, self._files = now, files
                self._rests_until = time.monotonic() + RESTS * (time.monotonic() - began)
            return self._page, f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'

    def file(self, address: str) -> Path | None:
        """The file that the page links under an address; None for every other address."""
        with self._lock:
            return self._files.get(address)


class Span(NamedTuple):
    """The bytes of a file that were asked for, the last one included."""

    first: int
    last: int


def serve_report(folders: Sequence[Path], *, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `port` 0 takes a free one. Says the address once it can be opened."""
    server = make_server(folders, port=port)
    with server:
        say(f"live report: http://{LOOPBACK}:{server.server_address[1]}/  (Ctrl-C ends it; the run goes on)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("live report ended")


def make_server(folders: Sequence[Path], *, port: int) -> ThreadingHTTPServer:
    """A server that is bound and ready; refuses folders that are missing and a port that is taken."""
    page = LivePage(folders)

    class Handler(ReportHandler):
        live = page

    try:
        return ReportServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port={port} cannot be opened ({reason}); leave --port out to take a free one") from error


class ReportServer(ThreadingHTTPServer):
    """Answers every connection in a thread of its own; a fault of one is at most a line on the terminal."""

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):  # those: the browser has left
            logger.warning("a request of %s was not read: %r", client_address, error)


class ReportHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    live: LivePage
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds that a silent connection is kept

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests: the terminal belongs to the address."""

    def _answer(self) -> None:
        self._started = False
        try:
            if not _is_this_machine(self.headers):
                self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this report is served to this machine only")
            elif self.path == "/":
                self._send_page()
            elif (file := self.live.file(unquote(self.path))) is not None:
                self._send_file(file)
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "not a part of the report")
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the browser has left
        except Exception as error:  # a fault of ours: the terminal gets a line, the browser too unless it has a part
            logger.warning("%s %s was not answered: %r", self.command, self.path, error)
            self.close_connection = True
            if not self._started:
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "the report has failed; the terminal says how")

    def _send_page(self) -> None:
        try:
            page, tag = self.live.newest()
        except (OSError, UserError) as error:  # the folder was moved, a file is half written: the page asks again
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        scripts, style = page_code()
        headers = {"ETag": tag, "Content-Security-Policy": policy_of(scripts, style, live=True)}
        if self.headers.get("If-None-Match") == tag:
            self._start(HTTPStatus.NOT_MODIFIED, headers)
            return
        self._start(HTTPStatus.OK, headers | {"Content-Type": "text/html; charset=utf-8"}, len(page))
        if self.command == "GET":
            self.wfile.write(page)

    def _send_file(self, path: Path) -> None:
        """Send a video or a result, or the part that was asked for: a player seeks that way."""
        try:
            file = path.open("rb")
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND, "the file is gone")
            return
        with file:
            size = file.seek(0, 2)
            span = _span(self.headers.get("Range"), size)
            kind = {".mp4": "video/mp4", ".json": "application/json"}.get(path.suffix, "application/octet-stream")
            headers = {"Content-Type": kind, "Accept-Ranges": "bytes"}
            if span is None:
                self._start(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{size}"}, 0)
                return
            if self.headers.get("Range"):
                headers["Content-Range"] = f"bytes {span.first}-{span.last}/{size}"
            status = HTTPStatus.PARTIAL_CONTENT if self.headers.get("Range") else HTTPStatus.OK
            left = span.last - span.first + 1
            self._start(status, headers, left)
            file.seek(span.first)
            while left > 0 and self.command == "GET" and (piece := file.read(min(PIECE, left))):
                self.wfile.write(piece)
                left -= len(piece)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        text = f"{why}\n".encode()
        self._start(status, {"Content-Type": "text/plain; charset=utf-8"}, len(text))
        if self.command == "GET":
            self.wfile.write(text)

    def _start(self, status: HTTPStatus, headers: dict[str, str], length: int | None = None) -> None:
        self._started = True
        self.send_response(status)
        fixed = {
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()


def _is_this_machine(headers: Message) -> bool:
    """Whether the Host header names this machine, with any port: a tunnel may have another than the server."""
    host = headers.get("Host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.lower() in HOSTS


def _span(asked: str | None, size: int) -> Span | None:
    """The bytes that a Range header asks for; None where it has none. Several ranges mean everything."""
    found = _RANGE.fullmatch((asked or "").strip())
    if found is None or not (found[1] or found[2]):
        return Span(0, size - 1)
    if not found[1]:  # the last so many
        first, last = max(0, size - int(found[2])), size - 1
    else:
        first, last = int(found[1]), min(int(found[2] or size - 1), size - 1)
    return Span(first, last) if first <= last and first < size else None
