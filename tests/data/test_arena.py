"""The arena keeps what was written where it was written."""

import torch

from rlinf.data.arena import Arena
from rlinf.data.layout import Columns
from rlinf.data.row_cache import Shares
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
    arena = Arena(3, Columns(2, stages=2), num_actions=5, cache=Shares(1 << 20))
    arena.write_output(0, 0, 0, output(2, 1.0))
    arena.write_output(1, 1, 0, output(2, 2.0))
    for stage in range(2):
        arena.write_last_values(stage, 0, torch.full((2, 1), 9.0))
    traj = arena.trajectory()
    assert traj.logprobs.shape == (3, 4, 5, 4)
    assert traj.logprobs[0, ::2].eq(1).all()
    assert traj.logprobs[1, 1::2].eq(2).all()
    assert traj.values.shape == (4, 4, 1)
    assert traj.values[3].eq(9).all()
    assert traj.replay["image"].dtype == torch.uint8
    assert arena.cache.get(torch.tensor([0, 2, 5, 7]))["kv"][:, 0].tolist() == [1, 1, 2, 2]


def test_the_trajectory_is_a_view_not_a_copy():
    arena = Arena(1, Columns(2), num_actions=5)
    arena.write_output(0, 0, 0, output(2, 1.0))
    before = arena.trajectory()
    arena.write_output(0, 0, 0, output(2, 3.0))
    assert before.logprobs.eq(3).all()


def test_columns_of_any_number_of_ranks_and_stages_lie_in_the_same_order():
    """Column = (env group, epoch, member): two ranks with two stages, one after another, give what one rank has."""
    one = Columns(8, stages=1, epochs=3, group_size=2)
    halves = Columns(2, stages=2, epochs=3, group_size=2)
    whole = torch.zeros(len(one), dtype=torch.long)
    for epoch in range(3):
        whole[one.numbers(0, epoch)] = 10 * torch.arange(8) + epoch
    parts = []
    for rank in range(2):
        part = torch.zeros(len(halves), dtype=torch.long)
        for stage in range(2):
            env_ids = torch.tensor([(q * 2 + stage) * 2 + m for q in [rank] for m in range(2)])
            for epoch in range(3):
                part[halves.numbers(stage, epoch)] = 10 * env_ids + epoch
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert whole[:6].tolist() == [0, 10, 1, 11, 2, 12]
    assert [halves.of_envs(0, 2), halves.of_envs(2, 4)] == [slice(0, 6), slice(6, 12)]  # a group of each stage
