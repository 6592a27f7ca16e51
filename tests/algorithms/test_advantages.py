"""Advantages worked out by hand. T chunks, B envs, C actions per chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlinf.algorithms.advantages import Steps, Targets, compute_targets, gae, grpo, normalize
from rlinf.algorithms.config import AlgorithmConfig
from rlinf.compat.formulas import published_targets
from rlinf.data.types import Trajectory
from rlinf.errors import UserError

HALF = AlgorithmConfig(gamma=0.5, gae_lambda=0.5, normalize_advantages=False)


def trajectory(rewards: Any, values: Any = None, **changes: Any) -> Trajectory:
    """A trajectory [T, B, C] where nothing ends, unless `changes` say so."""
    r = torch.tensor(rewards, dtype=torch.float32)
    off = torch.zeros_like(r, dtype=torch.bool)
    fields: dict[str, Any] = {
        "terminated": off,
        "truncated": off,
        "valid": ~off,
        "lost": off[..., 0],
        "final_values": None,
    }
    fields |= {k: torch.tensor(v) for k, v in changes.items()}
    return Trajectory(
        rewards=r,
        logprobs=torch.zeros(*r.shape, 2),
        values=None if values is None else torch.tensor(values, dtype=torch.float32),
        replay={},
        **fields,
    )


def targets(
    traj: Trajectory, cfg: AlgorithmConfig, *, compute: Any = compute_targets, **kwargs: Any
) -> tuple[Targets, dict[str, torch.Tensor]]:
    return compute(traj, cfg, **{"auto_reset": False, "ignore_terminations": False, **kwargs})


def column(x: torch.Tensor | None, env: int = 0) -> list[float]:
    assert x is not None
    return x[:, env].flatten().tolist()


def test_gae_of_three_steps() -> None:
    # deltas: 1 + .5*4 - 2 = 1; 0 + .5*6 - 4 = -1; 2 + .5*8 - 6 = 0. A2 = 0; A1 = -1; A0 = 1 + .25*-1 = .75.
    steps = Steps(
        rewards=torch.tensor([[1.0], [0.0], [2.0]]),
        dones=torch.zeros(4, 1, dtype=torch.bool),
        values=torch.tensor([[2.0], [4.0], [6.0], [8.0]]),
        mask=None,
        alive=torch.ones(1, dtype=torch.bool),
    )
    advantages, returns = gae(steps, HALF)
    assert advantages.flatten().tolist() == [0.75, -1.0, 0.0]
    assert returns.flatten().tolist() == [2.75, 3.0, 6.0]


def test_gae_stops_at_an_end() -> None:
    ended = [[[False]], [[True]], [[False]]]
    out, _ = targets(trajectory([[[1]], [[0]], [[2]]], [[[2]], [[4]], [[6]], [[8]]], terminated=ended), HALF)
    # delta1 = 0 - 4 = -4 without what follows; A0 = 1 + .25*-4 = 0.
    assert column(out.advantages)[:2] == [0.0, -4.0]
    assert column(out.mask) == [True, True, False]
    assert column(out.mask_sum) == [2.0, 2.0, 2.0]


def test_chunk_level_sums_the_chunk_and_counts_primitive_steps() -> None:
    ended = [[[False, False]], [[True, False]]]
    out, metrics = targets(trajectory([[[1, 2]], [[3, 0]]], [[[0]], [[0]], [[9]]], terminated=ended), HALF)
    assert column(out.advantages) == [3.0 + 0.25 * 3.0, 3.0]
    assert out.mask is not None
    assert out.mask.shape == (2, 1, 1)
    assert column(out.mask_sum) == [3.0, 3.0]
    assert float(metrics["rewards"]) == 3.0
    assert float(metrics["valid_fraction"]) == 1.0


def test_action_level_runs_through_the_chunks() -> None:
    cfg = AlgorithmConfig(gamma=1.0, gae_lambda=1.0, normalize_advantages=False, reward_type="action_level")
    values = [[[0.0, 0.0]], [[0.0, 0.0]], [[8.0, 99.0]]]  # only the first value after the rollout is its continuation
    out, _ = targets(trajectory([[[1, 2]], [[3, 4]]], values), cfg)
    assert column(out.advantages) == [18.0, 17.0, 15.0, 12.0]


def test_levels_of_rewards_and_values_must_agree() -> None:
    with pytest.raises(UserError, match=r"actor\.model\.value_type gives 2 values .* chunk_level has 1 rewards"):
        targets(trajectory([[[1, 2]]], [[[0, 0]], [[0, 0]]]), HALF)


def test_normalised_over_all_ranks() -> None:
    other = torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)  # another rank's count, sum, sum of squares: {3}
    x = torch.tensor([[1.0], [2.0], [50.0]])
    mask = torch.tensor([[True], [True], [False]])
    got = normalize(x, mask, lambda moments: moments + other)
    assert torch.allclose(got[:2, 0], torch.tensor([-1.0, 0.0]), atol=2e-5)  # mean 2, std 1
    alone = normalize(x[:2], None)
    assert torch.allclose(alone[:, 0], torch.tensor([-1.0, 1.0]) / 2**0.5, atol=2e-5)


def test_compat_normalises_per_rank() -> None:
    traj = trajectory([[[1], [2]], [[3], [4]]], [[[0], [0]]] * 3)
    cfg = AlgorithmConfig()
    alone, _ = targets(traj, cfg)
    shifted = lambda x: x + (x.new_tensor([2.0, 20.0, 200.0]) if x.numel() == 3 else 0)  # noqa: E731
    assert not torch.equal(targets(traj, cfg, all_reduce=shifted)[0].advantages, alone.advantages)
    assert torch.equal(
        targets(traj, cfg, all_reduce=shifted, compute=published_targets)[0].advantages, alone.advantages
    )


def test_truncation_bootstraps_only_with_auto_reset() -> None:
    cut = [[[False, True]]]
    traj = trajectory([[[0, 1]]], [[[0]], [[100]]], truncated=cut, final_values=[[[4.0]]])
    out, _ = targets(traj, HALF, auto_reset=True)
    assert column(out.advantages) == [1.0 + 0.5 * 4.0]
    assert out.mask is None
    assert out.mask_sum is None
    out, _ = targets(traj, HALF)
    assert column(out.advantages) == [1.0]


def test_success_bootstraps_only_with_always() -> None:
    traj = trajectory(
        [[[0, 1]]],
        [[[0]], [[100]]],
        terminated=[[[False, True]]],
        truncated=[[[False, True]]],
        final_values=[[[4.0]]],
    )
    always = AlgorithmConfig(gamma=0.5, gae_lambda=0.5, normalize_advantages=False, bootstrap_type="always")
    assert column(targets(traj, HALF, auto_reset=True)[0].advantages) == [1.0]
    assert column(targets(traj, HALF, auto_reset=True, compute=published_targets)[0].advantages) == [3.0]
    assert column(targets(traj, always, auto_reset=True)[0].advantages) == [3.0]
    assert column(targets(traj, HALF, auto_reset=True, ignore_terminations=True)[0].advantages) == [3.0]


def test_grpo_compares_members_of_a_group() -> None:
    cfg = AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2)
    ended = [[[True], [False], [False], [False]], [[False]] * 4]
    traj = trajectory([[[3], [1], [2], [2]], [[9], [0], [0], [0]]], terminated=ended)
    out, _ = targets(traj, cfg)
    # scores 3 (the 9 came after the end) and 1: mean 2, unbiased std sqrt(2); then 2 and 2: nothing to learn.
    a = 1 / (2**0.5 + 1e-6)
    want = torch.tensor([[a, -a, 0.0, 0.0], [0.0, -a, 0.0, 0.0]])
    assert torch.allclose(out.advantages[..., 0], want, atol=1e-6)
    assert out.returns is None


def test_grpo_ignores_a_member_whose_simulator_died() -> None:
    cfg = AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=3)
    steps = Steps(
        rewards=torch.tensor([[0.0, 1.0, 70.0]]),
        dones=torch.zeros(2, 3, dtype=torch.bool),
        values=None,
        mask=None,
        alive=torch.tensor([True, True, False]),
    )
    advantages, _ = grpo(steps, cfg)
    a = 0.5 / (0.5**0.5 + 1e-6)
    assert torch.allclose(advantages, torch.tensor([[-a, a, 0.0]]), atol=1e-6)
    # Its column begins another episode, from another start, after the loss: no part of the comparison either.
    lost, valid = (
        [[False] * 3, [False, False, True], [False] * 3],
        [[[True]] * 3, [[True], [True], [False]], [[True]] * 3],
    )
    out, _ = targets(trajectory([[[0], [1], [30]], [[0]] * 3, [[0], [0], [40]]], lost=lost, valid=valid), cfg)
    assert torch.allclose(out.advantages[..., 0], advantages[0].expand(3, 3), atol=1e-6)


def test_lost_episodes_do_not_count_and_do_not_leak() -> None:
    valid = [[[True], [True]], [[False], [True]], [[True], [True]]]
    lost = [[False, False], [True, False], [False, False]]
    rewards, values = [[[1], [1]], [[50], [1]], [[2], [1]]], [[[0], [0]]] * 4
    out, _ = targets(trajectory(rewards, values, valid=valid, lost=lost), HALF, auto_reset=True)
    assert column(out.mask) == [False, False, True]
    assert column(out.advantages)[2] == 2.0
    assert column(out.mask, 1) == [True, True, True]
    # Statistics are over what counts: rewards 2, 1, 1, 1.
    _, metrics = targets(trajectory(rewards, values, valid=valid, lost=lost), HALF, auto_reset=True)
    assert float(metrics["rewards"]) == 1.25
    assert float(metrics["advantages_max"]) == 2.0


def test_unsimulated_steps_end_the_trace() -> None:
    valid = [[[True]], [[False]], [[True]]]
    out, _ = targets(trajectory([[[1]], [[0]], [[8]]], [[[0]]] * 4, valid=valid), HALF, auto_reset=True)
    assert column(out.mask) == [True, False, True]
    assert column(out.advantages)[0] == 1.0  # nothing of the 8 reaches the first chunk


def test_filter_masks_whole_groups() -> None:
    cfg = AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2, filter_rewards=True)
    out, metrics = targets(trajectory([[[0], [1], [1], [1]]]), cfg)
    assert out.mask is not None
    assert out.mask[0, :, 0].tolist() == [True, True, False, False]
    assert float(metrics["groups_kept"]) == 0.5


def test_ignoring_terminations_keeps_every_step() -> None:
    cfg = AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2)
    ended = [[[True], [False]], [[False], [False]]]
    out, _ = targets(trajectory([[[1], [0]], [[1], [0]]], terminated=ended), cfg, ignore_terminations=True)
    assert out.mask is None
    a = 1 / (2**0.5 + 1e-6)
    assert torch.allclose(out.advantages[..., 0], torch.tensor([[a, -a], [a, -a]]), atol=1e-6)


def test_gae_without_values() -> None:
    with pytest.raises(UserError, match=r"set actor\.model\.add_value_head: true"):
        targets(trajectory([[[1]]]), HALF)
