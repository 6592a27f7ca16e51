"""The live report answers this machine with the newest page and the files it links, and nobody with anything else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlinf.commands.cli import app
from rlinf.errors import UserError
from rlinf.metrics.report import live
from rlinf.metrics.report.live import make_server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "video/eval").mkdir(parents=True)
    (folder / "video/eval/a b.mp4").write_bytes(bytes(range(100)))
    (folder / "secret.txt").write_text("secret")
    (tmp_path / "outside.txt").write_text("outside")
    return folder


@pytest.fixture
def port(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(live, "RESTS", 0)  # a page is made anew as soon as a file changes
    with make_server([run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        assert server.server_address[0] == "127.0.0.1"
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_page_follows_the_run(run: Path, port: int) -> None:
    status, headers, page = ask(port, "/")
    assert (status, b"no training steps" in page) == (200, True)  # it may be opened before the first step
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].encode() in page
    assert headers["X-Frame-Options"] == "DENY"
    assert ask(port, "/", If_None_Match=headers["ETag"])[::2] == (304, b"")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "env/success_once": 0.5}) + "\n")
    status, newer, page = ask(port, "/", If_None_Match=headers["ETag"])
    assert (status, b"1 training step" in page) == (200, True)
    assert newer["ETag"] != headers["ETag"]
    assert ask(port, "/", method="HEAD")[::2] == (200, b"")


def test_videos_are_sent_whole_or_in_part(port: int) -> None:
    address, film = "/files/0/video/eval/a%20b.mp4", bytes(range(100))
    assert f'src="{address}"'.encode() in ask(port, "/")[2]
    status, headers, body = ask(port, address)
    assert (status, headers["Content-Type"], body) == (200, "video/mp4", film)
    status, headers, body = ask(port, address, Range="bytes=10-19")
    assert (status, headers["Content-Range"], body) == (206, "bytes 10-19/100", film[10:20])
    assert ask(port, address, Range="bytes=-5")[2] == film[-5:]
    assert ask(port, address, Range="bytes=90-")[2] == film[90:]
    assert ask(port, address, Range="bytes=90-500")[2] == film[90:]
    assert ask(port, address, Range="bytes=100-")[0] == 416
    assert ask(port, address, Range="bytes=0-1,5-6")[2] == film
    for digits in ("9" * 18, "9" * 5000):
        assert ask(port, address, Range=f"bytes=90-{digits}")[2][-10:] == film[90:]
        assert ask(port, address, Range=f"bytes={digits}-")[0] in (206, 416)


def test_a_fault_is_one_line(port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "_span", lambda asked, size: 1 // 0)
        status, _, body = ask(port, "/files/0/video/eval/a%20b.mp4")
    assert (status, body) == (500, b"the report has failed; the terminal says how\n")
    (record,) = caplog.records
    assert record.getMessage() == (
        "GET /files/0/video/eval/a%20b.mp4 was not answered: ZeroDivisionError('integer division or modulo by zero')"
    )
    assert record.exc_info is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.ReportHandler, "parse_request", lambda handler: 1 // 0)
        with pytest.raises(http.client.RemoteDisconnected):
            ask(port, "/")
    assert "was not read: ZeroDivisionError(" in caplog.records[1].getMessage()
    assert capfd.readouterr().err == ""
    assert ask(port, "/")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt",
        "/files/0/secret.txt",
        "/files/0/../outside.txt",
        "/files/0/%2e%2e/outside.txt",
        "/files/0/video/eval/../../secret.txt",
        "/../../etc/passwd",
        "/files/0//etc/passwd",
        "/files/9/video/eval/a%20b.mp4",
        "/?x=1",
        "/files/0/%2e%2e%2foutside.txt",
    ],
)
def test_nothing_else_is_sent(path: str, port: int) -> None:
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),  # the near end of a tunnel
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("evil.example:localhost", 421),
        ("", 421),
    ],
)
def test_only_this_machine_is_answered(host: str, status: int, port: int) -> None:
    for path in ("/", "/files/0/video/eval/a%20b.mp4"):
        assert ask(port, path, Host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent_to_it(method: str, port: int) -> None:
    assert ask(port, "/", method=method)[0] == 501


def test_a_port_that_is_taken_is_named(run: Path, port: int) -> None:
    with pytest.raises(UserError, match=rf"--port={port} cannot be opened \(Address already in use\)"):
        make_server([run], port=port)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--live", "-o", "x.html"], "--live serves the page and writes no file"),
        (["--port", "80"], "--port needs --live"),
        (["--live", "/no/such/run"], "/no/such/run is not a folder"),
    ],
)
def test_options_that_contradict_are_refused(arguments: list[str], said: str, run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run), *arguments])
    assert isinstance(done.exception, UserError)
    assert said in str(done.exception)
