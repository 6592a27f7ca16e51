"""Rates and Wilson intervals against worked values."""

from dataclasses import asdict

import pytest

from rlinf.metrics.stats import Rate, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (78, 128, 0.52284, 0.68953),
        (0, 10, 0.0, 3.8416 / 13.8416),
        (10, 10, 10 / 13.8416, 1.0),
        (5, 10, 0.23659, 0.76341),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-5)


def test_the_ends_solve_the_score_equation() -> None:
    for successes, n in ((1, 7), (33, 128), (127, 128)):
        for end in wilson_interval(successes, n):
            assert (successes / n - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / n, rel=1e-9)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="successes=3 must lie between 0 and trials=2"):
        Rate(3, 2)


def test_rate_shows_counts_and_interval() -> None:
    assert str(Rate(78, 128)) == "78/128 = 60.9 % [52.3, 69.0]"
    assert str(Rate(0, 0)) == "0/0 (no trials)"
    assert Rate.of([True, False, True]) == Rate(2, 3)
    assert asdict(Rate(1, 4))["rate"] == 0.25
