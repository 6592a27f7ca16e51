"""What `rlinf compare` promises, on simulated policies: few verdicts on equal ones, and gaps found in time."""

import pytest
from compare_power import EQUAL, OPPOSITE, QUICKSTART, TWENTY_OF_TASKS, TWENTY_POINTS, Case, Outcome, simulate


def play(case: Case, comparisons: int, pairs: int = 300) -> Outcome:
    return simulate(case, comparisons=comparisons, pairs=pairs, seed=1, coverage=False)


def test_at_most_one_in_twenty_of_500_comparisons_of_equal_policies_has_a_verdict() -> None:
    outcomes = [play(case, comparisons=50) for case in EQUAL]  # ten cases
    assert sum(outcome.verdicts for outcome in outcomes) / len(outcomes) <= 0.05


def test_tasks_that_make_up_for_each_other_are_no_difference() -> None:
    assert play(OPPOSITE, comparisons=50).verdicts <= 0.05


@pytest.mark.parametrize("case", [*TWENTY_POINTS[4:6], TWENTY_OF_TASKS], ids=lambda case: f"{case.name}, {case.common}")
def test_a_gap_of_20_points_is_found_within_300_pairs(case: Case) -> None:
    outcome = play(case, comparisons=60)
    assert outcome.verdicts >= 0.8
    assert outcome.wrong == 0


@pytest.mark.parametrize("case", QUICKSTART, ids=lambda case: f"common {case.common}")
def test_what_the_quickstart_gains_is_seen_within_40_pairs(case: Case) -> None:
    assert play(case, comparisons=100, pairs=40).verdicts == 1.0


def test_the_interval_holds_at_all_looks_together() -> None:
    outcome = simulate(TWENTY_POINTS[4], comparisons=40, pairs=100, seed=2)
    assert outcome.missed <= 0.05
