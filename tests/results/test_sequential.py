"""The anytime-valid test against closed forms: evidence, intervals, and what they promise of each other."""

import math
from itertools import product

import pytest

from rlinf.results.sequential import Pairs, fewest_pairs, interval, judge, log_evidence


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (1, 0), (3, 1), (40, 25), (0, 300), (900, 1000), (20_000, 19_000)])
def test_evidence_against_equality_is_the_ratio_of_a_coin_of_unknown_bias_to_a_fair_one(won: int, lost: int) -> None:
    closed = (won + lost) * math.log(2) + log_beta(won + 2, lost + 2) - log_beta(2, 2)
    assert log_evidence(Pairs(won, lost)) == pytest.approx(closed, abs=1e-8)
    assert log_evidence(Pairs(won, lost, both=7, neither=5)) == pytest.approx(closed, abs=1e-8)


def test_evidence_against_a_difference_of_one_pair_by_hand() -> None:
    """One trial that only B solved, against delta = 0.5: mean over c of (1 - c + c 2/1.5) and of 1 - c."""
    mean_c = 3 / 8  # of the density 3/2 (1 - c^2)
    up, down = 1 + mean_c * (2 / 1.5 - 1), 1 - mean_c
    assert math.exp(log_evidence(Pairs(only_b=1), 0.5)) == pytest.approx((up + down) / 2)


@pytest.mark.parametrize(("only_b", "only_a"), [(0.1, 0.6), (0.2, 0.2), (0.4, 0.1)])
def test_evidence_against_the_truth_does_not_grow_on_average(only_b: float, only_a: float) -> None:
    """The mean of E over all outcomes of six trials is 1: it is a martingale that begins at 1."""
    chances = {1: only_b, -1: only_a, 0: 1 - only_b - only_a}
    mean = 0.0
    for drawn in product(chances, repeat=6):
        pairs = Pairs(drawn.count(1), drawn.count(-1), drawn.count(0))
        mean += math.prod(chances[d] for d in drawn) * math.exp(log_evidence(pairs, only_b - only_a))
    assert mean == pytest.approx(1.0)


def test_tasks_that_differ_in_opposite_ways_gain_nothing() -> None:
    """B always solves task 1 and A task 2: rounds of both show no difference, however many."""
    assert all(log_evidence(Pairs(only_b=n, only_a=n)) < 0 for n in (1, 10, 1000))


@pytest.mark.parametrize(
    "pairs", [Pairs(12, 0, 3), Pairs(5, 9, 30, 20), Pairs(98, 30, 50, 122), Pairs(0, 5), Pairs(0, 0, 50, 50)]
)
def test_the_ends_of_the_interval_solve_its_equation(pairs: Pairs) -> None:
    low, high = interval(pairs, 0.05)
    assert -1 <= low <= pairs.effect <= high <= 1
    for end in (low, high):
        if abs(end) < 1:
            assert log_evidence(pairs, end) == pytest.approx(math.log(20), abs=1e-6)


def test_a_verdict_is_an_interval_without_0() -> None:
    for won, lost, equal in product(range(0, 24, 3), range(0, 24, 3), (0, 30)):
        finding = judge(Pairs(won, lost, equal))
        assert (finding.verdict != "not separable") == (not finding.low < 0 < finding.high)
        assert finding.verdict == "not separable" or (finding.verdict == "better") == (won > lost)


def test_both_directions_are_treated_alike() -> None:
    better, worse = judge(Pairs(30, 4, 10, 6)), judge(Pairs(4, 30, 10, 6))
    assert (better.verdict, worse.verdict) == ("better", "worse")
    assert (better.low, better.high) == pytest.approx((-worse.high, -worse.low), abs=1e-9)


def test_a_stricter_level_widens_the_interval_and_asks_for_more() -> None:
    wide, narrow = judge(Pairs(12, 3, 20), 0.005), judge(Pairs(12, 3, 20), 0.05)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert [fewest_pairs(alpha) for alpha in (0.05, 0.05 / 50)] == [9, 16]


def test_nothing_played_says_nothing() -> None:
    finding = judge(Pairs())
    assert (finding.verdict, finding.effect, finding.low, finding.high) == ("not separable", 0.0, -1.0, 1.0)


def test_pairs_count_outcomes() -> None:
    assert Pairs.of([(False, True), (True, False), (True, True), (False, False), (False, True)]) == Pairs(2, 1, 1, 1)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Pairs(only_b=-1)
    with pytest.raises(ValueError, match="alpha=0"):
        judge(Pairs(), 0.0)
