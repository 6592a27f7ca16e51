"""Success rates with the counts and the uncertainty that belong to them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion; unlike the normal one it behaves at 0, at n and for few trials."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie between 0 and trials={n}")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # The end is exact where nothing (or everything) succeeded; rounding must not move it past 0 or 1.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


def mean_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """Mean of measurements with the ends of its normal interval; of a single one, all three are that one."""
    n, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(n - 1, 1)
    half = z * math.sqrt(variance / n)
    return mean, mean - half, mean + half


@dataclass(frozen=True)
class Rate:
    """Successes out of trials with the 95 % interval, e.g. `78/128 = 60.9 % [52.3, 69.0]`."""

    successes: int
    trials: int
    rate: float = field(init=False)
    low: float = field(init=False)
    high: float = field(init=False)

    def __post_init__(self) -> None:
        low, high = wilson_interval(self.successes, self.trials)
        object.__setattr__(self, "rate", self.successes / self.trials if self.trials else 0.0)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    @staticmethod
    def of(outcomes: Iterable[bool]) -> Rate:
        """The rate of a list of successes and failures."""
        flags = [bool(outcome) for outcome in outcomes]
        return Rate(sum(flags), len(flags))

    def __str__(self) -> str:
        if not self.trials:
            return "0/0 (no trials)"
        return f"{self.successes}/{self.trials} = {100 * self.rate:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"
