"""Losses worked out by hand. N rows, C actions per chunk, A action dims."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlinf.algorithms.advantages import Targets
from rlinf.algorithms.config import AlgorithmConfig
from rlinf.algorithms.losses import VARIANCE, Batch, compute_loss
from rlinf.algorithms.registry import ADVANTAGES, LOSSES, Table
from rlinf.compat.formulas import published_loss
from rlinf.data.types import PolicyEval
from rlinf.errors import UserError

ACTOR = AlgorithmConfig(loss_type="actor", clip_ratio_low=0.2, clip_ratio_high=0.3)
CRITIC = AlgorithmConfig(loss_type="actor_critic", value_clip=0.2)


def run(
    cfg: AlgorithmConfig,
    ratios: list[float],
    advantages: list[float],
    *,
    values: list[list[float]] | None = None,
    mask: list[bool] | None = None,
    mask_sum: list[float] | None = None,
    entropy: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Rows of one action dim with the given probability ratios; `values` is (new, old, returns)."""
    logprobs = torch.tensor(ratios).log().view(-1, 1, 1).requires_grad_()
    new, old, returns = (None,) * 3 if values is None else (torch.tensor(v).view(-1, 1) for v in values)
    batch = Batch(
        new=PolicyEval(logprobs=logprobs, values=new, entropy=entropy),
        old_logprobs=torch.zeros(len(ratios), 1, 1),
        old_values=old,
        targets=Targets(
            advantages=torch.tensor(advantages).view(-1, 1),
            returns=returns,
            mask=None if mask is None else torch.tensor(mask).view(-1, 1),
            mask_sum=None if mask_sum is None else torch.tensor(mask_sum).view(-1, 1),
        ),
        max_episode_steps=kwargs.pop("max_episode_steps", 10),
        **kwargs,
    )
    total, metrics = compute_loss(batch, cfg)
    grad = torch.autograd.grad(total, logprobs)[0] if total.requires_grad else torch.zeros_like(logprobs)
    return total.detach(), {k: float(v) for k, (v, _) in metrics.items()}, grad.flatten()


def test_equal_policies_have_ratio_one_and_clip_nothing() -> None:
    total, m, grad = run(ACTOR, [1.0, 1.0], [2.0, -1.0])
    assert float(total) == -0.5
    assert (m["actor/ratio"], m["actor/clip_fraction"], m["actor/approx_kl"], m["actor/ratio_abs"]) == (1, 0, 0, 0)
    assert grad.tolist() == [-1.0, 0.5]  # towards what was better than expected


def test_clip_is_asymmetric() -> None:
    total, m, grad = run(ACTOR, [1.5, 0.5, 1.25, 0.5], [1.0, -1.0, 1.0, 1.0])
    # -1.3 (clipped), 0.8 (clipped), -1.25, -0.5 (a worse ratio is never clipped)
    assert float(total) == pytest.approx((-1.3 + 0.8 - 1.25 - 0.5) / 4, abs=1e-6)
    assert m["actor/clip_fraction"] == 0.5
    assert m["actor/clipped_ratio"] == pytest.approx((1.3 + 0.8 + 1.25 + 0.8) / 4, abs=1e-6)
    assert grad[:2].tolist() == [0.0, 0.0]


def test_dual_clip_only_when_asked_for() -> None:
    cfg = AlgorithmConfig(loss_type="actor", dual_clip=True, clip_ratio_c=3.0)
    assert float(run(ACTOR, [5.0, 1.0], [-2.0, -2.0])[0]) == pytest.approx(6.0)
    total, m, grad = run(cfg, [5.0, 1.0], [-2.0, -2.0])
    assert float(total) == pytest.approx(4.0)  # (min(10, 6) + 2) / 2
    assert m["actor/dual_cliped_ratio"] == 0.5
    assert float(grad[0]) == 0.0


