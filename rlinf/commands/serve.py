"""`rlinf serve`: a saved policy behind a websocket, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import torch

from rlinf.errors import UserError
from rlinf.serving.batcher import Batcher
from rlinf.serving.metadata import describe
from rlinf.serving.policy import LoadedPolicy, load_policy
from rlinf.serving.server import MIB, PolicyServer, Settings, bind, is_loopback

logger = logging.getLogger(__name__)


def serve_policy(
    checkpoint: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    device: str | None,
    max_batch: int,
    window_ms: float,
    prompt: str | None,
    seed: int,
    max_clients: int,
    max_message_mb: int,
) -> None:
    """Load the policy, serve it, and say how much was served."""
    if token is not None and not token.strip():
        raise UserError("--token is empty; leave it out, or choose one that is hard to guess")
    with bind(host, port) as at:
        if not is_loopback(at) and token is None:
            logger.warning("--host %s is reached from other machines and there is no --token: anyone may ask", host)
        print(f"loading {checkpoint}", flush=True)
        policy = load_policy(
            checkpoint, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), seed=seed, key="CHECKPOINT"
        )
        batcher = Batcher(policy, max_batch=max_batch, window=window_ms / 1000, prompt=prompt)
        try:
            _warm_up(batcher, prompt)
            settings = Settings(token, max_clients, max_message_mb * MIB)
            server = PolicyServer(batcher, settings, describe(policy, max_batch))
            lines = _lines(policy, checkpoint, *at.getsockname()[:2])
            asyncio.run(server.run(at, lambda: print(lines, flush=True), signals=True))
        finally:
            batcher.close()
    counts = batcher.counts
    print(f"served {counts.requests} requests in {counts.batches} policy calls, refused {counts.refused}")


def _warm_up(batcher: Batcher, prompt: str | None) -> None:
    """Compute once before the first client: kernels are compiled, and where the prompt is known all sizes recorded."""
    sizes = [1] if batcher.policy.device.type == "cpu" else [1, batcher.max_batch] if prompt is None else None
    batcher.warm_up(prompt or "wait", sizes)


def _lines(policy: LoadedPolicy, checkpoint: Path, host: str, port: int) -> str:
    """What the console shows once clients may connect."""
    spec, address = policy.spec, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    reads = f"{spec.num_images} camera{'' if spec.num_images == 1 else 's'}, {spec.state_dim} state columns"
    return (
        f"serving {checkpoint} on {policy.device} at ws://{address}\n"
        f"reads {reads}; gives {spec.num_action_chunks} actions of {spec.action_dim} columns; "
        f"health: http://{address}/healthz; Ctrl-C ends it"
    )
