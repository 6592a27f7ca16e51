"""Sharing a policy among ranks: what is sharded, what it costs between ranks, what the policy looks like meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.config.schema import FsdpConfig
from rlinf.errors import UserError
from rlinf.runtime.process_group import ProcessGroup, disconnect, group_of_one
from rlinf.training.optimizer_files import Rows, load_state, save_state
from rlinf.training.parallel import Replicated, SingleRank, make_parallel, sum_gradients
from rlinf.training.sharding import Sharded, choose_sharded
from rlinf.workers.actor import MicroBatch
from tests.actor_jobs import CPU, Case, make_worker
from tests.inside import still_joined

PI0 = Case("openpi")
NO_SHARD = FsdpConfig(strategy="no_shard")


@pytest.fixture(scope="module")
def one() -> Iterator[ProcessGroup]:
    """A group of one with a torch handle."""
    yield group_of_one(CPU)
    disconnect()


# --------------------------------------------------------------------------- gradients
def summed(group: ProcessGroup) -> list[Any]:
    """Gradients of four tensors: on both ranks, on rank 0, on rank 1, on none; two tensors travel at a time."""
    tensors = [torch.zeros(2, 2) for _ in range(4)]
    for i, tensor in enumerate(tensors):
        if i == 0 or i == group.rank + 1:
            tensor.grad = torch.full((2, 2), 1.0 + group.rank)
    sum_gradients(tensors, group, bucket_size=8)
    return [None if t.grad is None else t.grad.flatten().tolist() for t in tensors]


def test_gradients_are_summed_and_absent_ones_stay_absent(ranks):
    assert ranks.run(2, summed) == [[[3.0] * 4, [1.0] * 4, [2.0] * 4, None]] * 2


class Collectives(TorchDispatchMode):
    """Counts what travels between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kinds = [kind for kind in ("gather", "reduce_scatter", "allreduce") if kind in func.name()]
            self.counts[kinds[0]] += 1
        return func(*args, **(kwargs or {}))


def collectives(group: ProcessGroup, case: Case) -> list[dict[str, int]]:
    """What travels in the forward and backward pass of a micro batch that is not the last, and of the last."""
    worker, micro = make_worker(group, case), MicroBatch(torch.arange(6), weight=1.0, cached=False)
    counts = []
    with worker.parallel.training(0):
        for last in (False, True):
            with Collectives() as seen:
                fetched = worker._fetch(micro)
                loss, _ = worker.loss(micro, fetched and fetched(), critic_only=False, measure_gap=False)
                worker.parallel.backward(loss, last=last)
            counts.append(dict(seen.counts))
    return counts


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"strategy": "no_shard"}, [{}, {"allreduce": 2}]),  # which gradients there are, then the gradients
        (
            {"sharding_strategy": "full_shard"},  # five blocks and the rest, which stays for the backward pass
            [{"gather": 11}, {"gather": 11, "reduce_scatter": 6, "allreduce": 2}],
        ),
        ({"sharding_strategy": "shard_grad_op"}, [{"gather": 6}, {"reduce_scatter": 6, "allreduce": 2}]),
        (
            {"enable_gradient_accumulation": False},
            [{"gather": 11, "reduce_scatter": 6}, {"gather": 11, "reduce_scatter": 6, "allreduce": 2}],
        ),
    ],
    ids=str,
)
def test_nothing_travels_that_need_not(ranks, keys, want):
    assert ranks.run(2, collectives, replace(PI0, fsdp=FsdpConfig(**keys))) == [want] * 2


# --------------------------------------------------------------------------- what is chosen
def test_one_rank_trains_by_itself():
    policy, actor = make_worker(ProcessGroup(), PI0).policy, PI0.config().actor
    assert type(make_parallel(policy, actor, ProcessGroup())) is SingleRank


def test_the_keys_choose(one):
    assert type(make_worker(one, replace(PI0, fsdp=NO_SHARD)).parallel) is Replicated
    assert type(make_worker(one, replace(PI0, fsdp=FsdpConfig(sharding_strategy="no_shard"))).parallel) is Replicated
    for strategy in ("fsdp", "fsdp2"):
        assert type(make_worker(one, replace(PI0, fsdp=FsdpConfig(strategy=strategy))).parallel) is Sharded


def test_ranks_that_share_an_accelerator_cannot_shard(one):
    elsewhere = replace(one, device=torch.device("meta"))
    with pytest.raises(UserError, match="strategy=fsdp2: ranks that share an accelerator cannot shard"):
        make_worker(elsewhere, PI0)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, learns: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=learns)


def test_a_unit_shards_matrices_of_one_learning_dtype():
    low, norm, small = parameter(4, 8, dtype=torch.bfloat16), parameter(8), parameter(2, 2)
    frozen, narrow = parameter(4, 4, dtype=torch.bfloat16, learns=False), parameter(1, 64, dtype=torch.bfloat16)
    assert choose_sharded([low, norm, small, frozen, narrow], ranks=2) == ({low, frozen}, torch.bfloat16)


