"""Whether one of two policies is better, from trials that both have played; valid whenever one stops looking.

Both policies play the same trial i (task, layout and noise alike). D_i = success of B - success of A is -1, 0 or 1, and
delta = E[D] is the difference of their success rates. For every value that delta might have, a bettor starts with one
unit and bets against it. He puts the share c of what he owns on "delta is larger" and keeps the rest:

    up_n(delta, c)   = prod_i [1 - c + c (1 + D_i) / (1 + delta)],
    down_n(delta, c) = prod_i [1 - c + c (1 - D_i) / (1 - delta)]     the same for "delta is smaller".

If delta is the truth each factor has mean 1 whatever was seen before, so neither grows on average: both are nonnegative
martingales that begin at 1. So is their mean over both directions and all c in [0, 1], which needs no guess of how
large the effect is:

    E_n(delta) = 1/2 sum over {up, down} of  integral of (3/2) (1 - c^2) . (delta, c) dc.

By Ville's inequality the probability that E_n of the true delta *ever* reaches 1/alpha is at most alpha. Hence one may
look after every trial and stop whenever one likes:

- the policies differ once E_n(0) >= 1/alpha: wrong in at most alpha of all comparisons of equal policies;
- the values of delta with E_n(delta) < 1/alpha contain the true one at all times, with probability 1 - alpha.

Both are the same inequality: there is a verdict exactly where the interval leaves out 0.

At delta = 0 pairs with equal outcomes have the factor 1. With w trials that only B solved, l that only A solved, and
m = w + l, it has a closed form, the likelihood ratio of a coin of unknown bias (prior Beta(2, 2)) to a fair coin:

    E(0) = 2^m B(w + 2, l + 2) / B(2, 2),     B the beta function.

Every factor is log-convex in delta, and so are products and means of such functions: the values form one interval. It
contains the mean of D, where E is at most 1 (arithmetic and geometric mean).

Several tasks: the trials need not have one delta. Where each round plays every task once, and one looks at the end of
rounds only, delta is the mean of the tasks' differences: prod_t (1 + c d_t) <= (1 + c mean_t d_t)^T, so what was a
martingale can at most shrink. The trials are taken for a sample of their task's layouts. What is said of several
comparisons at once (of tasks, of pairs of policies) holds for all of them together where each is made at alpha divided
by their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

ALPHA = 0.05  # the share of comparisons of equal policies that may end with a verdict
NODES = 256  # of the integral over c; the mean over them is itself one of martingales, so the test stays exact
BISECTIONS = 50  # halvings of an interval of length 2 at most
Verdict = Literal["better", "worse", "not separable"]


@dataclass(frozen=True)
class Pairs:
    """Trials that policies A and B have both played, counted by who solved them."""

    only_b: int = 0
    only_a: int = 0
    both: int = 0
    neither: int = 0

    def __post_init__(self) -> None:
        if min(self.only_b, self.only_a, self.both, self.neither) < 0:
            raise ValueError(f"{self}: counts cannot be negative")

    @staticmethod
    def of(outcomes: Iterable[tuple[bool, bool]]) -> Pairs:
        """Count (A solved it, B solved it)."""
        listed = [(bool(a), bool(b)) for a, b in outcomes]
        return Pairs(
            only_b=listed.count((False, True)),
            only_a=listed.count((True, False)),
            both=listed.count((True, True)),
            neither=listed.count((False, False)),
        )

    @property
    def count(self) -> int:
        """How many trials both have played."""
        return self.only_b + self.only_a + self.both + self.neither

    @property
    def effect(self) -> float:
        """Success rate of B less that of A on these trials; 0 without any."""
        return (self.only_b - self.only_a) / self.count if self.count else 0.0


@dataclass(frozen=True)
class Finding:
    """What a number of pairs shows of B against A, at a level alpha."""

    pairs: Pairs
    alpha: float
    verdict: Verdict  # of B: better or worse than A
    effect: float  # success rate of B less that of A
    low: float  # interval of the effect, which holds at any stopping time with probability 1 - alpha
    high: float
    evidence: float  # log E(0): a verdict needs log(1 / alpha)


def judge(pairs: Pairs, alpha: float = ALPHA) -> Finding:
    """What the pairs show; to be asked at the end of any round, as often as one likes.

    Example: judge(Pairs(only_b=12, both=3)).verdict == "better"
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha} must lie between 0 and 1")
    evidence, (low, high) = log_evidence(pairs), interval(pairs, alpha)
    verdict: Verdict = "not separable"
    if evidence >= -math.log(alpha):
        verdict = "better" if pairs.effect > 0 else "worse"
    return Finding(pairs, alpha, verdict, pairs.effect, low, high, evidence)


def log_evidence(pairs: Pairs, difference: float = 0.0) -> float:
    """log E(delta) against the claim that the success rates differ by `difference` (-1 < difference < 1)."""
    equal = pairs.both + pairs.neither
    up = _log_capital(pairs.only_b, equal, pairs.only_a, 1 + difference)
    down = _log_capital(pairs.only_a, equal, pairs.only_b, 1 - difference)
    return float(np.logaddexp(up, down) - math.log(2))


def interval(pairs: Pairs, alpha: float = ALPHA) -> tuple[float, float]:
    """The differences of success rates that the pairs do not refute: {delta: E(delta) < 1 / alpha}."""
    return _bound(pairs, -1.0, alpha), _bound(pairs, 1.0, alpha)


def fewest_pairs(alpha: float) -> int:
    """With how many pairs a verdict can be had at best: if B solves every trial and A none."""
    return next(n for n in range(1, 10_000) if log_evidence(Pairs(only_b=n)) >= -math.log(alpha))


def _bound(pairs: Pairs, end: float, alpha: float) -> float:
    """The last difference on the way from the mean to `end` (-1 or 1) that is not refuted."""
    inside, outside = pairs.effect, end
    if inside == end or log_evidence(pairs, end * (1 - 1e-12)) < -math.log(alpha):
        return end
    for _ in range(BISECTIONS):
        middle = (inside + outside) / 2
        if log_evidence(pairs, middle) < -math.log(alpha):
            inside = middle
        else:
            outside = middle
    return outside


def _log_capital(gains: int, equal: int, losses: int, mean: float) -> float:
    """log of the mean over c of prod [1 - c + c x / mean], where x is 2 for gains, 1 for equal ones, 0 for losses."""
    c, log_weights = _nodes()
    logs = gains * np.log(1 - c + 2 * c / mean) + equal * np.log(1 - c + c / mean) + losses * np.log(1 - c)
    return float(np.logaddexp.reduce(logs + log_weights))


@cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes c in (0, 1), and the log of their weights under the density 3/2 (1 - c^2); they sum to 1."""
    x, weights = np.polynomial.legendre.leggauss(NODES)
    c = (x + 1) / 2
    return c, np.log(weights / 2 * 1.5 * (1 - c**2))
