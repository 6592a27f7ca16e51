"""Masks on examples small enough to see. T chunks, B envs, C actions per chunk."""

import pytest
import torch

from rlinf.algorithms.masks import filter_groups, from_steps, invalid_episode_mask, loss_mask, to_steps


def flags(*rows: str) -> torch.Tensor:
    """One string per chunk, blocks of actions per env: "00 01" is two envs, two actions each -> bool [T, B, C]."""
    return torch.tensor([[[c == "1" for c in block] for block in row.split()] for row in rows])


def test_steps_and_back() -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    assert to_steps(x)[:, 0].tolist() == [0, 1, 6, 7]
    assert torch.equal(from_steps(to_steps(x), 2), x)


def test_the_ending_step_counts_and_nothing_after_it() -> None:
    dones = flags("00 00 01", "00 10 00", "01 00 00")
    assert torch.equal(loss_mask(dones), flags("11 10 00", "11 00 00"))


def test_lost_steps_void_their_episode_back_to_the_previous_end() -> None:
    valid = torch.ones(4, 3, 1, dtype=torch.bool)
    valid[3, 0] = False
    lost = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=torch.bool)
    dones = flags("0 1 0", "1 0 0", "0 0 0", "0 0 1")
    # env 0: ended with chunk 1, then lost in 3: chunks 2 and 3; env 1: ended with chunk 0, lost in 2: chunks 1 and 2.
    assert torch.equal(invalid_episode_mask(valid, lost, dones), flags("0 0 0", "0 1 0", "1 1 0", "1 0 0"))


def test_steps_that_were_not_simulated_count_for_nothing() -> None:
    valid = flags("11", "10")
    invalid = invalid_episode_mask(valid, torch.zeros(2, 1, dtype=torch.bool), flags("00", "10"))
    assert torch.equal(invalid, ~valid)


def test_filter_keeps_groups_within_the_bounds() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]).view(1, 6, 1)
    alive = torch.ones(6, dtype=torch.bool)
    keep = filter_groups(rewards, None, alive, group_size=2, lower=0.1, upper=0.9)
    assert keep.tolist() == [False, False, True, True, False, False]
    alive[3] = False  # the mean is over the living: now 1.0
    assert not filter_groups(rewards, None, alive, group_size=2, lower=0.1, upper=0.9).any()
    with pytest.raises(ValueError, match=r"6 envs do not divide into groups of algorithm\.group_size=4"):
        filter_groups(rewards, None, alive, group_size=4, lower=0, upper=1)


def test_filter_does_not_see_masked_rewards() -> None:
    rewards = torch.tensor([[1.0, 0.0], [5.0, 0.0]]).view(2, 2, 1)
    mask = torch.tensor([[True, True], [False, True]]).view(2, 2, 1)
    alive = torch.ones(2, dtype=torch.bool)
    assert filter_groups(rewards, mask, alive, group_size=2, lower=0.5, upper=0.5).all()
