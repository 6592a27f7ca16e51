"""A websocket server that speaks openpi's protocol, so that the package openpi-client acts with a policy of rlinf.

Metadata is the first message of a connection; then every observation is answered by its actions, or by one line of text
that says what is wrong with it, after which the connection goes on.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from rlinf.errors import UserError
from rlinf.serving.batcher import Batcher, PolicyFailedError
from rlinf.serving.messages import RequestError, pack

PING_SECONDS, SILENCE_SECONDS = 20.0, 60.0  # how often clients are asked for a sign of life, and how long they may take
STOP_SECONDS = 10.0  # open requests are answered within these when the server stops
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Whom a server admits, and what they may send."""

    token: str | None = None  # that clients must send
    max_clients: int = 256
    max_message_bytes: int = 16 * MIB


class PolicyServer:
    """Serves one policy until it is told to stop."""

    def __init__(self, batcher: Batcher, settings: Settings, metadata: dict[str, Any]) -> None:
        self.batcher, self.settings = batcher, settings
        self._metadata = pack(metadata)
        self._busy: dict[ServerConnection, bool] = {}  # open connections, and whether each awaits an answer
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, at: socket.socket, started: Callable[[], None], *, signals: bool = False) -> None:
        """Serve at a bound socket until `stop`, or SIGINT and SIGTERM where `signals`; calls `started` once it does."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if signals:
            self._stop_on_signals()
        quiet = logging.getLogger("rlinf.serving.websockets")  # strangers who speak no websocket are no errors of ours
        quiet.setLevel(logging.CRITICAL)
        server = await serve(
            self._serve,
            sock=at,
            process_request=self._admit,
            compression=None,
            max_size=self.settings.max_message_bytes,
            max_queue=1,
            ping_interval=PING_SECONDS,
            ping_timeout=SILENCE_SECONDS,
            logger=quiet,
        )
        try:
            started()
            await self._stop.wait()
        finally:
            await self._end(server)

    def stop(self) -> None:
        """Answer what was asked and end; from any thread."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    # ------------------------------------------------------------------ connections
    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer /healthz; refuse a client without the token, web pages where there is none, or too many clients.

        A browser names a page's Origin and lets any page reach this machine; other programs send none.
        """
        if request.path.partition("?")[0] == "/healthz":
            failure = self.batcher.counts.failure
            if failure is not None:
                return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{failure}\n")
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if not self._token_fits(request):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "this server needs its token as the api_key\n")
        if self.settings.token is None and "Origin" in request.headers:
            return connection.respond(
                http.HTTPStatus.FORBIDDEN, "a server without a token admits no web pages (Origin)\n"
            )
        if len(self._busy) >= self.settings.max_clients:
            text = f"{self.settings.max_clients} clients are connected already\n"
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _token_fits(self, request: Request) -> bool:
        """Whether Authorization (`Api-Key TOKEN` or `Bearer TOKEN`) or Api-Key holds the token, in constant time."""
        if self.settings.token is None:
            return True
        sent = [value.partition(" ")[2] for value in request.headers.get_all("Authorization")]
        sent += request.headers.get_all("Api-Key")
        wanted = self.settings.token.encode()
        given = [value.strip().encode(errors="surrogateescape") for value in sent]  # headers may hold any bytes
        return any([hmac.compare_digest(value, wanted) for value in given])

    async def _serve(self, connection: ServerConnection) -> None:
        """One client, until it leaves or the server stops."""
        assert self._stop is not None
        session = self.batcher.open_session()
        self._busy[connection] = False
        before: float | None = None  # seconds of the request before this one, sending included
        try:
            await connection.send(self._metadata)
            while not self._stop.is_set():
                message = await connection.recv()
                start, self._busy[connection] = time.perf_counter(), True
                try:
                    if isinstance(message, str):
                        raise RequestError("the message is text, expected msgpack in a binary frame")
                    answer = await asyncio.wrap_future(self.batcher.submit(session, message))
                except (RequestError, PolicyFailedError) as error:
                    await connection.send(str(error))
                else:
                    timing = {"infer_ms": 1000 * answer.infer_seconds, "batch": answer.batch}
                    if before is not None:
                        timing["prev_total_ms"] = 1000 * before
                    await connection.send(pack({"actions": answer.actions, "server_timing": timing}))
                    before = time.perf_counter() - start
                self._busy[connection] = False
            await connection.close(CloseCode.GOING_AWAY)
        except ConnectionClosed:
            pass
        finally:
            del self._busy[connection]
            self.batcher.close_session(session)

    # ------------------------------------------------------------------ the end
    def _stop_on_signals(self) -> None:
        """The first SIGINT or SIGTERM stops in order; a further one does what it did before."""
        assert self._loop is not None

        def handle(number: signal.Signals) -> None:
            for one, handler in before.items():
                if self._loop is not None:
                    self._loop.remove_signal_handler(one)
                signal.signal(one, handler)
            self.stop()

        both = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
        before = {one: handler for one, handler in both.items() if handler is not signal.SIG_IGN}  # nohup ignores them
        for one in before:
            self._loop.add_signal_handler(one, handle, one)

    async def _end(self, server: Server) -> None:
        """Take no further clients, answer open requests, tell the clients that the server goes."""
        server.close(close_connections=False)
        idle = [connection for connection, busy in self._busy.items() if not busy]
        waits = [asyncio.ensure_future(connection.close(CloseCode.GOING_AWAY)) for connection in idle]
        deadline = time.monotonic() + STOP_SECONDS
        while self._busy and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for wait in waits:
            wait.cancel()
        for connection in list(self._busy):
            connection.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address, 0 for a free port; who connects before the server runs is refused and may try again."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"--host {host} --port {port}: cannot listen there ({reason}); choose another") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether only programs of this machine can reach a bound socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback
