"""Reductions with values known by hand."""

import math
import pickle

import pytest
import torch

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.algorithms.losses import Batch, compute_loss
from rlinf.data.types import PolicyEval
from rlinf.metrics.names import find_metric
from rlinf.metrics.reduce import VARIANCE_SUMS, Accumulator, explained_variance


def test_means_are_weighted() -> None:
    metrics = Accumulator()
    metrics.add("a", 1.0, 1)
    metrics.add("a", 5.0, 3)
    metrics.add("a", math.nan, 0)  # no entries behind it
    assert metrics.result() == {"a": 4.0}


def test_merging_ranks_equals_adding_in_one_place() -> None:
    left, right = Accumulator(), Accumulator()
    for rank, offset in ((left, 0.0), (right, 10.0)):
        rank.add("mean", offset + 1.0, 2.0 + offset)
        rank.add_sum("sum", offset + 3.0)
        rank.add_max("slowest", offset + 4.0)
    left.merge(pickle.loads(pickle.dumps(right)))
    assert left.result() == {"mean": (2 * 1 + 12 * 11) / 14, "slowest": 14.0, "sum": 16.0}


@pytest.mark.parametrize("order", [(1.0, math.nan, 2.0), (math.nan, 1.0, 2.0), (1.0, 2.0, math.nan)])
def test_a_nan_is_not_hidden_by_max(order: tuple[float, ...]) -> None:
    metrics = Accumulator()
    for value in order:
        metrics.add_max("max", value)
    assert all(math.isnan(value) for value in metrics.result().values())


def test_a_metric_has_one_reduction() -> None:
    metrics = Accumulator()
    metrics.add("a", 1.0)
    with pytest.raises(ValueError, match="'a' was added as mean and as sum"):
        metrics.add_sum("a", 1.0)


def test_explained_variance_is_exact_over_unequal_batches() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    values = torch.tensor([0.5, 1.0, 1.0, 5.0, 6.0], dtype=torch.float64)
    metrics = Accumulator()
    for rows in (slice(0, 1), slice(1, 5)):
        r, e = returns[rows], returns[rows] - values[rows]
        sums = (len(r), r.sum(), r.square().sum(), e.sum(), e.square().sum())
        metrics.add_many({f"critic/variance/{n}": (s, 1.0) for n, s in zip(VARIANCE_SUMS, sums, strict=True)})
    expected = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics.result() == {"critic/explained_variance": pytest.approx(float(expected), abs=1e-12)}


def test_explained_variance_of_equal_returns_is_undefined() -> None:
    assert math.isnan(explained_variance(2, 2.0, 2.0, 1.0, 1.0))
    assert math.isnan(explained_variance(0, 0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize("loss_type", ["actor", "actor_critic", "decoupled_actor_critic"])
def test_every_metric_of_the_losses_is_documented(loss_type: str) -> None:
    from rlinf.algorithms.advantages import Targets

    new = PolicyEval(logprobs=torch.zeros(4, 2, 3), values=torch.ones(4, 1), entropy=torch.ones(4, 2, 3))
    targets = Targets(advantages=torch.randn(4, 1), returns=torch.arange(4.0)[:, None], mask=None, mask_sum=None)
    cfg = AlgorithmConfig(loss_type=loss_type, entropy_bonus=0.1)
    batch = Batch(
        new=new,
        old_logprobs=torch.zeros(4, 2, 3),
        old_values=torch.zeros(4, 1),
        targets=targets,
        max_episode_steps=None,
    )
    _, values = compute_loss(batch, cfg)
    metrics = Accumulator()
    metrics.add_many(values)
    result = metrics.result()
    assert [find_metric(f"train/{name}").name for name in result] == [f"train/{name}" for name in result]
    if loss_type == "actor_critic":  # constant values explain nothing
        assert result["critic/explained_variance"] == pytest.approx(0.0, abs=1e-12)
