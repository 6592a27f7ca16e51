"""How often `rlinf compare` errs, and how soon it finds a difference: simulated comparisons of known policies.

    python benchmarks/compare_power.py [--comparisons 500] [--pairs 300] [--seed 0]

A layout is drawn for each trial with a hardness between 0 and 1, and a policy of success rate p solves those below p.
The share `common` of the layouts is as hard for both policies (where one fails, the other mostly does); the others are
drawn for each. Looks are at the end of each round (every task once). Printed: the share of comparisons with a verdict,
with a wrong one, the share in which the interval ever missed the true difference, and after how many pairs half and
95 % of the comparisons had their verdict.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rlinf.results.sequential import ALPHA, Pairs, log_evidence

NEEDED = -math.log(ALPHA)
evidence = cache(log_evidence)  # many comparisons pass the same counts


@dataclass(frozen=True)
class Case:
    """Two policies by their success rates in each task."""

    name: str
    a: tuple[float, ...]
    b: tuple[float, ...]
    common: float = 0.0  # share of the layouts that are as hard for both

    @property
    def difference(self) -> float:
        """The true difference of the success rates: the mean over tasks."""
        return float(np.mean(self.b) - np.mean(self.a))


@dataclass(frozen=True)
class Outcome:
    """What many comparisons of a case came to."""

    verdicts: float  # share with a verdict
    wrong: float  # share with a verdict that is not true
    missed: float  # share whose interval left the true difference out at any look
    pairs: tuple[float, float]  # until half, and 95 %, of the comparisons had a verdict; infinite where they had none


EQUAL = tuple(
    Case(f"equal, {100 * p:g} %", (p,), (p,), common) for p in (0.05, 0.2, 0.5, 0.8, 0.95) for common in (0.0, 0.5)
)
MIXED = (0.9, 0.7, 0.5, 0.3, 0.1)
OPPOSITE = Case("equal on average, 5 tasks apart", MIXED, MIXED[::-1])
TWENTY_POINTS = tuple(
    Case(f"{100 * p:g} % -> {100 * p + 20:g} %", (p,), (p + 0.2,), common)
    for p in (0.05, 0.2, 0.4, 0.6, 0.75)
    for common in (0.0, 0.5)
)
TWENTY_OF_TASKS = Case("5 tasks, 20 points in each", (0.05, 0.2, 0.4, 0.6, 0.75), (0.25, 0.4, 0.6, 0.8, 0.95))
QUICKSTART = tuple(Case("quickstart, 22.7 % -> 88.3 %", (0.227,), (0.883,), common) for common in (0.0, 0.5))
TEN_POINTS = Case("45 % -> 55 %", (0.45,), (0.55,))


def simulate(case: Case, *, comparisons: int, pairs: int, seed: int, coverage: bool = True) -> Outcome:
    """Compare the policies of a case many times, looking after every round until a verdict or `pairs` are reached."""
    found = [_compare(case, pairs, np.random.default_rng([seed, number]), coverage) for number in range(comparisons)]
    stops = sorted(stop for stop, _, _ in found)
    wanted = np.sign(case.difference) if abs(case.difference) > 1e-9 else 0.0
    return Outcome(
        verdicts=sum(math.isfinite(stop) for stop in stops) / comparisons,
        wrong=sum(math.isfinite(stop) and sign != wanted for stop, sign, _ in found) / comparisons,
        missed=sum(missed for _, _, missed in found) / comparisons,
        pairs=(stops[math.ceil(0.5 * comparisons) - 1], stops[math.ceil(0.95 * comparisons) - 1]),
    )


def _compare(case: Case, pairs: int, rng: np.random.Generator, coverage: bool) -> tuple[float, float, bool]:
    """Pairs until the verdict (infinite without one), its sign, and whether the interval ever missed the truth."""
    tasks, truth = len(case.a), case.difference
    rounds = pairs // tasks
    hard_a = rng.random((rounds, tasks))
    hard_b = np.where(rng.random((rounds, tasks)) < case.common, hard_a, rng.random((rounds, tasks)))
    a, b = hard_a < np.array(case.a), hard_b < np.array(case.b)
    only_b, only_a = (np.cumsum((x & ~y).sum(1)) for x, y in ((b, a), (a, b)))
    stop, sign, missed = math.inf, 0.0, False
    for played, won, lost in zip(range(tasks, pairs + 1, tasks), only_b.tolist(), only_a.tolist(), strict=True):
        if stop == math.inf and evidence(Pairs(won, lost)) >= NEEDED:
            stop, sign = float(played), float(np.sign(won - lost))
            if not coverage:
                break
        if coverage and not missed:
            missed = evidence(Pairs(won, lost, played - won - lost), truth) >= NEEDED
    return stop, sign, missed


def _row(case: Case, outcome: Outcome) -> str:
    half, most = (f"{stop:.0f}" if math.isfinite(stop) else "-" for stop in outcome.pairs)
    shares = "".join(f"{100 * share:>9.1f} %" for share in (outcome.verdicts, outcome.wrong, outcome.missed))
    return f"{case.name:<34}{case.common:>7.1f}{shares}{half:>9}{most:>9}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=300, help="after which a comparison ends without a verdict")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(f"{given.comparisons} comparisons each, at most {given.pairs} pairs, alpha {ALPHA}")
    print(f"{'case':<34}{'common':>7}{'verdicts':>11}{'wrong':>11}{'missed':>11}{'half':>9}{'95 %':>9}")
    for case in (*EQUAL, OPPOSITE, *TWENTY_POINTS, TWENTY_OF_TASKS, *QUICKSTART, TEN_POINTS):
        print(_row(case, simulate(case, comparisons=given.comparisons, pairs=given.pairs, seed=given.seed)), flush=True)


if __name__ == "__main__":
    main()