def test_every_trajectory_weighs_the_same() -> None:
    # One trajectory of 2 steps with loss 1 each, one of 4 with loss 3 each, in 8 slots of 10 primitive steps.
    advantages = [-1.0] * 2 + [0.0] * 2 + [-3.0] * 4
    mask = [True] * 2 + [False] * 2 + [True] * 4
    total, m, grad = run(ACTOR, [1.0] * 8, advantages, mask=mask, mask_sum=[2.0] * 4 + [4.0] * 4)
    assert float(total) == pytest.approx((10 / 2 * 2 * 1 + 10 / 4 * 4 * 3) / 8)
    assert grad[2:4].tolist() == [0.0, 0.0]
    assert m["actor/ratio"] == 1.0


def test_masked_mean_counts_every_token() -> None:
    cfg = AlgorithmConfig(loss_type="actor", logprob_type="token_level", entropy_type="token_level", entropy_bonus=0.5)
    logprobs = torch.zeros(2, 3, 2, requires_grad=True)
    batch = Batch(
        new=PolicyEval(logprobs=logprobs, values=None, entropy=torch.full((2, 3, 2), 4.0)),
        old_logprobs=torch.zeros(2, 3, 2),
        old_values=None,
        targets=Targets(torch.tensor([[1.0], [7.0]]), None, torch.tensor([[True], [False]]), None),
        max_episode_steps=10,
    )
    total, metrics = compute_loss(batch, cfg)
    assert float(total.detach()) == -1.0 - 0.5 * 4.0
    assert metrics["actor/policy_loss"] == (-1.0, 6.0)
    assert metrics["actor/entropy_loss"] == (4.0, 6.0)


@pytest.mark.parametrize("actions", [1, 3])  # masks of chunks, of actions
@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("loss", [compute_loss, published_loss])
def test_the_entropy_of_a_chunk_is_the_same_at_every_level(loss: Any, level: str, actions: int) -> None:
    """A policy may have one entropy per chunk; it counts as often as the chunk has unmasked mask entries."""
    cfg = AlgorithmConfig(loss_type="actor", logprob_type="token_level", entropy_type=level, entropy_bonus=0.5)
    entropy = torch.tensor([4.0, 1.0, 100.0]).view(3, 1, 1).requires_grad_()
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3])[:, :actions]
    batch = Batch(
        new=PolicyEval(logprobs=torch.zeros(3, 3, 2), values=None, entropy=entropy),
        old_logprobs=torch.zeros(3, 3, 2),
        old_values=None,
        targets=Targets(torch.zeros(3, actions), None, mask, torch.full((3, actions), 5.0)),
        max_episode_steps=10,
    )
    total, metrics = loss(batch, cfg)
    mean = (4.0 + 1.0) / 2 if actions == 1 else (3 * 4.0 + 1.0) / 4
    assert metrics["actor/entropy_loss"][0] == mean
    assert float(total.detach()) == -0.5 * mean


def test_chunk_entropies_of_tokens_need_no_masks_of_chunks() -> None:
    cfg = AlgorithmConfig(loss_type="actor", logprob_type="token_level", entropy_type="chunk_level", entropy_bonus=1.0)
    batch = Batch(
        new=PolicyEval(logprobs=torch.zeros(2, 2, 3), values=None, entropy=torch.ones(2, 2, 3)),
        old_logprobs=torch.zeros(2, 2, 3),
        old_values=None,
        targets=Targets(torch.zeros(2, 2), None, torch.tensor([[True, True], [True, False]]), None),
        max_episode_steps=10,
    )
    assert float(compute_loss(batch, cfg)[0]) == -6.0


