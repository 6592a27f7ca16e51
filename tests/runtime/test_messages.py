"""What travels between processes, and what a process of a plan is told about its accelerators."""

from __future__ import annotations

import pytest
import torch

from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.data.layout import Piece
from rlinf.data.struct import TensorStruct, num_bytes
from rlinf.data.types import Trajectory
from rlinf.runtime.cluster import merge
from rlinf.runtime.ray.devices import device_variables, groups_without_nccl, sort_devices, wanted_devices
from rlinf.runtime.worker import Worker
from rlinf.workers.rollout import RolloutWorker
from tests.runs import make_runner, toy_config
from tests.runtime.ray_workers import make_step


def test_bytes_of_a_message():
    step = make_step(0, 4)
    # images, states and flags of four envs and of one finished episode; its row number
    per_env = 4 * 4 * 3 + 2 * 2
    assert num_bytes(step) == 5 * per_env + 4 * (2 * 4 + 2 + 2 + 2 + 1) + 8
    assert num_bytes({"step": step, "x": torch.zeros(3), "text": "a", "nothing": None}) == num_bytes(step) + 12


def test_rows_of_several_values_are_put_together():
    rows = [torch.arange(4), torch.arange(10, 14)]
    assert merge(rows, [Piece(0, 1, 4), Piece(1, 0, 2)]).tolist() == [1, 2, 3, 10, 11]
    assert merge(rows[:1], [Piece(0, 0, 4)]) is rows[0]


def test_accelerators_of_the_plan_and_of_the_machine():
    placed = "cluster.component_placement={actor: 1-2, rollout: 1-2, env: '5:0-1'}"
    cfg = load_config("toy_ppo_compact", ["cluster.num_nodes=2", placed, "actor.micro_batch_size=16"], devices=[4, 4])
    plan = make_plan(cfg, [4, 4])
    assert wanted_devices(plan) == {0: 3, 1: 2}  # all up to the highest named: numbers keep their meaning
    assert groups_without_nccl(plan) == set()  # two env processes on one accelerator talk to nobody
    granted = [(1, "3"), (0, "10"), (0, "2"), (1, "0"), (0, "7")]  # as Ray gives them
    assert sort_devices(granted) == {0: ["2", "7", "10"], 1: ["0", "3"]}
    assert sort_devices([(0, "GPU-b"), (0, "GPU-a")]) == {0: ["GPU-a", "GPU-b"]}


def test_groups_that_share_an_accelerator():
    placed = "cluster.component_placement={actor: 0-1, rollout: '0-1:0-3', env: 0}"
    cfg = load_config("toy_ppo_compact", [placed, "actor.micro_batch_size=16"], devices=[2])
    assert groups_without_nccl(make_plan(cfg, [2])) == {"sync"}  # rollouts beside the actors, in processes of their own
    placed = "cluster.component_placement={actor: 0-1, rollout: {node_group: node, placement: 0}, env: 0}"
    cfg = load_config("toy_ppo_compact", [placed, "actor.micro_batch_size=16"], devices=[2])
    assert groups_without_nccl(make_plan(cfg, [2])) == {"sync"}  # a rollout without an accelerator


@pytest.mark.parametrize(
    ("ids", "egl", "variables"),
    [
        (["7"], [None, 6, 7], {"CUDA_VISIBLE_DEVICES": "7", "MUJOCO_EGL_DEVICE_ID": "2"}),
        (["2", "3"], [2, 3], {"CUDA_VISIBLE_DEVICES": "2,3", "MUJOCO_EGL_DEVICE_ID": "0"}),
        (["0"], [], {"CUDA_VISIBLE_DEVICES": "0"}),  # no EGL there
        (["GPU-a"], [0], {"CUDA_VISIBLE_DEVICES": "GPU-a"}),
        ([], [0], {"CUDA_VISIBLE_DEVICES": ""}),  # a process without accelerators
    ],
)
def test_a_process_sees_its_accelerators_only(ids, egl, variables):
    assert device_variables(ids, egl) == variables


@pytest.mark.parametrize("auto_reset", [False, True])
def test_nobody_writes_into_what_was_received(tmp_path, monkeypatch, auto_reset):
    """Received tensors lie over memory that others read. Here all workers are threads, and writing leaves a trace."""
    received: dict[int, tuple[str, torch.Tensor, int]] = {}
    invoke = Worker.invoke

    def spy(worker, method, *args, **kwargs):
        def remember(x: torch.Tensor) -> torch.Tensor:
            received.setdefault(id(x), (method, x, x._version))  # torch counts writes there
            return x

        for arg in args:
            if isinstance(arg, torch.Tensor):
                remember(arg)
            elif isinstance(arg, TensorStruct):
                arg.map(remember)
        return invoke(worker, method, *args, **kwargs)

    monkeypatch.setattr(Worker, "invoke", spy)
    monkeypatch.setattr(RolloutWorker, "experience", experience_that_travels)
    ranks = "cluster.component_placement={'actor,rollout': 0, env: '0:0-1'}"
    runner = make_runner(toy_config(tmp_path, ranks, f"env.train.auto_reset={auto_reset}"))
    try:
        for step in range(2):
            runner.step(step)
    finally:
        runner.close()
    assert {method for method, _, _ in received.values()} == {"predict", "step", "finish", "compute_advantages"}
    assert [method for method, x, version in received.values() if x._version != version] == []


def experience_that_travels(self: RolloutWorker, first: int, end: int, *, reader: int) -> Trajectory:
    return self.trajectory().columns(self.arena.columns.of_envs(first, end)).map(torch.clone)
