"""What travels between processes, and what a process of a plan is told about its accelerators."""

from __future__ import annotations

import pickle

import pytest
import torch

from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.data.struct import TensorStruct
from rlinf.data.types import Trajectory
from rlinf.runtime.ray.devices import crowded_teams, device_variables, sort_devices, wanted_devices
from rlinf.runtime.ray.messages import Call, Hole, num_bytes, pack, unpack
from rlinf.runtime.worker import Worker
from rlinf.workers.rollout import RolloutWorker
from tests.runs import make_runner, toy_config
from tests.runtime.ray_workers import make_step

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
def test_tensors_arrive_as_they_were(name, recwarn):
    x, buffers = TENSORS[name], []
    sent = pickle.dumps(pack(x), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(b.raw()) for b in buffers]  # read-only, as they lie in Ray's store
    y = unpack(pickle.loads(sent, buffers=frozen))
    assert (y.dtype, y.shape, y.requires_grad) == (x.dtype, x.shape, False)
    assert torch.equal(x, y)
    assert sum(map(len, frozen)) == x.numel() * x.element_size()  # nothing of it was pickled
    assert not recwarn.list


def test_a_tensor_keeps_the_memory_it_lies_in():
    y = unpack(pack(torch.arange(1000)))[10:20]
    torch.zeros(1000, dtype=torch.long)  # would take the place of memory that was given back
    assert y.tolist() == list(range(10, 20))


def test_bytes_of_a_message():
    step = make_step(0, 4)
    # images, states and flags of four envs and of one finished episode; its row number
    per_env = 4 * 4 * 3 + 2 * 2
    assert num_bytes(step) == 5 * per_env + 4 * (2 * 4 + 2 + 2 + 2 + 1) + 8
    assert num_bytes([step, {"x": torch.zeros(3)}, "text", None]) == num_bytes(step) + 12


def test_values_take_their_places():
    call = Call("m", (Hole(1), [Hole(0), "b"], 3), {}, (0, 0))
    assert call.arguments(["x", "y"]) == ("y", ["x", "b"], 3)
    rows = [torch.arange(4), torch.arange(10, 14)]
    (merged,) = Call("m", (), {}, (0, 1), ((1, 4), (0, 2))).arguments(rows)
    assert merged.tolist() == [1, 2, 3, 10, 11]


def test_accelerators_of_the_plan_and_of_the_machine():
    placed = "cluster.component_placement={actor: 1-2, rollout: 1-2, env: '5:0-1'}"
    cfg = load_config("toy_ppo_compact", ["cluster.num_nodes=2", placed, "actor.micro_batch_size=16"], devices=[4, 4])
    plan = make_plan(cfg, [4, 4])
    assert wanted_devices(plan) == {0: 3, 1: 2}  # all up to the highest named: numbers keep their meaning
    assert crowded_teams(plan) == frozenset()  # two env processes on one accelerator talk to nobody
    granted = [(1, "3"), (0, "10"), (0, "2"), (1, "0"), (0, "7")]  # as Ray gives them
    assert sort_devices(granted) == {0: ["2", "7", "10"], 1: ["0", "3"]}
    assert sort_devices([(0, "GPU-b"), (0, "GPU-a")]) == {0: ["GPU-a", "GPU-b"]}


def test_teams_that_share_an_accelerator():
    placed = "cluster.component_placement={actor: 0-1, rollout: '0-1:0-3', env: 0}"
    cfg = load_config("toy_ppo_compact", [placed, "actor.micro_batch_size=16"], devices=[2])
    assert crowded_teams(make_plan(cfg, [2])) == {"sync"}  # rollouts beside the actors, in processes of their own
    placed = "cluster.component_placement={actor: 0-1, rollout: {node_group: node, placement: 0}, env: 0}"
    cfg = load_config("toy_ppo_compact", [placed, "actor.micro_batch_size=16"], devices=[2])
    assert crowded_teams(make_plan(cfg, [2])) == {"sync"}  # a rollout without an accelerator


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
            received.setdefault(id(x), (method, x, x._version))
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
