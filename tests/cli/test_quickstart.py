"""`rlinf quickstart` replaces what it made itself, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.commands import quickstart
from rlinf.errors import UserError


class CollectingError(Exception):
    """The job has got as far as its demonstrations."""


@pytest.mark.parametrize("name", ["demos/meta/collect.json", "sft/sft.json"])
def test_only_what_an_earlier_quickstart_made_is_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaces = []

    def collect(cfg: object, *, overwrite: bool) -> Path:
        replaces.append(overwrite)
        raise CollectingError

    monkeypatch.setattr(quickstart.jobs, "check_machine", lambda cfg: None)
    monkeypatch.setattr(quickstart, "collect_demos", collect)
    (tmp_path / "own" / name).parent.mkdir(parents=True)
    (tmp_path / "own" / name).write_text("mine")
    with pytest.raises(UserError, match=r"output=.* is not empty, and no quickstart in .*own made it; choose another"):
        quickstart.run_quickstart(0, tmp_path / "own", [])
    assert (tmp_path / "own" / name).read_text() == "mine"
    for _ in range(2):
        with pytest.raises(CollectingError):
            quickstart.run_quickstart(0, tmp_path / "new", [])
    assert replaces == [False, True]
