"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: int, thing: str) -> str:
    """2, "batch" -> 2 batches."""
    plural = "es" if thing.endswith(("ss", "tch")) else "s"
    return f"{count} {thing}" + ("" if count == 1 else plural)


def bytes_text(number: float) -> str:
    """1536 -> 1.54 kB; decimal units."""
    return _scaled(number, (" B", " kB", " MB", " GB", " TB"))


def count_text(number: float) -> str:
    """3240000 -> 3.24 M."""
    return _scaled(number, ("", " k", " M", " B"))


def ranks_text(role: str, ranks: Sequence[int]) -> str:
    """ "actor", [0, 1, 2, 5] -> actor[0-2,5]."""
    starts = [r for r in ranks if r - 1 not in ranks]
    ends = [r for r in ranks if r + 1 not in ranks]
    parts = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"{role}[{','.join(parts)}]"


def _scaled(number: float, units: Sequence[str]) -> str:
    """Three digits and the unit, each a thousand of the one before, that keeps them below a thousand."""
    for unit in units[:-1]:
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"
