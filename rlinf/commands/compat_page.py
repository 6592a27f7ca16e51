"""The tables of docs/compat.md that are made from the code: what is restored, old and idle keys, other values.

`python -m rlinf.commands.compat_page docs/compat.md` writes them between their markers (`make docs`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rlinf.commands.key_reference import type_text
from rlinf.compat.keys import NO_EFFECT, RENAMED, NoEffect
from rlinf.compat.recipes import DIFFERENCES
from rlinf.compat.restored import RESTORED


def tables() -> Iterator[tuple[str, str]]:
    """Name of a marker and the table that stands there."""
    rows = [f"| {r.published} | {r.here} | {_links(r.switches)} | {r.pinned} |" for r in RESTORED]
    yield (
        "restored",
        "\n".join(["| published behaviour | here | restored by | pinned by |", "|---|---|---|---|", *rows]),
    )
    rows = [f"| `{old}` | {', '.join(f'`{name}`' for name in new)} |" for old, new in RENAMED.items()]
    yield "renamed", "\n".join(["| old | now |", "|---|---|", *rows])
    rows = [f"| `{row.key}` | {_values(row)} | {row.why} |" for row in NO_EFFECT]
    yield "no-effect", "\n".join(["| key | values accepted | why, and what to use instead |", "|---|---|---|", *rows])
    rows = [f"| `{row.recipes}` | `{row.key}` | {row.published} | {row.ours} | {row.why} |" for row in DIFFERENCES]
    yield "recipes", "\n".join(["| recipes | key | published | here | why |", "|---|---|---|---|---|", *rows])


def filled(page: str) -> str:
    """The page with every table between its markers."""
    for name, table in tables():
        begin, end = f"<!-- {name}: printed by `make docs` -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no place for the table {name}: {begin} ... {end}")
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


def _links(switches: tuple[str, ...]) -> str:
    """The short name of each switch, as a link to the file that holds it."""
    found = [module_and_name(switch) for switch in switches]
    return ", ".join(f"[`{name}`](../{module.replace('.', '/')}.py)" for module, name in found)


def module_and_name(name: str) -> tuple[str, str]:
    """Split `package.module.Class.name` after its module, which the file system knows."""
    parts = name.split(".")
    root = Path(__file__).parents[2]
    end = next(i for i in range(len(parts), 0, -1) if (root / "/".join(parts[:i])).with_suffix(".py").is_file())
    return ".".join(parts[:end]), ".".join(parts[end:])


def _values(row: NoEffect) -> str:
    return ", ".join(f"`{str(value).lower()}`" for value in row.only) or type_text(row.kind)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
