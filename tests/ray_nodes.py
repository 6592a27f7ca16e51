"""A small Ray cluster for tests: two raylets on this machine, which count as two nodes, behind a token."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.runtime.ray.cluster import require_token


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of the head. Everything Ray writes lies in a folder of its own: `auto` elsewhere does not find it."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="rlinf-test-", dir="/tmp")  # paths of sockets must be short
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = folder
    Path(folder, "ray").mkdir()
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    require_token()
    options = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 200 << 20}  # GPUs that Ray only believes in
    cluster = Cluster()
    try:
        cluster.add_node(**options, include_dashboard=False, no_monitor=True)
        cluster.add_node(**options)
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        if before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = before
