"""Episodes of a dataset that can be played again: what meta/episodes says about how each was played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf.demos.dataset import DemoDataset
from rlinf.demos.layout import episode_columns


@dataclass(frozen=True)
class Episode:
    """A demonstration of a dataset, and what the dataset says about how it was played."""

    first: int  # its first frame
    length: int  # frames
    reset_id: int | None = None
    success: bool = True
    noise_std: float | None = None  # of what was added to the expert's actions; None: no expert's
    noise_seed: int | None = None

    @property
    def is_expert(self) -> bool:
        """Whether `rlinf collect` made it."""
        return self.noise_std is not None

    @property
    def is_replayable(self) -> bool:
        """Whether the actions that were executed are known."""
        return self.reset_id is not None and (not self.noise_std or self.noise_seed is not None)


def choose_episodes(data: DemoDataset, count: int) -> list[Episode]:
    """`count` episodes, or fewer, spread over the dataset: those that can be played again before others."""
    kinds: dict[str, Any] = {"reset_id": int, "success": bool, "noise_std": float, "noise_seed": int}
    known: list[Episode] = []
    first = 0
    for files, said in zip(data.layout.episodes, episode_columns(data.layout, tuple(kinds)), strict=True):
        told = {name: value for name, value in said.items() if isinstance(value, kinds[name])}
        known.append(Episode(first, files.length, **told))
        first += files.length
    best = [e for e in known if e.is_replayable and e.success] or [e for e in known if e.success] or known
    count = min(count, len(best))
    return [best[i * len(best) // count] for i in range(count)]
