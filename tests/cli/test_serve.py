"""`rlinf serve`: mistakes are told before the policy is read; SIGTERM ends it in order."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets")

from rlinf.commands import serve as module
from rlinf.commands.serve import serve_policy
from rlinf.errors import UserError
from rlinf.serving.policy import LoadedPolicy
from tests.serving.loopback import Client, MeanPixel, observation

OPTIONS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "token": None,
    "device": "cpu",
    "max_batch": 4,
    "window_ms": 0.0,
    "prompt": None,
    "seed": 0,
    "max_clients": 2,
    "max_message_mb": 1,
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token": " "}, "--token is empty"),
        ({"host": "no.such.host.invalid"}, "--host no.such.host.invalid --port 0: cannot listen there"),
        ({}, "CHECKPOINT=nothing does not exist; expected the folder of a run, of its checkpoint global_step_N"),
        ({"device": "gpu"}, "device=gpu is no device"),
        ({"device": "cuda:99"}, "device=cuda:99: torch finds"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        serve_policy(Path("nothing"), **OPTIONS | changes)
    assert text in str(caught.value)


def test_a_port_in_use_is_told_first():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: cannot listen there"):
            serve_policy(Path("nothing"), **OPTIONS | {"port": port})


def test_a_signal_ends_it_and_the_last_line_counts(monkeypatch: pytest.MonkeyPatch, capsys, caplog):
    monkeypatch.setattr(module, "load_policy", lambda *_, **__: LoadedPolicy(MeanPixel()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found: list[Any] = []

    def visit() -> None:
        deadline = time.monotonic() + 60
        while not found and time.monotonic() < deadline:
            try:
                found.append(Client(port, additional_headers={"Api-Key": "open"}).ask(observation()))
            except ConnectionRefusedError:
                time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=visit)
    thread.start()
    serve_policy(Path("policy"), **OPTIONS | {"host": "0.0.0.0", "port": port, "token": "open"})
    thread.join(60)
    assert signal.getsignal(signal.SIGTERM) == before
    assert found[0]["actions"].shape == (3, 2)
    printed = capsys.readouterr().out
    assert f"serving policy on cpu at ws://0.0.0.0:{port}\n" in printed
    assert "reads 1 camera, 2 state columns; gives 3 actions of 2 columns" in printed
    assert printed.endswith("served 1 requests in 1 policy calls, refused 0\n")
    assert "no --token" not in caplog.text


def test_other_machines_without_a_token_are_warned_of(caplog):
    with pytest.raises(UserError, match="does not exist"):
        serve_policy(Path("nothing"), **OPTIONS | {"host": "0.0.0.0"})
    assert "--host 0.0.0.0 is reached from other machines and there is no --token: anyone may ask" in caplog.text


def test_the_page_lists_every_option():
    text = (Path(__file__).parents[2] / "docs/serve.md").read_text(encoding="utf-8")
    options = [f"--{name.replace('_', '-')}" for name in OPTIONS]
    assert [option for option in options if f"| `{option}` |" not in text] == []