def test_adapters_are_sharded_beside_their_frozen_base():
    base, adapter = parameter(8, 8, dtype=torch.bfloat16, learns=False), parameter(4, 8)
    assert choose_sharded([base, adapter], ranks=2) == ({base, adapter}, None)
    assert choose_sharded([base], ranks=2) == ({base}, None)


@pytest.mark.parametrize(
    ("model", "example"), [("openpi", 0), ("openpi", 1), ("openpi", 4), ("openvla", 0), ("openvla_oft", 2)]
)
def test_every_parameter_is_held_once(one, model, example):
    """All matrices are in a unit, and the rest is the policy's own."""
    worker = make_worker(one, Case(model, example))
    sharded = worker.parallel
    assert isinstance(sharded, Sharded)
    placed = [name for unit in sharded.units for name in unit.names]
    names = {name for name, p in worker.policy.named_parameters() if p.ndim > 1}
    assert sorted(placed) == sorted(names)
    skeleton = dict(sharded.network.policy.named_parameters())
    assert all(skeleton[n] is p for n, p in worker.policy.named_parameters() if n not in names)
    assert len(sharded.units) > 4  # block by block


# --------------------------------------------------------------------------- the policy meanwhile
def test_the_policy_gives_its_memory_back_while_it_is_trained(one):
    worker = make_worker(one, PI0)
    sharded, policy = worker.parallel, worker.policy
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with sharded.training(0):
        held = sum(p.nbytes for name, p in policy.named_parameters() if p.untyped_storage().nbytes())
        assert held == sum(p.nbytes for p in policy.parameters() if p.ndim == 1)
        for local in sharded.shard_tensors:
            local.add_(1.0)
    for name, p in policy.named_parameters():
        assert torch.equal(p, before[name] + (1.0 if p.ndim > 1 else 0.0))
    assert still_joined(policy)
    assert all(still_joined(policy))


def test_scoring_without_gradients_sees_the_newest_weights(one):
    """An update may score its experience before its first step, and again in the next one."""
    worker = make_worker(one, PI0)
    sharded, traj = worker.parallel, worker.trajectory
    rows = {key: value[0] for key, value in traj.replay.items()}

    def score() -> torch.Tensor:
        with torch.no_grad():
            return sharded.evaluate(rows, values=False, entropy=False, cache=None).logprobs

    with sharded.training(0):
        first = score()
        for local in sharded.shard_tensors:
            local.mul_(1.1)
        second = score()
    assert (first - traj.logprobs[0]).abs().max() <= 2e-5
    with torch.no_grad():
        want = worker.policy.evaluate(rows, values=False, entropy=False).logprobs
    assert (second - want).abs().max() <= 2e-5
    assert (second - first).abs().max() > 1e-3


# --------------------------------------------------------------------------- the optimiser's state on disk
def parts(folder: Path) -> dict[str, torch.Tensor]:
    """A tensor of five rows in parts of two, two and one; one that every rank holds; numbers."""
    whole = {"w/exp_avg": torch.arange(10.0).view(5, 2), "b/exp_avg": torch.arange(3.0), "w/step": torch.tensor(7.0)}
    for rank in range(3):
        rows = Rows(2 * rank, min(2 * rank + 2, 5), 5)
        own = whole | {"w/exp_avg": whole["w/exp_avg"][rows.first : rows.end].clone(), "@steps": torch.tensor(3)}
        save_state(folder, own, {"w": rows}, part=rank, parts=3)
    return whole | {"@steps": torch.tensor(3)}


@pytest.mark.parametrize(("first", "end"), [(0, 5), (0, 3), (1, 4), (4, 5), (3, 5)])
def test_rows_are_put_together_again(tmp_path, first, end):
    whole = parts(tmp_path)
    got = load_state(tmp_path, {"w": Rows(first, end, 5)})
    assert got.keys() == whole.keys()
    assert torch.equal(got["w/exp_avg"], whole["w/exp_avg"][first:end])
    assert all(torch.equal(got[key], whole[key]) for key in whole if key != "w/exp_avg")


def test_a_rank_without_rows_reads_none(tmp_path):
    parts(tmp_path)
    assert load_state(tmp_path, {"w": Rows(5, 5, 5)}).keys() == {"b/exp_avg", "@steps"}


def test_a_lost_part_is_named(tmp_path):
    parts(tmp_path)
    (tmp_path / "optimizer-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks optimizer-00002-of-00003\.safetensors; the copy is incomplete"):
        load_state(tmp_path, {})


def test_rows_of_another_parameter_are_refused(tmp_path):
    parts(tmp_path)
    with pytest.raises(UserError, match="w/exp_avg has 5 rows, the parameter 6"):
        load_state(tmp_path, {"w": Rows(0, 3, 6)})


def test_no_state_at_all_is_said(tmp_path):
    with pytest.raises(UserError, match=r"holds no optimiser state: expected optimizer\.safetensors"):
        load_state(tmp_path, {})
