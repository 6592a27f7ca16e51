"""Offload: memory is given back and returns bit for bit; views, joined projections and optimisers notice nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import OptimConfig
from rlinf.metrics.names import expand
from rlinf.models.policy import Policy, find_policy
from rlinf.runtime.process_group import ProcessGroup
from rlinf.runtime.worker import Process
from rlinf.training import offload
from rlinf.training.offload import ActorMemory, HostBuffer
from rlinf.training.parallel import SingleRank
from rlinf.workers.rollout import RolloutWorker
from tests.inside import joined_weights, still_joined, worker
from tests.runs import make_runner, toy_config

CPU = torch.device("cpu")


class Mixed(Policy):
    """A bf16 layer with an fp32 copy in the optimiser, an fp32 value head, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Linear(4, 4).to(torch.bfloat16)
            self.value_head = nn.Linear(4, 1)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)


def step(policy: Mixed, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    x = torch.arange(8.0).view(2, 4)
    hidden = policy.body(x.to(torch.bfloat16)).float() + policy.frozen(x)
    policy.value_head(hidden).square().mean().backward()
    optimizer.step()


def bits(tensors) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_offloaded_tensor_has_no_memory_and_comes_back_with_its_views(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1000)  # tensors lie across several
    base = torch.arange(600.0)
    view, other = base[200:], torch.randn(7).to(torch.bfloat16)
    parameter = nn.Parameter(base[:200])
    want = bits([base, view, other])
    buffer = HostBuffer(CPU)
    assert buffer.offload([parameter, view, other, torch.empty(0)]) == 600 * 4 + 7 * 2
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert buffer.offload([other]) == 0  # all of it is away already
    assert buffer.restore() == 600 * 4 + 7 * 2
    assert same([base, view, other], want)
    base[0] = -1
    assert parameter[0] == -1
    assert buffer.restore() == 0


def test_host_memory_is_allocated_once(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1000)
    buffer, x = HostBuffer(CPU), torch.arange(600.0)
    buffer.offload([x])
    buffer.restore()
    first = [chunk.data_ptr() for chunk in buffer.chunks]
    assert [len(chunk) for chunk in buffer.chunks] == [1000, 1000, 400]
    buffer.offload([x])
    buffer.restore()
    assert [chunk.data_ptr() for chunk in buffer.chunks] == first
    buffer.offload([x, torch.zeros(1000, dtype=torch.uint8)])
    buffer.restore()
    assert [len(chunk) for chunk in buffer.chunks] == [1000, 1000, 1000, 400]


def test_joined_projections_stay_joined():
    cfg = load_config("toy_ppo_compact").actor.model
    policy = find_policy("openpi").build(cfg, CPU, seed=0)
    assert joined_weights(policy)
    want, size = bits(policy.parameters()), sum(p.nbytes for p in policy.parameters())
    buffer = HostBuffer(CPU)
    assert buffer.offload(policy.parameters()) == size  # each joined weight once
    taken = [torch.ones(50_000) for _ in range(20)]  # so that weights come back to other places
    buffer.restore()
    assert same(policy.parameters(), want)
    with torch.no_grad():
        assert all(still_joined(policy))
        for weight, first in joined_weights(policy):
            first.add_(1)
            assert torch.equal(weight[: len(first)], first)
    assert len(taken) == 20


@pytest.mark.parametrize("owns_weights", [False, True], ids=["shared weights", "own weights"])
def test_an_optimiser_that_was_away_continues_bit_equal(owns_weights):
    policies = Mixed(), Mixed()
    cfg = replace(load_config("toy_ppo_compact").actor, optim=OptimConfig(lr=1e-2, value_lr=1e-2))
    parallels = [SingleRank(policy, cfg, ProcessGroup()) for policy in policies]
    optimizers = [parallel.optimizer for parallel in parallels]
    memory = ActorMemory(parallels[1], CPU, owns_weights=owns_weights)
    for _ in range(3):
        for policy, optimizer in zip(policies, optimizers, strict=True):
            step(policy, optimizer)
        out = memory.offload()
        assert (policies[1].frozen.weight.untyped_storage().nbytes() == 0) == owns_weights
        assert all(s.untyped_storage().nbytes() == 0 for m in optimizers[1].state.values() for s in m.values())
        assert all(p.grad is None for p in policies[1].parameters())
        with memory.weights():
            assert same(policies[0].parameters(), policies[1].parameters())
        back = memory.onload()
    trained, heads, frozen = 20, 5, 20  # numbers: bf16 with fp32 copies, fp32, fp32
    state = 2 * 4 * (trained + heads) + 4 * 4 + 4 * trained  # moments, step counters, fp32 copies
    weights = (2 * trained + 4 * heads + 4 * frozen) * owns_weights
    assert out == state + weights
    assert back == state + 3 * weights  # to the block above and back, then home
    assert same(policies[0].parameters(), policies[1].parameters())


def test_only_a_copy_of_the_owns_weightss_with_the_rollout():
    cfg = load_config("toy_ppo_compact", ["cluster.component_placement={actor: 0, 'env,rollout': 1}"], devices=[2])
    apart = make_plan(cfg, [2])
    for plan, moves in ((apart, True), (replace(apart, rollout=apart.actor), False)):
        rollout = RolloutWorker(cfg, plan, 0, Process(CPU))
        rollout.setup()
        want, size = bits(rollout.policy.parameters()), sum(p.nbytes for p in rollout.policy.parameters())
        assert rollout.offload() == rollout.onload() == size * moves
        assert same(rollout.policy.parameters(), want)


def test_a_run_with_offload_is_the_run_without(tmp_path):
    seen = []
    for wanted in (False, True):
        keys = [f"{role}.enable_offload={wanted}" for role in ("env", "rollout", "actor")]
        cfg = toy_config(tmp_path / str(wanted), "runner.max_epochs=2", "env.train.rollout_epoch=1", *keys)
        runner = make_runner(cfg)
        try:
            metrics = [runner.step(0)]
            runner.save()
            metrics.append(runner.step(1))
            actor = worker(runner, "actor")
            policy, state = actor.policy, actor.optimizer.state.values()
            assert all(p.untyped_storage().nbytes() > 0 for p in policy.parameters())  # rollouts read them
            size = sum(x.nbytes for tensors in state for x in tensors.values())
            seen.append((metrics, bits(policy.parameters()), runner.times, size))
        finally:
            runner.close()
    (plain, weights, times, state), (offloaded, same_weights, more_times, _) = seen
    assert same(weights, same_weights)
    assert "offload" in more_times
    assert "offload" not in times
    sizes = [metrics.pop("offload/bytes") for metrics in (*plain, *offloaded)]
    assert sizes == [0, 0, state, 4 * state]  # made in the first step; brought back to save, then to go on
    assert plain == offloaded
    assert plain[0]["sync/bytes"] == 0
    expand(plain[0])  # every name is documented
