"""benchmarks/maniskill_env.py, one chunk: both layouts show the same pixels, and every number is printed."""

from __future__ import annotations

import maniskill_env
import pytest

pytestmark = pytest.mark.usefixtures("maniskill_path")


def test_one_chunk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maniskill_env, "AT_LEAST", 1.0)  # eight steps say nothing about four times
    maniskill_env.main(["--episodes", "1", "--steps", "8"])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith("equal pixels")
    assert [line.split(":")[0] for line in lines] == ["published", "ours", "ours"]
    published, ours, small = (float(line.split(" CPU ms/step")[0].split()[-1]) for line in lines)
    assert published > ours > small > 0
