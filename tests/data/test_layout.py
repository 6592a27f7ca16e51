"""The index formulas of a run: every env, column and row exactly once, and the same whatever the ranks and stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlinf.data.layout import Columns, EnvLayout, chunk_and_column, global_batches, row_numbers

# ranks, stages, group size, groups of a rank in a stage, epochs
CASES = list(itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 3), (1, 2)))


def layout(ranks: int, stages: int, group: int, groups: int) -> EnvLayout:
    return EnvLayout(ranks * stages * group * groups, stages, group)


def global_columns(ranks: int, stages: int, group: int, groups: int, epochs: int) -> dict[tuple[int, int], int]:
    """(env, epoch) -> column over all ranks, rank after rank."""
    envs = layout(ranks, stages, group, groups)
    columns = Columns(envs.share(ranks), stages, epochs, group)
    found = {}
    for rank, stage, epoch in itertools.product(range(ranks), range(stages), range(epochs)):
        numbers = rank * len(columns) + columns.numbers(stage, epoch)
        for env, number in zip(envs.env_ids(ranks, rank, stage), numbers.tolist(), strict=True):
            found[env, epoch] = number
    return found


def test_the_drawing() -> None:
    envs = EnvLayout(12, stages=2, group_size=2)
    ids = [[envs.env_ids(3, rank, stage) for stage in (0, 1)] for rank in range(3)]
    assert ids == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    columns = Columns(num_envs=2, stages=2, epochs=2, group_size=2)
    assert [columns.numbers(stage, epoch).tolist() for stage in (0, 1) for epoch in (0, 1)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_env_has_one_place_and_groups_stay_whole(case: tuple[int, ...]) -> None:
    ranks, stages, group, groups, _ = case
    envs = layout(ranks, stages, group, groups)
    batches = [envs.env_ids(ranks, rank, stage) for rank in range(ranks) for stage in range(stages)]
    assert sorted(itertools.chain(*batches)) == list(range(envs.num_envs))
    for batch in batches:
        for first in range(0, len(batch), group):
            assert batch[first : first + group] == list(range(batch[first], batch[first] + group))
            assert batch[first] % group == 0


@pytest.mark.parametrize("case", CASES)
def test_columns_do_not_depend_on_ranks_and_stages(case: tuple[int, ...]) -> None:
    _, _, group, _, epochs = case
    found = global_columns(*case)
    assert sorted(found.values()) == list(range(len(found)))
    for (env, epoch), column in found.items():
        assert column == (env // group * epochs + epoch) * group + env % group


@pytest.mark.parametrize("sources", [1, 2, 3, 6])
@pytest.mark.parametrize("targets", [1, 2, 3, 6])
def test_routes_hand_every_env_to_its_rank(sources: int, targets: int) -> None:
    envs = EnvLayout(24, stages=2, group_size=2)
    for stage in (0, 1):
        for target, route in enumerate(envs.routes(sources, targets)):
            pieces = [envs.env_ids(sources, source, stage)[first:end] for source, first, end in route]
            assert list(itertools.chain(*pieces)) == envs.env_ids(targets, target, stage)


@pytest.mark.parametrize("sources", [1, 2, 4])
@pytest.mark.parametrize("targets", [1, 2, 4, 8])
def test_experience_of_all_stages_is_dealt_out_in_whole_groups(sources: int, targets: int) -> None:
    """The guides' 64 envs in groups of 8 and two stages: 4 rollout ranks, 8 actors with one group each."""
    envs, epochs, stages = EnvLayout(64, stages=2, group_size=8), 3, 2
    columns = Columns(envs.share(sources), stages, epochs, group_size=8)
    held = np.zeros((sources, len(columns), 2), dtype=int)  # (env, epoch) of every column
    for source, stage, epoch in itertools.product(range(sources), range(stages), range(epochs)):
        ids = envs.env_ids(sources, source, stage)
        held[source, columns.numbers(stage, epoch)] = [(env, epoch) for env in ids]
    learnt = [
        np.concatenate([held[source, columns.of_envs(first, end)] for source, first, end in route])
        for route in envs.experience_routes(sources, targets)
    ]
    assert {len(part) for part in learnt} == {64 * epochs // targets}
    for group in np.concatenate(learnt).reshape(-1, 8, 2):  # what advantages compare
        assert group[:, 0].tolist() == list(range(group[0, 0], group[0, 0] + 8))
        assert group[0, 0] % 8 == 0
        assert len(set(group[:, 1])) == 1
    assert len({tuple(pair) for part in learnt for pair in part.tolist()}) == 64 * epochs


@pytest.mark.parametrize("num_envs", [1, 5, 7, 50, 500])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_any_number_of_envs_spreads_over_any_ranks_and_stages(num_envs: int, ranks: int, stages: int) -> None:
    envs = EnvLayout(num_envs, stages)
    shares = {
        (rank, stage): envs.env_ids(ranks, rank, stage)
        for rank, stage in itertools.product(range(ranks), range(stages))
    }
    assert sorted(itertools.chain(*shares.values())) == list(range(num_envs))
    sizes = {len(ids) for ids in shares.values()}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == envs.share(ranks)
    for targets, stage in itertools.product((1, 2, 5, 8), range(stages)):
        for target, route in enumerate(envs.routes(ranks, targets, stage)):
            assert all(first < end for _, first, end in route)
            pieces = [shares[source, stage][first:end] for source, first, end in route]
            assert list(itertools.chain(*pieces)) == envs.env_ids(targets, target, stage)


def test_rows_and_back() -> None:
    chunks, columns = chunk_and_column(np.arange(21), 7)
    assert row_numbers(chunks, columns, 7).tolist() == list(range(21))
    assert (chunks.max(), columns.max()) == (2, 6)


@pytest.mark.parametrize(("columns", "batch"), [(12, 12), (12, 24), (12, 36), (24, 12), (6, 18)])
def test_global_batches_hold_the_same_rows_on_any_number_of_ranks(columns: int, batch: int) -> None:
    def shuffle(stratum: int, count: int) -> np.ndarray:
        return np.random.default_rng(stratum).permutation(count)

    def batches(ranks: int) -> list[list[int]]:
        """Each global batch as rows over all ranks."""
        own = columns // ranks
        parts = [
            list(global_batches(6, own, batch_size=batch, ranks=ranks, rank=rank, shuffle=shuffle))
            for rank in range(ranks)
        ]
        whole = []
        for pieces in zip(*parts, strict=True):
            rows = []
            for rank, piece in enumerate(pieces):
                assert len(piece) == batch // ranks
                chunks, places = chunk_and_column(piece, own)
                rows += row_numbers(chunks, rank * own + places, columns).tolist()
            whole.append(sorted(rows))
        return whole

    one = batches(1)
    assert sorted(itertools.chain(*one)) == list(range(6 * columns))
    assert batches(2) == one
    assert batches(3) == one
