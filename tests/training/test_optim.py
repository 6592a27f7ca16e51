"""Learning-rate schedule, the value head's own group, and optimiser state that survives as named tensors."""

import pytest
import torch

from rlinf.config.schema import OptimConfig
from rlinf.models.policy import Policy
from rlinf.training import optim
from rlinf.training.optim import (
    MASTER,
    MasterAdamW,
    load_optimizer_tensors,
    lr_scale,
    make_optimizer,
    optimizer_tensors,
)


class TwoHeads(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 3)
        self.value_head = torch.nn.Linear(3, 1)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)


def step(policy, optimizer):
    optimizer.zero_grad()
    x = torch.ones(2, 3)
    (policy.body(x).sum() + policy.value_head(x).sum()).backward()
    optimizer.step()


def test_groups_hold_only_what_trains():
    optimizer = make_optimizer(TwoHeads(), OptimConfig(lr=1e-3, value_lr=1e-2))
    assert [g["names"] for g in optimizer.param_groups] == [
        ["body.weight", "body.bias"],
        ["value_head.weight", "value_head.bias"],
    ]
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 1e-2]


def test_state_round_trip_continues_bit_equal():
    torch.manual_seed(0)
    one, two = TwoHeads(), TwoHeads()
    first, second = (make_optimizer(p, OptimConfig(lr=1e-3)) for p in (one, two))
    step(one, first)
    two.load_state_dict(one.state_dict())
    load_optimizer_tensors(second, optimizer_tensors(first))
    step(one, first)
    step(two, second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_foreign_state_is_refused():
    optimizer = make_optimizer(TwoHeads(), OptimConfig())
    with pytest.raises(ValueError, match=r"trained nose\.weight"):
        load_optimizer_tensors(optimizer, {"nose.weight/exp_avg": torch.zeros(1)})


class HalfPrecision(Policy):
    """A bf16 weight that starts at one, and an fp32 value head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.value_head = torch.nn.Parameter(torch.ones(3))


def climb(policy: HalfPrecision, optimizer: MasterAdamW, steps: int) -> None:
    """A constant gradient of 1 on every number, in two micro batches."""
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            (0.5 * (policy.body.float().sum() + policy.value_head.sum())).backward()
        optimizer.step()


def test_small_steps_add_up_in_bf16():
    policy = HalfPrecision()
    optimizer = make_optimizer(policy, OptimConfig(lr=1e-5, value_lr=1e-5, weight_decay=0.0))
    climb(policy, optimizer, 100)
    (parameter, master) = optimizer.pairs[0]
    assert parameter is policy.body
    torch.testing.assert_close(master, torch.full((3,), 1 - 1e-3), rtol=0, atol=2e-6)
    assert torch.equal(master, policy.value_head.detach())  # as an fp32 parameter moves
    assert torch.equal(policy.body.detach(), master.bfloat16())
    climb(policy, optimizer, 200)
    assert policy.body.detach().tolist() == [0.99609375] * 3  # bf16's neighbour of 1 below 0.998
    plain = torch.optim.AdamW([naive := HalfPrecision().body], lr=1e-5, weight_decay=0.0)
    for _ in range(300):
        naive.grad = torch.ones_like(naive)
        plain.step()
    assert naive.tolist() == [1.0] * 3  # what the copies are for


def test_fp32_copies_survive_a_checkpoint():
    one, two = HalfPrecision(), HalfPrecision()
    options = OptimConfig(lr=1e-4, value_lr=1e-4)
    first, second = (make_optimizer(p, options) for p in (one, two))
    climb(one, first, 7)
    tensors = optimizer_tensors(first)
    assert tensors[f"body/{MASTER}"].dtype == torch.float32
    assert f"value_head/{MASTER}" not in tensors
    two.load_state_dict(one.state_dict())
    load_optimizer_tensors(second, tensors)
    for policy, optimizer in ((one, first), (two, second)):
        climb(policy, optimizer, 40)
    assert torch.equal(first.pairs[0][1], second.pairs[0][1])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_copies_follow_weights_that_were_loaded_without_them():
    policy = HalfPrecision()
    optimizer = make_optimizer(policy, OptimConfig())
    with torch.no_grad():
        policy.body.fill_(3.0)
    load_optimizer_tensors(optimizer, {})
    assert optimizer.pairs[0][1].tolist() == [3.0] * 3


def test_gradients_are_clipped_in_fp32():
    policy = HalfPrecision()
    optimizer = make_optimizer(policy, OptimConfig())
    (1e-3 * policy.body.float().sum()).backward()
    assert policy.body.grad is None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(params, 1e-4)
    assert float(norm) == pytest.approx(3**0.5 * 1e-3, rel=4e-3)  # the gradient itself was rounded once
    assert float(params[0].grad.norm()) == pytest.approx(1e-4, rel=2e-3)


@pytest.mark.parametrize("at_once", [1, 1 << 26])
def test_gradients_of_a_pass_are_moved_together_and_add_up_in_fp32(at_once, monkeypatch):
    """However many are moved at once; a pass that failed leaves nothing behind."""
    monkeypatch.setattr(optim, "MOVED_AT_ONCE", at_once)
    layers = [torch.nn.Linear(4, 4).bfloat16() for _ in range(3)]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = MasterAdamW([{"params": parameters, "names": [str(i) for i in range(len(parameters))]}])
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()

    def loss(scale: float) -> torch.Tensor:
        return scale * layers[2](torch.tanh(layers[1](torch.tanh(layers[0](x))))).float().sum()

    twins = [p.detach().clone() for p in parameters]
    want = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    optimizer.zero_grad()
    for scale in (1.0, 0.37, 2.1):
        for total, part in zip(want, torch.autograd.grad(loss(scale), parameters), strict=True):
            total += part.float()
        loss(scale).backward()
        assert all(p.grad is None for p in parameters)
    masters = optimizer.param_groups[0]["params"]
    assert all(torch.equal(master.grad, total) for master, total in zip(masters, want, strict=True))
    hook = layers[0].weight.register_hook(lambda grad: 1 / 0)
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError):
        loss(1.0).backward()
    hook.remove()
    optimizer.zero_grad()
    loss(1.0).backward()
    for master, part in zip(masters, torch.autograd.grad(loss(1.0), parameters), strict=True):
        assert torch.equal(master.grad, part.float())
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(parameters, twins, strict=True))
    assert all(torch.equal(p, master.bfloat16()) for p, master in optimizer.pairs)


def test_state_of_another_shape_is_refused():
    optimizer = make_optimizer(TwoHeads(), OptimConfig())
    with pytest.raises(ValueError, match=r"body\.weight/exp_avg of shape \[2\], the parameter is \[3, 3\]"):
        load_optimizer_tensors(optimizer, {"body.weight/exp_avg": torch.zeros(2)})


@pytest.mark.parametrize(
    ("options", "step", "want"),
    [
        ({}, 7, 1.0),
        ({"lr_warmup_steps": 4}, 0, 0.25),
        ({"lr_warmup_steps": 4}, 4, 1.0),
        ({"lr_scheduler": "cosine"}, 0, 1.0),
        ({"lr_scheduler": "cosine"}, 50, 0.5),
        ({"lr_scheduler": "cosine"}, 100, 0.0),
        ({"lr_scheduler": "cosine", "min_lr_rate": 0.1}, 100, 0.1),
        ({"lr_scheduler": "cosine", "total_training_steps": 200}, 100, 0.5),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": -1}, 0, 1.0),
    ],
)
def test_schedule(options, step, want):
    assert lr_scale(OptimConfig(**options), step, total_steps=100) == pytest.approx(want)