def test_micro_batches_average_to_the_batch() -> None:
    g = torch.Generator().manual_seed(0)
    ratios = (torch.rand(8, generator=g) + 0.5).tolist()
    advantages = torch.randn(8, generator=g).tolist()
    mask, n = [True, False] * 4, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    whole, m, _ = run(ACTOR, ratios, advantages, mask=mask, mask_sum=n)
    parts = [
        run(ACTOR, ratios[i : i + 2], advantages[i : i + 2], mask=mask[i : i + 2], mask_sum=n[i : i + 2])
        for i in range(0, 8, 2)
    ]
    assert float(whole) == pytest.approx(sum(float(p[0]) for p in parts) / 4, abs=1e-6)
    assert m["actor/ratio"] == pytest.approx(sum(p[1]["actor/ratio"] for p in parts) / 4, abs=1e-6)


def test_value_loss_takes_the_larger_of_plain_and_clipped() -> None:
    # row 0: V moved .5 towards R=1: clipped V is .2, (1-.2)^2/2 = .32 > .125; row 1: V moved .1: (0-.1)^2/2 = .005.
    total, m, _ = run(CRITIC, [1.0, 1.0], [0.0, 0.0], values=[[0.5, 0.1], [0.0, 0.0], [1.0, 0.0]])
    assert m["critic/value_loss"] == pytest.approx((0.32 + 0.005) / 2)
    assert float(total) == pytest.approx(m["critic/value_loss"])
    assert m["critic/value_clip_ratio"] == 0.5
    assert m["actor/total_loss"] == pytest.approx(m["critic/value_loss"])


def test_value_loss_is_linear_far_away() -> None:
    _, m, _ = run(CRITIC, [1.0], [0.0], values=[[0.0], [0.0], [30.0]])
    assert m["critic/value_loss"] == pytest.approx(10 * (30 - 5))


def test_variance_sums_give_the_explained_variance() -> None:
    returns, new = [1.0, 2.0, 4.0], [1.5, 2.0, 3.0]
    _, m, _ = run(CRITIC, [1.0] * 3, [0.0] * 3, values=[new, new, returns])
    sums = {k.removeprefix(VARIANCE): v for k, v in m.items() if k.startswith(VARIANCE)}
    assert sums == {"count": 3, "returns_sum": 7, "returns_sq_sum": 21, "errors_sum": 0.5, "errors_sq_sum": 1.25}


def test_critic_only_leaves_the_policy_alone() -> None:
    total, m, grad = run(CRITIC, [1.2], [1.0], values=[[0.0], [0.0], [2.0]], critic_only=True)
    assert float(total) == 2.0
    assert m["actor/policy_loss"] == 0.0
    assert m["actor/ratio"] == pytest.approx(1.2)
    assert grad.tolist() == [0.0]
    with pytest.raises(UserError, match="critic_warmup_steps needs a critic"):
        run(ACTOR, [1.0], [1.0], critic_only=True)


def test_a_batch_with_nothing_in_it_is_zero() -> None:
    total, m, grad = run(ACTOR, [math.inf, 1.0], [1.0, 1.0], mask=[False, False])
    assert float(total) == 0.0
    assert grad.tolist() == [0.0, 0.0]
    assert not any(math.isnan(v) for v in m.values())


def test_chunk_level_needs_chunk_rewards() -> None:
    batch = Batch(
        new=PolicyEval(logprobs=torch.zeros(1, 2, 1), values=None, entropy=None),
        old_logprobs=torch.zeros(1, 2, 1),
        old_values=None,
        targets=Targets(torch.zeros(1, 2), None, None, None),
        max_episode_steps=10,
    )
    with pytest.raises(UserError, match="reward_type action_level cannot go with logprob_type chunk_level"):
        compute_loss(batch, AlgorithmConfig(loss_type="actor", logprob_type="chunk_level"))


def test_unknown_names_say_what_exists() -> None:
    with pytest.raises(UserError, match=r"loss_type='actor_critc' is unknown \(did you mean 'actor_critic'\?\)"):
        LOSSES.find("actor_critc")
    assert ADVANTAGES.names() == ("gae", "grpo")


@pytest.mark.parametrize("table", [ADVANTAGES, LOSSES])
def test_every_name_has_its_function(table: Table) -> None:
    assert [table.find(name).__name__ for name in table.own] == list(table.own)
