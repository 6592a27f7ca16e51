"""A person mistypes: one line that says what to type instead, status 2, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.terminal import types

BOMB = "a: &a [0,0,0,0,0,0,0,0,0,0]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("command", "last"),
    [
        (
            "rlinf train toy_ppo_compact learning_rate=3e-4",
            "error: command line: unknown key learning_rate; did you mean actor.optim.lr?",
        ),
        (
            "rlinf train toy_ppo_compact actor.optim.lr=-1",
            "error: command line: actor.optim.lr=-1 must be a number from 0 to 10; nearest is 0",
        ),
        (
            "rlinf plan toy_ppo_compact cluster.virtual_devices=$((10**12)) cluster.num_nodes=$((10**12))",
            "error: command line: cluster.num_nodes=1000000000000 must be an integer from 1 to 1024; nearest is 1024",
        ),
        (
            "rlinf plan ./bomb.yaml",
            "error: bomb.yaml: its aliases (&name, *name) expand to 1.23e+09 values; 100000 are the most",
        ),
    ],
)
def test_the_last_line_says_what_to_type(command: str, last: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB)
    answer = types(command, tmp_path)
    assert (answer.status, answer.lines[-1]) == (2, last)
    assert [p.name for p in tmp_path.iterdir()] == ["bomb.yaml"]


def test_looking_around(tmp_path: Path) -> None:
    answer = types("rlinf --version; rlinf recipes | grep quickstart", tmp_path)
    assert answer.status == 0
    assert answer.lines[0].startswith("rlinf ")
    assert answer.lines[1].split(maxsplit=1) == [
        "quickstart",
        "A compact π0 learns to press a handle on two CPU cores (`make quickstart`).",
    ]
