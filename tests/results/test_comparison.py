"""Pairing by trial, correction for several tasks and policies, and rankings whose groups say who is not separable."""

from rlinf.results.comparison import Comparison, Trial, common_trials, compare_outcomes
from rlinf.results.sequential import ALPHA, Pairs, fewest_pairs, judge


def outcomes(solved: int, trials: int, task: str = "reach", first: int = 0) -> dict[Trial, bool]:
    """A policy that solves the first `solved` of `trials` layouts."""
    return {("suite", task, first + i): i < solved for i in range(trials)}


def groups(comparison: Comparison) -> dict[str, tuple[int, str]]:
    return {standing.name: (standing.rank, standing.groups) for standing in comparison.standings}


def test_pairs_are_the_trials_that_both_have_played() -> None:
    comparison = compare_outcomes({"a": outcomes(5, 20), "b": outcomes(10, 20, first=10)})
    assert comparison.pairs[0].overall.pairs == Pairs(only_b=10)  # layouts 10 to 19: a solves none, b all
    assert comparison.pairs[0].overall == judge(Pairs(only_b=10))
    assert comparison.pairs[0].better == "b"


def test_the_same_number_in_another_task_or_suite_is_another_trial() -> None:
    other = {("other", task, number): True for _, task, number in outcomes(5, 20)}
    assert common_trials({"a": outcomes(5, 20), "b": outcomes(5, 20, task="push")}) == set()
    assert common_trials({"a": outcomes(5, 20), "b": other}) == set()
    assert compare_outcomes({"a": outcomes(5, 20), "b": other}).pairs[0].overall.verdict == "not separable"


def test_several_tasks_are_judged_at_a_level_divided_by_their_number() -> None:
    few = outcomes(0, 3, "push", 100)
    comparison = compare_outcomes(
        {
            "a": outcomes(0, 30) | outcomes(30, 30, "door", 50) | few,
            "b": outcomes(30, 30) | outcomes(2, 30, "door", 50) | few,
        }
    )
    found = comparison.pairs[0]
    assert {name: finding.verdict for name, finding in found.tasks.items()} == {"door": "worse", "reach": "better"}
    assert found.tasks["reach"] == judge(Pairs(only_b=30), ALPHA / 3)
    assert (found.too_few, found.needed) == (1, fewest_pairs(ALPHA / 3))
    assert not found.decided


def test_one_task_is_not_told_twice() -> None:
    found = compare_outcomes({"a": outcomes(3, 30), "b": outcomes(20, 30)}).pairs[0]
    assert (found.tasks, found.too_few) == ({}, 0)


def test_several_policies_are_judged_at_a_level_divided_by_their_pairs() -> None:
    comparison = compare_outcomes({"a": outcomes(10, 100), "b": outcomes(30, 100), "c": outcomes(90, 100)})
    assert comparison.pair("a", "b").overall == judge(Pairs(only_b=20, both=10, neither=70), ALPHA / 3)
    assert groups(comparison) == {"c": (1, "a"), "b": (2, "b"), "a": (3, "c")}


def test_who_is_not_separable_shares_a_group() -> None:
    """Neighbours are 8 trials apart, which is too few; the first and the last are 16 apart, which is enough."""
    comparison = compare_outcomes({"low": outcomes(10, 60), "middle": outcomes(18, 60), "high": outcomes(26, 60)})
    assert groups(comparison) == {"high": (1, "a"), "middle": (1, "ab"), "low": (2, "b")}


def test_equal_policies_are_one_group() -> None:
    same = outcomes(20, 40)
    assert groups(compare_outcomes({"a": same, "b": same, "c": same, "d": same})) == dict.fromkeys("abcd", (1, "a"))


def test_json_holds_the_ranking_and_every_pair() -> None:
    content = compare_outcomes({"a": outcomes(1, 40), "b": outcomes(30, 40)}).to_json()
    assert content["ranking"][0]["name"] == "b"
    assert content["ranking"][0]["successes"] == 30
    assert content["pairs"][0]["better"] == "b"
    assert content["pairs"][0]["overall"]["pairs"] == {"only_b": 29, "only_a": 0, "both": 1, "neither": 10}


def test_success_counts_the_trials_that_another_policy_has_played() -> None:
    """A result of 32 trials beside a policy that has played 16 of them; a third one stopped after 8."""
    recorded, played, stopped = outcomes(6, 32), outcomes(9, 16), outcomes(1, 8)
    two = compare_outcomes({"recorded": {t: won for t, won in recorded.items() if t[2] >= 2}, "played": played})
    assert {s.name: (s.successes, s.trials) for s in two.standings} == {"played": (7, 14), "recorded": (4, 14)}
    three = compare_outcomes({"recorded": recorded, "played": played, "stopped": stopped})
    assert {s.name: (s.successes, s.trials) for s in three.standings} == {
        "recorded": (6, 16),
        "played": (9, 16),
        "stopped": (1, 8),
    }
