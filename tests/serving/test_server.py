"""The server over loopback: protocol, faults of clients and of the policy, tokens, limits, and its end."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

pytest.importorskip("websockets")

from websockets.exceptions import ConnectionClosed, InvalidStatus

from rlinf.errors import UserError
from rlinf.serving.messages import pack
from rlinf.serving.server import Settings, bind, is_loopback
from rlinf.version import __version__
from tests.serving.loopback import Client, MeanPixel, observation, serving


def health(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def same(client: Client, running, number: int, calls: int) -> bool:
    """Whether the next answer is what the policy gives alone in its `calls`-th call of an episode."""
    message = observation(number)
    alone = type(running.loaded)(MeanPixel())
    for _ in range(calls):  # the noise is that of the number of calls
        wanted = alone.act(message["observation/image"], instruction="go", state=message["observation/state"])
    return np.array_equal(client.ask(message)["actions"], wanted)


def test_metadata_then_actions_then_the_number_of_calls():
    with serving() as running:
        client = running.client()
        assert client.metadata == {
            "server": "rlinf",
            "version": __version__,
            "recipe": None,
            "step": None,
            "action_dim": 2,
            "horizon": 3,
            "cameras": ["image"],
            "image_size": 8,
            "state_dim": 2,
            "statistics_sha256": None,
            "seed": 0,
            "max_batch": 64,
        }
        first = client.ask(observation())
        assert first["actions"].shape == (3, 2)
        assert first["actions"].dtype == np.float32
        assert first["server_timing"].keys() == {"infer_ms", "batch"}
        second = client.ask(observation())
        assert second["server_timing"].keys() == {"infer_ms", "batch", "prev_total_ms"}
        assert not np.array_equal(first["actions"], second["actions"])
        other = running.client()  # an episode of its own, in the same noise
        assert np.array_equal(other.ask(observation())["actions"], first["actions"])
        assert np.array_equal(client.ask(observation(reset=True))["actions"], first["actions"])
        assert np.array_equal(client.ask(observation())["actions"], second["actions"])
        seeded = client.ask(observation(seed=5))["actions"]
        assert not np.array_equal(seeded, first["actions"])
        assert np.array_equal(other.ask(observation(seed=5))["actions"], seeded)


def test_after_a_mistake_the_same_connection_goes_on():
    with serving() as running:
        client, other = running.client(), running.client()
        assert client.ask(b"\xc1").startswith("the message is not msgpack: ")
        assert client.ask("hello") == "the message is text, expected msgpack in a binary frame"
        assert client.ask({"prompt": "go"}).startswith("missing: main camera")
        assert client.ask(observation(camera=1)) == "unknown key 'camera'"
        assert same(client, running, 0, 1)  # what was refused is no call
        assert same(other, running, 1, 1)
        assert health(running.port) == (200, "OK\n")


def test_an_oversized_frame_ends_its_connection_alone():
    with serving(settings=Settings(max_message_bytes=1000)) as running:
        client, other = running.client(), running.client()
        with pytest.raises(ConnectionClosed) as caught:
            client.ask(b"\0" * 1001)
        assert caught.value.rcvd.code == 1009
        assert same(other, running, 0, 1)


def test_clients_that_vanish_leave_the_others_served():
    with serving() as running:
        other, half, asking = running.client(), running.client(), running.client()
        half.connection.socket.sendall(b"\x82\xfe\xff\xff\0\0\0\0abc")  # the beginning of a frame
        running.policy.gate.clear()
        asking.connection.send(pack(observation()))
        assert running.policy.entered.wait(30)  # its batch is being computed
        for client in (half, asking):
            client.connection.socket.shutdown(socket.SHUT_RDWR)
        running.policy.gate.set()
        assert same(other, running, 1, 1)
        stranger = socket.create_connection(("127.0.0.1", running.port))
        stranger.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        assert same(other, running, 2, 2)
        stranger.close()


def test_a_policy_that_fails_is_told_in_one_line_and_seen_in_health(caplog):
    with serving() as running:
        client = running.client()
        running.policy.faults.append(RuntimeError("out of memory\nat line 3"))
        assert client.ask(observation()) == "the policy failed: RuntimeError: out of memory"
        assert health(running.port) == (503, "the policy failed: RuntimeError: out of memory\n")
        assert "out of memory" in caplog.text
        assert same(client, running, 0, 1)  # a call that failed does not count
        assert health(running.port) == (200, "OK\n")


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Api-Key open"}, {"Authorization": "Bearer open"}, {"Api-Key": "open"}]
)
def test_the_token_opens(headers: dict[str, str]):
    with serving(settings=Settings(token="open")) as running:
        assert same(running.client(additional_headers=headers), running, 0, 1)
        for wrong in (None, {"Authorization": "open"}, {"Api-Key": "shut"}, {"Authorization": "Api-Key "}):
            with pytest.raises(InvalidStatus, match="401"):
                running.client(additional_headers=wrong)
        assert health(running.port) == (200, "OK\n")  # needs none


def test_web_pages_need_the_token():
    with serving() as running:
        client = running.client()  # sends no Origin, like openpi-client, which opens its connections the same way
        assert "Origin" not in client.connection.request.headers
        for origin in ("http://evil.example", f"http://127.0.0.1:{running.port}", "null"):
            with pytest.raises(InvalidStatus, match="403") as caught:
                running.client(origin=origin)
            assert caught.value.response.body == b"a server without a token admits no web pages (Origin)\n"
        assert same(client, running, 0, 1)
    with serving(settings=Settings(token="open")) as running:
        with pytest.raises(InvalidStatus, match="401"):
            running.client(origin="http://evil.example")
        assert same(running.client(origin="http://mine.example", additional_headers={"Api-Key": "open"}), running, 0, 1)


def test_too_many_clients_are_refused():
    with serving(settings=Settings(max_clients=1)) as running:
        client = running.client()
        with pytest.raises(InvalidStatus, match="503"):
            running.client()
        client.connection.close()
        deadline = time.monotonic() + 30
        while running.server._busy and time.monotonic() < deadline:
            time.sleep(0.01)
        assert same(running.client(), running, 0, 1)


def test_a_stopping_server_answers_what_was_asked():
    with serving() as running:
        idle, asking = running.client(), running.client()
        running.policy.gate.clear()
        answer: list = []
        thread = threading.Thread(target=lambda: answer.append(asking.ask(observation())))
        thread.start()
        assert running.policy.entered.wait(30)
        running.server.stop()
        with pytest.raises(ConnectionClosed) as caught:
            idle.answer()
        assert caught.value.rcvd.code == 1001
        running.policy.gate.set()
        thread.join(30)
        assert answer[0]["actions"].shape == (3, 2)
        with pytest.raises(ConnectionClosed):
            asking.answer()


def test_addresses():
    with bind("127.0.0.1", 0) as taken:
        assert is_loopback(taken)
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--host 127.0.0.1 --port {port}: cannot listen there \(.*in use"):
            bind("127.0.0.1", port)
    with bind("0.0.0.0", 0) as everywhere:
        assert not is_loopback(everywhere)
    for host in ("no.such.host.invalid", "x" * 300):
        with pytest.raises(UserError, match="cannot listen there"):
            bind(host, 0)
