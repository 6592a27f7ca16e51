"""Ray runs a plan as threads do: order, errors, messages, logs. test_ray_runs.py has whole runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.exceptions import RayError

from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.data.layout import Piece
from rlinf.errors import SimulatorError, UserError
from rlinf.runtime.ray.cluster import RayCluster, RayGroup, reserve_devices
from tests.runtime.ray_workers import Probe, Seen, make_step


class Probes:
    """A cluster of probes: two processes with a worker of each role, and a third with an actor alone."""

    def __init__(self, cfg: Config) -> None:
        self.plan = make_plan(cfg, [2, 2])
        self.cluster = RayCluster(cfg, self.plan)
        self.rollout, self.env, self.actor = (self.cluster.launch(Probe, r) for r in ("rollout", "env", "actor"))

    def one(self, group: RayGroup, rank: int, method: str, *args, **kwargs):
        return self.cluster.get([group.one(rank, method, *args, **kwargs)])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("probes")


@pytest.fixture(scope="module")
def probes(folder, ray_address) -> Iterator[Probes]:
    placement = "cluster.component_placement={'env,rollout': 0-1, actor: 0-2}"
    arithmetic = ["env.train.total_num_envs=12", "actor.micro_batch_size=16", "actor.global_batch_size=48"]
    join = [f"cluster.ray_address={ray_address}", "cluster.num_nodes=2", f"runner.logger.log_path={folder}"]
    overrides = [*arithmetic, *join, placement, "runner.per_worker_log=true"]
    found = Probes(load_config("toy_ppo_compact", overrides, devices=[2, 2]))
    yield found
    found.cluster.shutdown()


def test_workers_of_equal_rank_share_a_process_on_the_planned_node(probes):
    env, rollout, actor = (probes.cluster.get(g.call("where")) for g in (probes.env, probes.rollout, probes.actor))
    assert env == rollout == actor[:2]
    assert [place.pid for place in actor] == [info.pid for info in probes.cluster.processes]
    assert len({place.pid for place in actor}) == 3
    head, second = (node.id for node in probes.cluster.nodes)
    assert [place.node for place in actor] == [head, head, second]
    assert {place.folder for place in actor} == {os.getcwd()}
    assert {place.threads for place in actor} == {1}


def test_accelerators_are_reserved_and_shown_to_their_processes_only(probes, monkeypatch):
    monkeypatch.setattr("rlinf.runtime.ray.cluster.RESERVE_DEADLINE_S", 0.5)
    assert [place.devices for place in probes.cluster.get(probes.actor.call("where"))] == ["0", "1", "0"]
    assert ray.available_resources()["GPU"] == 1.0  # of four
    with pytest.raises(UserError, match=r"2 on node 1\) that Ray does not have free"):
        reserve_devices(probes.cluster.nodes, {1: 2}).__enter__()


def test_calls_of_a_worker_run_in_order_and_those_of_neighbours_do_not_wait(probes):
    slow = probes.env.one(0, "work", name="slow", seconds=0.5)
    waits = probes.rollout.one(0, "work", slow, name="waits for another worker")
    after = probes.rollout.one(0, "work", name="issued later")
    beside = probes.actor.one(0, "work", name="beside")
    assert probes.cluster.get([after, beside, waits]) == ["issued later", "beside", "waits for another worker"]
    done = {
        name: at for group in (probes.env, probes.rollout, probes.actor) for name, at in probes.one(group, 0, "history")
    }
    assert sorted(done, key=done.__getitem__) == ["beside", "slow", "waits for another worker", "issued later"]


def test_pieces_are_cut_and_merged_in_global_order(probes):
    rows = [probes.env.one(r, "ones", 4, 3) for r in range(2)]
    routes = [[Piece(0, 0, 4), Piece(1, 0, 2)], [Piece(1, 2, 4)]]
    seen = probes.cluster.get(probes.rollout.map("look", rows, routes))
    assert [s.total for s in seen] == [4 * 3 * 1 + 2 * 3 * 2, 2 * 3 * 2]
    assert probes.one(probes.actor, 2, "look", *rows).total == 4 * 3 * (1 + 2)


def test_messages_arrive_equal_whatever_their_types(probes):
    local, far = make_step(1, 3), probes.one(probes.actor, 2, "echo", probes.env.one(1, "step", 3))
    assert far.obs.task_descriptions == local.obs.task_descriptions
    assert far.obs.states.dtype == torch.bfloat16
    for name in ("rewards", "terminated", "truncated", "valid", "lost", "final_rows"):
        assert torch.equal(getattr(far, name), getattr(local, name)), name
    assert torch.equal(far.obs.images, local.obs.images)
    assert torch.equal(far.final_obs.states, local.final_obs.states)


TENSORS = {
    "f32": torch.randn(3, 4),
    "bf16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "u8": torch.arange(6, dtype=torch.uint8).view(2, 3),
    "i64, no dimension": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "columns of a matrix": torch.arange(12.0).view(3, 4)[:, 1:3],
    "with a gradient": torch.ones(2, requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were(probes, name):
    want = TENSORS[name]
    got = probes.one(probes.actor, 2, "echo", probes.env.one(1, "echo", want))
    assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, False)
    assert torch.equal(got, want)


def test_large_values_are_not_copied_for_their_readers(probes):
    big = probes.env.one(0, "ones", 1000, 1000)
    seen: list[Seen] = probes.cluster.get([probes.rollout.one(1, "look", big), probes.actor.one(1, "look", big)])
    assert [s.total for s in seen] == [1e6, 1e6]
    assert seen[0].pointer == seen[1].pointer  # two workers of one process read the same memory


def test_bytes_between_processes_are_counted_exactly(probes):
    probes.cluster.drain_bytes()
    value = probes.env.one(0, "ones", 10, 3)
    probes.cluster.get([probes.rollout.one(0, "look", value)])
    assert probes.cluster.drain_bytes() == 0  # same process
    probes.cluster.get([probes.rollout.one(1, "look", value), probes.actor.one(2, "look", value)])
    assert probes.cluster.drain_bytes() == 2 * 10 * 3 * 4
    assert probes.cluster.drain_bytes() == 0


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("user", UserError, "key=3 must be even (rollout rank 1 on node 0)"),
        ("simulator", SimulatorError, "it keeps failing (rollout rank 1 on node 0)"),
        ("diverged", FloatingPointError, "not finite (rollout rank 1 on node 0)"),
        ("bug", KeyError, "'missing'"),
    ],
)
def test_errors_keep_their_type_and_name_the_worker(probes, kind, error, text):
    failed = probes.rollout.one(1, "fail", kind)
    waiting = probes.actor.one(2, "work", failed, name="never")
    with pytest.raises(error) as caught:
        probes.cluster.get([waiting])
    assert str(caught.value) == text
    if kind == "bug":
        (note,) = caught.value.__notes__
        assert note.startswith("in rollout rank 1 on node 0:")
        assert "ray_workers.py" in note
    assert probes.one(probes.actor, 2, "work", name="goes on") == "goes on"


def test_an_error_that_cannot_be_unpickled_is_told_in_words(probes):
    with pytest.raises(RayError, match=r"(?s)UnportableError: a b.*in rollout rank 1 on node 0"):
        probes.one(probes.rollout, 1, "fail", "unportable")


def test_a_failure_is_raised_while_others_wait_for_the_one_that_failed(probes):
    waiting = [probes.actor.one(rank, "wait_for_all") for rank in (0, 1)]
    with pytest.raises(UserError, match=r"actor rank 2 on node 1"):
        probes.cluster.get([*waiting, probes.actor.one(2, "fail", "user")])
    assert probes.cluster.get([*waiting, probes.actor.one(2, "wait_for_all")]) == [3.0, 3.0, 3.0]


def test_warnings_reach_the_driver_once_and_output_its_file(probes, folder, caplog):
    with caplog.at_level(logging.WARNING):
        for rank in (1, 1, 0):
            probes.one(probes.env, rank, "warn", "the floor is wet")
        probes.one(probes.env, 0, "warn", "again")
        deadline = time.monotonic() + 30
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            probes.one(probes.env, 0, "where")
    assert caplog.messages == ["env rank 1 on node 0: the floor is wet", "env rank 0 on node 0: again"]
    log = folder / "worker_logs" / "EnvGroup" / "rank_1.log"
    assert log.read_text().count("printed by rank 1") == 2
    assert log.resolve() == (folder / "worker_logs" / "RolloutGroup" / "rank_1.log").resolve()
    assert (folder / "worker_logs" / "ActorGroup" / "rank_2.log").read_text().splitlines()[0].endswith(": actor rank 2")
