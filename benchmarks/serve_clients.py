"""Clients of `serve.py` in a process of their own: each asks, waits for the actions, and asks again. Imports no torch.

Reads a line from stdin, a JSON object: port, numbers of the clients, keys of the observation. Says `ready` when each
has had an answer; a second line then says when measuring begins and ends; the answers between are written to stdout.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np
from websockets.sync.client import connect

from rlinf.serving.messages import pack, unpack


def ask(order: dict[str, Any], number: int, found: list[list[float]], end: list[float]) -> None:
    """One client; `found` gets a row per answer: when it came, seconds it took, the policy call's ms, its batch."""
    rng = np.random.default_rng(number)
    shape = (order["pixels"], order["pixels"], 3)
    observation: dict[str, Any] = {key: rng.integers(0, 256, shape, dtype=np.uint8) for key in order["cameras"]}
    if order["state_dim"]:
        observation["state"] = rng.random(order["state_dim"], dtype=np.float32)
    observation["prompt"] = order["prompt"]
    with connect(f"ws://127.0.0.1:{order['port']}", compression=None, max_size=None) as connection:
        connection.recv()  # metadata
        while time.time() < end[0]:
            start = time.perf_counter()
            connection.send(pack(observation))
            answer = connection.recv()
            seconds = time.perf_counter() - start
            if isinstance(answer, str):
                raise SystemExit(f"the server says: {answer}")
            content = unpack(answer)
            assert content["actions"].shape == tuple(order["actions"])
            timing = content["server_timing"]
            found.append([time.time(), seconds, timing["infer_ms"], timing["batch"]])


def main() -> None:
    order = json.loads(sys.stdin.readline())
    found: dict[int, list[list[float]]] = {number: [] for number in order["numbers"]}
    end = [float("inf")]
    threads = [threading.Thread(target=ask, args=(order, n, rows, end), daemon=True) for n, rows in found.items()]
    for thread in threads:
        thread.start()
    while not all(found.values()):
        if not all(thread.is_alive() for thread in threads):
            raise SystemExit("a client failed")
        time.sleep(0.01)
    print("ready", flush=True)
    begin, end[0] = json.loads(sys.stdin.readline())
    for thread in threads:
        thread.join()
    print(json.dumps([row for rows in found.values() for row in rows if begin <= row[0] < end[0]]))


if __name__ == "__main__":
    main()
