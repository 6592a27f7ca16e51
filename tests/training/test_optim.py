"""Learning-rate schedule, the value head's own group, and optimiser state that survives as named tensors."""

import pytest
import torch

from rlinf.config.schema import OptimConfig
from rlinf.models.policy import Policy
from rlinf.training.optim import load_optimizer_tensors, lr_scale, make_optimizer, optimizer_tensors


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
