"""The package openpi-client, unmodified, against a served policy.

Runs where RLINF_OPENPI_CLIENT names the Python of an environment with openpi-client.
"""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

pytest.importorskip("websockets")

from rlinf.serving.policy import LoadedPolicy
from rlinf.serving.server import Settings
from tests.serving.loopback import MeanPixel, observation, serving

pytestmark = pytest.mark.slow
PROGRAM = """
import json, sys
import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

observation = {k: np.array(v, t) if t else v for k, (v, t) in json.load(sys.stdin).items()}
policy = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key="open")
found = {"metadata": policy.get_server_metadata()}
found["chunks"] = [policy.infer(observation)["actions"].tolist() for _ in range(2)]
try:
    policy.infer({"prompt": "go"})
except RuntimeError as error:
    found["error"] = str(error)
broker = ActionChunkBroker(policy, action_horizon=found["metadata"]["horizon"])
found["steps"] = [broker.infer({**observation, "reset": True})["actions"].tolist() for _ in range(3)]
print(json.dumps(found))
"""


def test_it_acts_as_it_is():
    python = os.environ.get("RLINF_OPENPI_CLIENT")
    if python is None:
        pytest.skip("RLINF_OPENPI_CLIENT names no Python with openpi-client")
    message = observation()
    sent = {k: (v.tolist(), str(v.dtype)) if isinstance(v, np.ndarray) else (v, None) for k, v in message.items()}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with serving(settings=Settings(token="open")) as running:
        done = subprocess.run(
            [python, "-c", PROGRAM, str(running.port)],
            input=json.dumps(sent),
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    alone = LoadedPolicy(MeanPixel())
    image, state = message["observation/image"], message["observation/state"]
    chunks = [alone.act(image, instruction="go", state=state).tolist() for _ in range(2)]
    assert found["chunks"] == chunks
    assert found["steps"] == chunks[0]  # one action at a time of a chunk
    assert found["metadata"]["action_dim"] == 2
    assert found["error"].startswith("Error in inference server:\nmissing: main camera")
