"""Runs of several processes that lose one, are interrupted or find no cluster: who it was, the true exit status, and
nothing left behind: no process, no folder, no shared memory."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlinf.config.derived import make_plan
from rlinf.errors import UserError, WorkerDiedError
from rlinf.runtime.ray.cluster import RayCluster, find_nodes, open_session
from tests.conftest import REPO
from tests.runs import leaked, toy_config, wait_gone
from tests.runtime.ray_workers import Probe

PLACED = ["cluster.virtual_devices=2", "cluster.component_placement={env: 0, 'rollout,actor': 1}"]


def descendants(pid: int) -> dict[int, str]:
    """Every process below one, with its command line."""
    parents, found, todo = {}, {}, [pid]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    while todo:
        above = todo.pop()
        for child in [c for c, p in parents.items() if p == above]:
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            todo.append(child)
    return found


@dataclass
class Run:
    """A training run with a Ray cluster of its own, in its second step or later."""

    process: subprocess.Popen[str]
    logs: Path

    def __post_init__(self) -> None:
        self.below = descendants(self.process.pid)
        self.folder = Path(next(c for c in self.below.values() if "cleaner.py" in c).split()[-1])

    def pid_of(self, worker: str) -> int:
        """The process a worker lives in, by its log."""
        heads = [log.read_text().splitlines()[0] for log in self.logs.glob("process_*.log")]
        return int(next(re.search(r"pid (\d+):", head)[1] for head in heads if worker in head))

    def end(self) -> list[str]:
        """What it says on stderr; everything it started must be gone."""
        _, err = self.process.communicate()
        assert "Traceback" not in err
        assert wait_gone(list(self.below))
        for _ in range(100):
            if not self.folder.exists():
                break
            time.sleep(0.1)
        assert not self.folder.exists()
        return err.splitlines()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    own = ["runner.max_epochs=1000", f"runner.logger.log_path={tmp_path}", "runner.logger.logger_backends=[]"]
    command = [sys.executable, "-m", "rlinf", "train", "toy_ppo_compact", *own, *PLACED]
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}  # left behind by a cluster that is gone
    metrics = tmp_path / "metrics.jsonl"
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=REPO, env=environment
    ) as process:
        try:
            while not metrics.exists() or not metrics.read_text():
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.05)
            yield Run(process, tmp_path / "worker_logs")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("worker", "number"),
    [
        ("env", signal.SIGKILL),
        pytest.param("rollout", signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param("actor", signal.SIGABRT, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_ends_the_run_and_is_named(run, worker, number):
    pid, shared = run.pid_of(f"{worker} rank 0"), set(os.listdir("/dev/shm"))
    os.kill(pid, number)
    *_, last = run.end()
    assert run.process.returncode == 5
    who = "env rank 0" if worker == "env" else "rollout rank 0 and actor rank 0"
    log = run.logs / f"process_{0 if worker == 'env' else 1}.log"
    assert last.startswith(
        f"error: {who} on node 0 ({socket.gethostname()}, pid {pid}) died; its log is {log}; Ray says: "
    )
    assert "its worker process has died" in last
    assert not leaked(shared)


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c(run, times):
    for _ in range(times):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    said = run.end()
    assert run.process.returncode == 130
    if times == 1:
        assert said[-1] == "interrupted"


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_nothing(run):
    run.process.kill()
    run.end()


@pytest.mark.slow
def test_sigterm_to_every_process_saves_first(run):
    for pid in (*run.below, run.process.pid):
        os.kill(pid, signal.SIGTERM)
    run.end()
    assert run.process.returncode == 143
    assert list(run.logs.parent.glob("*/checkpoints/global_step_*"))


@pytest.mark.slow
def test_a_dead_raylet_ends_the_run(run):
    os.kill(next(pid for pid, command in run.below.items() if "raylet/raylet" in command), signal.SIGKILL)
    *_, last = run.end()
    assert run.process.returncode == 5
    assert " on node 0 " in last


def test_a_death_is_noticed_while_others_wait_for_the_dead(tmp_path, ray_address):
    where = [f"cluster.ray_address={ray_address}", "cluster.virtual_devices=3", "actor.micro_batch_size=16"]
    placement = "cluster.component_placement={env: 0, rollout: 0, actor: 1-2}"
    cfg = toy_config(tmp_path, *where, placement)
    cluster = RayCluster(cfg, make_plan(cfg))
    try:
        rollout, actor = cluster.launch(Probe, "rollout"), cluster.launch(Probe, "actor")
        pids = [info.pid for info in cluster.processes]
        waiting = [rollout.one(0, "work", name="fine"), actor.one(0, "wait_for_all"), actor.one(1, "die")]
        with pytest.raises(WorkerDiedError, match=rf"^actor rank 1 on node 0 \(.*, pid {pids[2]}\) died; its log is "):
            cluster.get(waiting)
    finally:
        cluster.shutdown()
    assert wait_gone(pids)


def test_clusters_that_are_not_there_are_refused_at_once(tmp_path, monkeypatch):
    def refuse(*overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            open_session(toy_config(tmp_path, "cluster.virtual_devices=1", *overrides)).__enter__()
        return str(caught.value)

    assert refuse("cluster.ray_address=127.0.0.1:1").startswith("cluster.ray_address=127.0.0.1:1: no Ray head answers")
    assert "must be `auto`, host:port" in refuse("cluster.ray_address=somewhere")
    assert "needs a Ray cluster to join: `ray start --head`" in refuse("cluster.num_nodes=2")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr("rlinf.runtime.ray.session.ANSWER_DEADLINE_S", 0.2)
        assert "no Ray head answers (timed out)" in refuse(f"cluster.ray_address=127.0.0.1:{deaf.getsockname()[1]}")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # left behind by a cluster that is gone
    assert ":1: no Ray head answers" in refuse("cluster.ray_address=auto")


def test_missing_nodes_are_counted(tmp_path, ray_address, monkeypatch):
    monkeypatch.setattr("rlinf.runtime.ray.cluster.NODES_DEADLINE_S", 0.0)
    join = [f"cluster.ray_address={ray_address}", "cluster.virtual_devices=1"]
    with open_session(toy_config(tmp_path, *join, "cluster.num_nodes=2")) as nodes:
        assert len({node.id for node in nodes}) == 2
        with pytest.raises(UserError, match=r"num_nodes=3, but the Ray cluster has 2; run `ray start"):
            find_nodes(toy_config(tmp_path, *join, "cluster.num_nodes=3"))
        with pytest.raises(UserError, match="connected to a Ray cluster already"):
            open_session(toy_config(tmp_path, *join)).__enter__()
