"""Several policies on the same trials: which is better, in which tasks, and which cannot be told apart. Torch-free."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from rlinf.results.sequential import ALPHA, Finding, Pairs, fewest_pairs, judge

MOST_POLICIES = len(ascii_lowercase)  # a letter for each group
Trial = tuple[str, str, int]  # suite, task, reset id
Outcomes = Mapping[Trial, bool]  # whether a policy solved it


@dataclass(frozen=True)
class PairFinding:
    """What is known of policy `b` against policy `a`."""

    a: str
    b: str
    overall: Finding
    tasks: dict[str, Finding]  # of tasks with enough pairs for a verdict, where several were played
    too_few: int  # tasks that were left out
    needed: int  # pairs of one task with which a verdict on it is possible

    @property
    def decided(self) -> bool:
        """Whether one is better."""
        return self.overall.verdict != "not separable"

    @property
    def better(self) -> str | None:
        """The better one."""
        return {"better": self.b, "worse": self.a}.get(self.overall.verdict)


@dataclass(frozen=True)
class Standing:
    """A policy's place among those compared."""

    name: str
    rank: int  # 1 + the policies that are better
    groups: str  # letters; policies that share one cannot be told apart
    successes: int
    trials: int  # that another one has played, too


@dataclass(frozen=True)
class Comparison:
    """Every pair of the policies, and their ranking."""

    alpha: float
    pairs: tuple[PairFinding, ...]
    standings: tuple[Standing, ...]  # best first
    folder: Path | None = None  # that holds comparison.json and the results of what was played

    @property
    def played(self) -> bool:
        """Whether any two of them have a trial in common."""
        return any(pair.overall.pairs.count for pair in self.pairs)

    def pair(self, a: str, b: str) -> PairFinding:
        """What is known of two policies, in the order in which they were given."""
        return next(p for p in self.pairs if (p.a, p.b) == (a, b))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as comparison.json holds them."""
        pairs = [asdict(p) | {"better": p.better} for p in self.pairs]
        return {"alpha": self.alpha, "ranking": [asdict(s) for s in self.standings], "pairs": pairs}


def compare_outcomes(policies: Mapping[str, Outcomes], alpha: float = ALPHA) -> Comparison:
    """Compare policies by name; a pair of them is judged by the trials that both have played.

    Everything said of pairs holds together with probability 1 - alpha, and so does everything said of tasks.
    """
    couples = list(itertools.combinations(policies, 2))
    findings = tuple(_compare(policies, a, b, alpha / len(couples)) for a, b in couples)
    return Comparison(alpha, findings, _ranking(paired_trials(policies), findings))


def common_trials(policies: Mapping[str, Outcomes]) -> set[Trial]:
    """Trials that all of them have played."""
    return set.intersection(*(set(outcomes) for outcomes in policies.values()))


def paired_trials(policies: Mapping[str, Outcomes]) -> dict[str, Outcomes]:
    """Of each policy, the trials that another one has played too."""
    played = Counter(itertools.chain.from_iterable(policies.values()))
    return {name: {t: own for t, own in outcomes.items() if played[t] > 1} for name, outcomes in policies.items()}


def _compare(policies: Mapping[str, Outcomes], a: str, b: str, alpha: float) -> PairFinding:
    """One pair, overall and by task, at a level that is already divided by the number of pairs."""
    first, second = policies[a], policies[b]
    common = [trial for trial in first if trial in second]
    names = sorted({task for _, task, _ in common})
    pairs = {name: Pairs.of((first[t], second[t]) for t in common if t[1] == name) for name in names}
    level = alpha / max(1, len(names))
    needed = fewest_pairs(level)
    enough = {name: judge(own, level) for name, own in pairs.items() if own.count >= needed and len(names) > 1}
    too_few = len(names) - len(enough) if len(names) > 1 else 0
    overall = judge(Pairs.of((first[t], second[t]) for t in common), alpha)
    return PairFinding(a, b, overall, enough, too_few, needed)


def _ranking(policies: Mapping[str, Outcomes], findings: Sequence[PairFinding]) -> tuple[Standing, ...]:
    """The policies, best first."""
    worse = {name: [p for p in findings if name in (p.a, p.b) and p.better not in (None, name)] for name in policies}
    solved = {name: sum(outcomes.values()) for name, outcomes in policies.items()}
    order = sorted(policies, key=lambda name: (len(worse[name]), -solved[name] / max(1, len(policies[name]))))
    equal = {frozenset((p.a, p.b)) for p in findings if not p.decided}
    letters = list(zip(ascii_lowercase, _groups(order, equal), strict=False))
    groups = {name: "".join(letter for letter, group in letters if name in group) for name in order}
    return tuple(
        Standing(name, 1 + len(worse[name]), groups[name], solved[name], len(policies[name])) for name in order
    )


def _groups(order: Sequence[str], equal: set[frozenset[str]]) -> list[frozenset[str]]:
    """The largest sets of policies of which no two are told apart, in the order of their best members.

    Each policy extends every group by those it cannot be told apart from; what lies within another group is dropped.
    """
    groups: list[frozenset[str]] = []
    for name in order:
        joined = [frozenset({name} | {m for m in group if frozenset((m, name)) in equal}) for group in groups]
        candidates = {*groups, *joined, frozenset({name})}
        groups = [g for g in candidates if not any(g < other for other in candidates)]
    return sorted(groups, key=lambda group: sorted(map(order.index, group)))
