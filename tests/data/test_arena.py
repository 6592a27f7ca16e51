"""The arena keeps what was written where it was written; its cache keeps rows while the budget lasts."""

import torch

from rlinf.data.arena import Arena, RowCache
from rlinf.data.types import PolicyOutput


def output(n: int, value: float) -> PolicyOutput:
    return PolicyOutput(
        actions=torch.zeros(n, 5, 4),
        logprobs=torch.full((n, 5, 4), value),
        values=torch.full((n, 1), value),
        replay={"image": torch.full((n, 2, 2), int(value), dtype=torch.uint8)},
        cache={"kv": torch.full((n, 8), value)},
    )


def test_outputs_land_in_their_chunk_and_columns():
    arena = Arena(num_chunks=3, num_columns=4, num_actions=5, cache_bytes=1 << 20)
    arena.write_output(0, slice(0, 2), output(2, 1.0))
    arena.write_output(1, slice(2, 4), output(2, 2.0))
    arena.write_last_values(slice(0, 4), torch.full((4, 1), 9.0))
    traj = arena.trajectory()
    assert traj.logprobs.shape == (3, 4, 5, 4)
    assert traj.logprobs[0, :2].eq(1).all()
    assert traj.logprobs[1, 2:].eq(2).all()
    assert traj.values.shape == (4, 4, 1)
    assert traj.values[3].eq(9).all()
    assert traj.replay["image"].dtype == torch.uint8
    assert arena.cache.get(torch.tensor([0, 1, 6, 7]))["kv"][:, 0].tolist() == [1, 1, 2, 2]


def test_the_trajectory_is_a_view_not_a_copy():
    arena = Arena(num_chunks=1, num_columns=2, num_actions=5)
    arena.write_output(0, slice(0, 2), output(2, 1.0))
    before = arena.trajectory()
    arena.write_output(0, slice(0, 2), output(2, 3.0))
    assert before.logprobs.eq(3).all()


def test_cache_stops_at_its_budget_and_answers_only_whole_requests():
    cache = RowCache(num_rows=10, budget_bytes=3 * 8 * 4)
    cache.put(torch.tensor([4, 5]), {"kv": torch.ones(2, 8)})
    cache.put(torch.tensor([6, 7]), {"kv": torch.full((2, 8), 2.0)})
    assert cache.num_bytes == 96
    assert cache.get(torch.tensor([6, 4]))["kv"][:, 0].tolist() == [2, 1]
    assert cache.get(torch.tensor([6, 7])) is None
    assert cache.held(torch.tensor([6, 7, 4])).tolist() == [True, False, True]
    cache.clear()
    assert cache.get(torch.tensor([4])) is None
    cache.put(torch.tensor([9]), {"kv": torch.full((1, 8), 3.0)})
    assert cache.get(torch.tensor([9]))["kv"][0, 0] == 3


def test_zero_budget_keeps_nothing():
    cache = RowCache(num_rows=4, budget_bytes=0)
    cache.put(torch.tensor([0]), {"kv": torch.ones(1, 8)})
    assert cache.get(torch.tensor([0])) is None
