"""Rows are kept on the device, then on the host, as far as their shares reach, and come back as they went in."""

from __future__ import annotations

import pytest
import torch

from rlinf.data import row_cache
from rlinf.data.row_cache import RowCache, Shares

ROW = 8 * 4  # bytes of one row below


def values(*rows: float) -> dict[str, torch.Tensor]:
    column = torch.tensor(rows, dtype=torch.float32)[:, None]
    return {"kv": column.repeat(1, 6), "pooled": column.repeat(1, 2)}


def filled(shares: Shares, count: int = 10) -> RowCache:
    """A cache of ten rows with row i holding i, put in two at a time, from the last row on."""
    cache = RowCache(10, shares)
    for first in range(count - 2, -1, -2):
        cache.put(torch.tensor([first, first + 1]), values(first, first + 1))
    return cache


def read(cache: RowCache, *rows: int) -> list[float] | None:
    found = cache.get(torch.tensor(rows))
    if found is None:
        return None
    assert torch.equal(found["kv"][:, :2], found["pooled"])
    return found["kv"][:, 0].tolist()


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows a slab."""
    monkeypatch.setattr(row_cache, "SLAB_BYTES", 2 * ROW)


@pytest.mark.parametrize("device", [0, 1, 3, 4, 10, 99])
@pytest.mark.parametrize("host", [0, 1, 5, 10, 99])
@pytest.mark.usefixtures("small_slabs")
def test_every_split_gives_the_same_rows(device: int, host: int) -> None:
    cache = filled(Shares(device * ROW, host * ROW))
    kept = min(10, device + host)
    assert sum(cache.counts()) == kept
    assert cache.counts()[0] == min(10, device)
    held = [row for row in (9, 0, 5, 6, 3) if bool(cache.held(torch.tensor([row])))]
    if held:
        assert read(cache, *held) == held
    assert (read(cache, *range(10)) is None) == (kept < 10)


def test_a_cache_stops_at_its_share_and_answers_only_whole_requests() -> None:
    cache = RowCache(10, Shares(3 * ROW))
    cache.put(torch.tensor([4, 5]), values(1, 1))
    cache.put(torch.tensor([6, 7]), values(2, 2))
    assert read(cache, 6, 4) == [2, 1]
    assert read(cache, 6, 7) is None
    assert cache.held(torch.tensor([6, 7, 4])).tolist() == [True, False, True]
    cache.clear()
    assert read(cache, 4) is None
    cache.put(torch.tensor([9]), values(3))
    assert read(cache, 9) == [3]


@pytest.mark.usefixtures("small_slabs")
def test_shares_that_change_between_steps_change_what_is_kept() -> None:
    shares = iter([Shares(0, 0), Shares(4 * ROW, 0), Shares(9 * ROW, ROW), Shares(2 * ROW, 3 * ROW)])
    cache = RowCache(10, lambda held: next(shares))
    found = []
    for _ in range(3):
        cache.clear()
        for row in range(10):
            cache.put(torch.tensor([row]), values(row))
        found.append(cache.counts())
        held = cache.held(torch.arange(10)).nonzero().flatten().tolist()
        assert read(cache, *held) == held
    assert found == [(4, 0), (9, 1), (2, 3)]


@pytest.mark.usefixtures("small_slabs")
def test_what_the_device_gives_back_moves_to_the_host_while_it_has_room() -> None:
    cache = filled(Shares(10 * ROW, 3 * ROW))
    assert cache.counts() == (10, 0)
    assert cache.shrink()  # three of five slabs: six rows, of which three find room
    assert cache.counts() == (4, 3)
    assert cache.num_bytes == (4 * ROW, 3 * ROW)
    held = cache.held(torch.arange(10)).nonzero().flatten().tolist()
    assert read(cache, *held) == held
    while cache.shrink():
        pass
    assert cache.counts() == (0, 3)
    assert cache.num_bytes[0] == 0


@pytest.mark.usefixtures("small_slabs")
def test_memory_that_is_not_there_ends_the_growth_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RowCache(10, Shares(10 * ROW, 0))
    make = row_cache.Tier._slab

    def scarce(tier: row_cache.Tier, rows: int) -> dict[str, torch.Tensor]:
        if len(tier.slabs) == 2:
            raise torch.OutOfMemoryError("no memory left")
        return make(tier, rows)

    monkeypatch.setattr(row_cache.Tier, "_slab", scarce)
    for row in range(10):
        cache.put(torch.tensor([row]), values(row))
    assert cache.counts() == (4, 0)
    assert read(cache, 3, 0) == [3, 0]
